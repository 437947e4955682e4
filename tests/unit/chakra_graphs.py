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


def recorded_us(graphs: dict[int, Graph]) -> dict[Key, float]:
    """Return the µs of each message and collective, after its last participant had begun; and those of each send."""
    found: dict[Key, float] = {}
    for key, members in _partners(graphs).items():
        nodes = [graphs[rank][place] for rank, place in members]
        found[(SEND, *key)] = nodes[0]["duration_micros"]
        end = nodes[-1]["start_time_micros"] + nodes[-1]["duration_micros"]
        found[key] = end - max(node["start_time_micros"] for node in nodes)
    return found


def replay(graphs: dict[int, Graph], communication_us: dict[Key, float]) -> dict[int, list[float]]:
    """Return when each node ends, in µs: a node begins when its dependencies have ended, and peers have begun."""
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
            key = key_of[item]
            if node["type"] == SEND:
                ends[item] = ready[item] + communication_us[SEND, *key]
            elif all(other in ready for other in partners[key]):
                ends[item] = max(ready[other] for other in partners[key]) + communication_us[key]
            else:
                waiting.append(item)
        assert len(waiting) < len(left), f"nothing can run: {waiting[:5]}"
        left = waiting
    return {rank: [ends[rank, place] for place in range(len(nodes))] for rank, nodes in graphs.items()}
