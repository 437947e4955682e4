"""Chakra traces, read back by the official schema's text: complete graphs that replay to the recorded times."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.collectives import Ring
from workbench.errors import ConfigError
from workbench.trace.kinds import COMPUTE_KINDS
from workbench.trace.links import COLLECTIVES
from workbench.trace.recorder import MemoryRecorder
from workbench.trace.run import Run

pytest.importorskip("google.protobuf", reason="needs the chakra extra: pip install 'sgd-workbench[chakra]'")

COMPUTE, SEND, RECEIVE, COLLECTIVE = "COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE"
FAST = wb.costs.Network(latency_s=1e-6, bandwidth_bytes_per_s=1e9, name="fast")
SLOW = wb.costs.Network(latency_s=1e-4, bandwidth_bytes_per_s=2e7, name="slow")
SUMS = wb.costs.Network(latency_s=1e-4, bandwidth_bytes_per_s=2e7, sum_s_per_byte=2e-9, name="sums take time")
WORK = wb.costs.Compute(forward_s=0.001, backward_s=0.002, update_s=0.0003)
ALGORITHMS = {
    "synchronous": wb.SynchronousSGD(),
    "pipe": wb.PipeSGD(width=2),
    "pipe-3": wb.PipeSGD(width=3),
    "layerwise": wb.LayerwiseSGD(bucket_bytes=1e4),
    "lanes": wb.LayerwiseSGD(bucket_bytes=1e4, lanes=2, collective=Ring()),
    "pipe-ring": wb.PipeSGD(width=2, collective=Ring()),
    "dear": wb.DeAR(),
    "local": wb.LocalSGD(every=3),
    "async": wb.AsyncSGD(),
    "async-server": wb.AsyncSGD(dedicated=True),
}


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


Graph = list[dict[str, Any]]


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

Key = tuple[Any, ...]


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


# -- runs ----------------------------------------------------------------------------------------------------------


def simulated(name: str, network: Any, workers: int = 3, **options: Any) -> Run:
    algorithm, problem = ALGORITHMS[name], wb.problems.get("digits-mlp")
    return wb.simulate(
        algorithm, problem, workers=workers, timing_only=True, steps=7, network=network, compute=WORK, **options
    )


def lasted_us(run: Run) -> float:
    return float(run.spans.table["end_s"].max() - run.spans.table["start_s"].min()) * 1e6


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("network", [FAST, SUMS], ids=lambda network: network.name)
def test_a_graph_is_whole_and_replays_to_the_recorded_times(name: str, network: Any, tmp_path: Path) -> None:
    run = simulated(name, network)
    graphs = read(run.export_chakra(tmp_path / "trace"))
    table, kinds = run.spans.table, run.spans.kind_names
    assert sorted(graphs) == run.spans.ranks
    micros = {column: np.rint((table[column] - table["start_s"].min()) * 1e6) for column in ("start_s", "end_s")}
    sent: dict[Key, list[int]] = {}
    received: dict[Key, list[int]] = {}
    for rank, nodes in graphs.items():
        assert [node["id"] for node in nodes] == list(range(len(nodes)))
        assert all(other < node["id"] for node in nodes for other in node["data_deps"]), "without a cycle"
        mine = table["rank"] == rank
        computing = [node for node in nodes if node["name"] in COMPUTE_KINDS]
        assert {node["type"] for node in computing} == {COMPUTE}
        chosen = mine & np.isin(kinds, COMPUTE_KINDS)
        expected = (micros["end_s"] - micros["start_s"])[chosen].sum()
        assert sum(node["duration_micros"] for node in computing) == expected
        leaving = [node for node in nodes if node["type"] in (SEND, COLLECTIVE)]
        chosen = mine & np.isin(kinds, ["send", *COLLECTIVES])
        assert sum(node["attr"]["bytes"] for node in leaving) == table["bytes"][chosen].sum()
        for node in nodes:
            if node["type"] in (SEND, RECEIVE):
                attr = node["attr"]
                assert attr["comm_src" if node["type"] == SEND else "comm_dst"] == rank
                side = sent if node["type"] == SEND else received
                key = (attr["comm_src"], attr["comm_dst"], attr["comm_tag"])
                assert key not in side
                side[key] = attr["comm_size"]
    assert sent == received
    ends = replay(graphs, recorded_us(graphs))
    for rank, nodes in graphs.items():
        expected = [node["start_time_micros"] + node["duration_micros"] for node in nodes]
        np.testing.assert_allclose(ends[rank], expected, atol=0.01 * lasted_us(run) / 7)
    assert max(map(max, ends.values())) == pytest.approx(lasted_us(run), rel=0.005)


@pytest.mark.parametrize("name", ["synchronous", "pipe", "pipe-3", "layerwise", "dear", "local", "pipe-ring", "lanes"])
@pytest.mark.parametrize(("recorded", "other"), [(FAST, SLOW), (SLOW, FAST)], ids=["fast-to-slow", "slow-to-fast"])
def test_a_replay_on_another_network_is_the_simulation_on_it(
    name: str, recorded: Any, other: Any, tmp_path: Path
) -> None:
    """The dependencies are those of the algorithm, also those that did not delay anything in the record."""
    detail = "formula" if name == "dear" else "auto"
    run, expected = (simulated(name, network, detail=detail) for network in (recorded, other))
    graphs = read(run.export_chakra(tmp_path / "recorded"))
    seconds = recorded_us(read(expected.export_chakra(tmp_path / "other")))
    ends = replay(graphs, seconds)
    assert lasted_us(run) != pytest.approx(lasted_us(expected), rel=0.02)
    assert max(map(max, ends.values())) == pytest.approx(lasted_us(expected), rel=0.01)
