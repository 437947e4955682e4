"""Read Chakra traces by the official schema's text alone, and replay their graphs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMPUTE, SEND, RECEIVE, COLLECTIVE = "COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE"
Graph = list[dict[str, Any]]
Key = tuple[Any, ...]

# -- a reader of the format, by the schema's text alone ------------------------------------------------------------


def _schema() -> tuple[dict[str, dict[int, tuple[str, str, bool]]], dict[str, dict[int, str]]]:
    """Return message -> number -> (field, type, repeated), and enumeration -> number -> name."""
    text = re.sub(r"//.*", "", (Path(__file__).parent / "et_def.proto").read_text())
    text = re.sub(r"oneof \w+ {([^}]*)}", r"\1", text)
    messages = {
        name: {
            int(number): (title, kind, bool(repeated))
            for repeated, kind, title, number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", body)
        }
        for name, body in re.findall(r"message (\w+) {([^}]*)}", text)
    }
    enumerations = {
        name: {int(number): title for title, number in re.findall(r"(\w+) = (\d+);", body)}
        for name, body in re.findall(r"enum (\w+) {([^}]*)}", text)
    }
    return messages, enumerations


MESSAGES, ENUMERATIONS = _schema()


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def _parsed(kind: str, data: bytes) -> dict[str, Any]:
    """Return a message's fields. A field that the schema does not have, or of another type, is an error."""
    found: dict[str, Any] = {title: [] for title, _, repeated in MESSAGES[kind].values() if repeated}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        title, type_, repeated = MESSAGES[kind][key >> 3]
        values: list[Any]
        if key & 7 == 0:
            assert type_ in ("int32", "int64", "uint32", "uint64", "bool") or type_ in ENUMERATIONS
            value, at = _varint(data, at)
            values = [ENUMERATIONS[type_][value] if type_ in ENUMERATIONS else value]
        else:
            assert key & 7 == 2, "no field of 8 or 4 bytes is used"
            size, at = _varint(data, at)
            content, at = data[at : at + size], at + size
            if type_ == "string":
                values = [content.decode()]
            elif type_ in MESSAGES:
                values = [_parsed(type_, content)]
            else:
                assert type_ == "uint64" and repeated, "packed numbers"
                values, place = [], 0
                while place < len(content):
                    value, place = _varint(content, place)
                    values.append(value)
        if repeated:
            found[title] += values
        else:
            (found[title],) = values
    return found


def _messages(path: Path) -> Iterator[dict[str, Any]]:
    data, at, kind = path.read_bytes(), 0, "GlobalMetadata"
    while at < len(data):
        size, at = _varint(data, at)
        yield _parsed(kind, data[at : at + size])
        at, kind = at + size, "Node"


def read(paths: list[Path]) -> dict[int, Graph]:
    """Return rank -> its nodes, with the attributes as entries of `attr`."""
    graphs = {}
    for path in paths:
        metadata, *nodes = _messages(path)
        assert metadata["version"] == "1.0.0"
        for node in nodes:
            node["attr"] = {
                attribute.pop("name"): next(iter(attribute.values())) for attribute in map(dict, node["attr"])
            }
            node.setdefault("id", 0)
            node.setdefault("start_time_micros", 0)
            node.setdefault("duration_micros", 0)
        graphs[int(path.suffixes[-2][1:])] = nodes
    return graphs


# -- a replay of the graphs ----------------------------------------------------------------------------------------


def _partners(graphs: dict[int, Graph]) -> dict[Key, list[tuple[int, int]]]:
    """Return the nodes of each message (its send first) and of each collective, as (rank, id)."""
    found: dict[Key, list[tuple[int, int]]] = defaultdict(list)
    for kinds in ((SEND,), (RECEIVE, COLLECTIVE)):
        for rank, nodes in graphs.items():
            counts: dict[Key, int] = defaultdict(int)
            for node in nodes:
                attr = node["attr"]
                if node["type"] not in kinds:
                    continue
                if node["type"] == COLLECTIVE:
                    key: Key = (attr["comm_type"], attr["step"], attr.get("bucket"))
                    counts[key] += 1
                    key = (*key, counts[key])
                else:
                    key = (attr["comm_src"], attr["comm_dst"], attr["comm_tag"])
                found[key].append((rank, node["id"]))
    return found


def communication_us(graphs: dict[int, Graph]) -> dict[Key, dict[int, tuple[float, bool]]]:
    """Return, for each message and collective, on each rank, how long it lasted in µs, and whether it waited for peers.

    If it did, the time begins when the last of them had begun. A send does not wait if its message was buffered: if it
    ended before the receive began.
    """
    found: dict[Key, dict[int, tuple[float, bool]]] = {}
    for key, members in _partners(graphs).items():
        nodes = [graphs[rank][place] for rank, place in members]
        last = max(node["start_time_micros"] for node in nodes)
        for (rank, _), node in zip(members, nodes, strict=True):
            begin, end = node["start_time_micros"], node["start_time_micros"] + node["duration_micros"]
            waits = node["type"] != SEND or end > last
            found.setdefault(key, {})[rank] = (end - (last if waits else begin), waits)
    return found


def replay(graphs: dict[int, Graph], communication: dict[Key, dict[int, tuple[float, bool]]]) -> dict[int, list[float]]:
    """Return when each node ends, in µs: a node begins when its dependencies have ended, and peers have begun.

    Args:
        communication: of `communication_us`, of this record or of another one of the same program.
    """
    partners = _partners(graphs)
    key_of = {member: key for key, members in partners.items() for member in members}
    ready: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    left = [(rank, place) for rank, nodes in graphs.items() for place in range(len(nodes))]
    while left:
        waiting = []
        for item in left:
            rank, place = item
            node = graphs[rank][place]
            before = [(rank, other) for other in node["data_deps"]]
            if not all(other in ends for other in before):
                waiting.append(item)
                continue
            ready[item] = max((ends[other] for other in before), default=0.0)
            if node["type"] == COMPUTE:
                ends[item] = ready[item] + node["duration_micros"]
                continue
            lasts_us, waits = communication[key_of[item]][rank]
            peers = partners[key_of[item]] if waits else [item]
            if all(other in ready for other in peers):
                ends[item] = max(ready[other] for other in peers) + lasts_us
            else:
                waiting.append(item)
        assert len(waiting) < len(left), f"nothing can run: {waiting[:5]}"
        left = waiting
    return {rank: [ends[rank, place] for place in range(len(nodes))] for rank, nodes in graphs.items()}
