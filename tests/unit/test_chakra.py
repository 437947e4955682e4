"""Chakra traces, read back by the official schema's text: complete graphs that replay to the recorded times."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.unit.chakra_graphs import COLLECTIVE, COMPUTE, RECEIVE, SEND, Key, communication_us, read, replay
from workbench.collectives import Ring
from workbench.errors import ConfigError
from workbench.trace.kinds import COMPUTE_KINDS
from workbench.trace.links import COLLECTIVES
from workbench.trace.recorder import MemoryRecorder
from workbench.trace.run import Run

pytest.importorskip("google.protobuf", reason="needs the chakra extra: pip install 'sgd-workbench[chakra]'")

FAST = wb.costs.Network(latency_s=1e-6, bandwidth_bytes_per_s=1e9, name="fast")
SLOW = wb.costs.Network(latency_s=1e-4, bandwidth_bytes_per_s=3e7, name="slow")
SUMS = wb.costs.Network(latency_s=1e-4, bandwidth_bytes_per_s=2e7, sum_s_per_byte=2e-9, name="sums take time")
WORK = wb.costs.Compute(
    forward_s=0.001, backward_s=0.002, update_s=0.0003, stragglers=wb.costs.stragglers.Lognormal(sigma=0.8)
)
ALGORITHMS = {
    "synchronous": wb.SynchronousSGD(),
    "pipe": wb.PipeSGD(width=2),
    "pipe-3": wb.PipeSGD(width=3),
    "layerwise": wb.LayerwiseSGD(bucket_bytes=1e4),
    "lanes": wb.LayerwiseSGD(bucket_bytes=1e4, lanes=2, collective=Ring()),
    "layerwise-ring": wb.LayerwiseSGD(bucket_bytes=1e4, collective=Ring()),
    "pipe-ring": wb.PipeSGD(width=2, collective=Ring()),
    "dear": wb.DeAR(),
    "local": wb.LocalSGD(every=3),
    "async": wb.AsyncSGD(),
    "async-server": wb.AsyncSGD(dedicated=True),
}


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
        assert all(node["duration_micros"] for node in nodes if node["attr"]["is_cpu_op"]), "no work of no time"
        for node in nodes:
            if node["type"] in (SEND, RECEIVE):
                attr = node["attr"]
                assert attr["comm_src" if node["type"] == SEND else "comm_dst"] == rank
                side = sent if node["type"] == SEND else received
                key = (attr["comm_src"], attr["comm_dst"], attr["comm_tag"])
                assert key not in side
                side[key] = attr["comm_size"]
    assert sent == received
    ends = replay(graphs, communication_us(graphs))
    for rank, nodes in graphs.items():
        expected = [node["start_time_micros"] + node["duration_micros"] for node in nodes]
        np.testing.assert_allclose(ends[rank], expected, atol=0.01 * lasted_us(run) / 7)
    assert max(map(max, ends.values())) == pytest.approx(lasted_us(run), rel=0.005)


EXACT = ["synchronous", "pipe", "pipe-3", "layerwise", "dear", "local", "pipe-ring"]
OTHER_NETWORKS = [(name, *pair) for name in EXACT for pair in ((FAST, SLOW), (SLOW, FAST))]


@pytest.mark.parametrize(("name", "recorded", "other"), [*OTHER_NETWORKS, ("layerwise-ring", FAST, SLOW)])
def test_a_replay_on_another_network_is_the_simulation_on_it(
    name: str, recorded: Any, other: Any, tmp_path: Path
) -> None:
    """The dependencies are those of the algorithm, also those that did not delay anything in the record."""
    detail = "formula" if name == "dear" else "auto"
    run, expected = (simulated(name, network, detail=detail) for network in (recorded, other))
    graphs = read(run.export_chakra(tmp_path / "recorded"))
    seconds = communication_us(read(expected.export_chakra(tmp_path / "other")))
    ends = replay(graphs, seconds)
    assert lasted_us(run) != pytest.approx(lasted_us(expected), rel=0.02)
    assert max(map(max, ends.values())) == pytest.approx(lasted_us(expected), rel=0.01)


def test_the_bytes_are_those_of_the_run(tmp_path: Path) -> None:
    """Three ranks all-reduce n bytes, so a rank sends 4/3 n of them: `comm_size` is n."""
    for name in ("synchronous", "layerwise-ring"):
        run = simulated(name, FAST)
        graphs = read(run.export_chakra(tmp_path / name))
        leaving = [node for nodes in graphs.values() for node in nodes if node["type"] in (SEND, COLLECTIVE)]
        sent = sum(node["attr"]["bytes"] for node in leaving)  # whole bytes; a third of one may be missing in each
        assert sent == pytest.approx(run.steps()[-1]["bytes_sent"], abs=len(leaving))
        if name == "synchronous":
            assert {node["attr"]["comm_size"] for node in leaving} == {run.info["model"]["message_bytes"]}


def made(rows: dict[int, list[tuple[Any, ...]]], runtime: str = "simulated") -> Run:
    """Return a run with rows (kind, lane, start_s, end_s, step, bucket, bytes, peer); times in ms."""
    recorders = []
    for rank, mine in rows.items():
        recorders.append(MemoryRecorder(rank))
        for kind, lane, start_ms, end_ms, *numbers in mine:
            recorders[-1].span(kind, lane, start_ms * 1e-3, end_ms * 1e-3, *numbers)
    return Run.from_memory({"runtime": runtime, "status": "finished"}, recorders)


def test_each_dependency_has_its_reason(tmp_path: Path) -> None:
    run = made(
        {
            0: [
                ("forward", "compute", 0, 1, 0),
                ("backward", "compute", 1, 3, 0),
                ("all_reduce", "comm", 2, 4, 0, 0, 10),
                ("all_reduce", "comm", 3, 5, 0, 1, 20),
                ("wait", "compute", 3, 5, 0),
                ("apply", "compute", 5, 6, 0, 1),
                ("forward", "compute", 6.5, 7, 1),
            ]
        }
    )
    (nodes,) = read(run.export_chakra(tmp_path / "trace")).values()
    found = {node["id"]: (node["name"], node["data_deps"], node["duration_micros"]) for node in nodes}
    assert found == {
        0: ("forward", [], 1000),
        1: ("backward", [0], 1000),  # until a collective began
        2: ("backward", [1], 1000),
        3: ("all_reduce", [1], 2000),
        4: ("all_reduce", [2, 3], 1000),  # it waited for the one before it on its lane
        5: ("apply", [4], 1000),  # of the gradient of bucket 1; its backward pass is before 4
        6: ("unrecorded", [5], 500),
        7: ("forward", [6], 500),
    }


def test_communication_that_others_did_not_record_is_a_compute_node(tmp_path: Path) -> None:
    """A reader would wait for the other side for ever."""
    rows = [("forward", "compute", 0, 1, 0), ("all_reduce", "comm", 1, 2, 0, -1, 10)]
    late = [
        ("all_reduce", "comm", 2, 4, 1, -1, 10),
        ("send", "comm", 4, 5, 1, -1, 8, 1),
        ("recv", "comm", 5, 7, 1, -1, 8, 1),
    ]
    graphs = read(made({0: [*rows, *late], 1: rows}).export_chakra(tmp_path / "trace"))
    types = [
        [(node["name"], node["type"]) for node in nodes if node["name"] != "unrecorded"] for nodes in graphs.values()
    ]
    assert types[1] == [("forward", COMPUTE), ("all_reduce", COLLECTIVE)]
    assert types[0] == [*types[1], ("all_reduce", COMPUTE), ("send", COMPUTE), ("recv", COMPUTE)]


def test_a_profiles_bytes_are_those_of_the_buffer(tmp_path: Path) -> None:
    rows = [("compute", "stream 7", 0, 1, 0), ("all_reduce", "stream 9", 1, 2, 0, 0, 400)]
    for runtime, size in (("torch.profiler", 400), ("torch", 300)):
        graphs = read(made(dict.fromkeys(range(3), rows), runtime).export_chakra(tmp_path / "trace"))
        assert {node["attr"]["comm_size"] for nodes in graphs.values() for node in nodes[1:]} == {size}


def test_a_gradients_message_depends_on_its_backward_pass(tmp_path: Path) -> None:
    """Also if a server on the same rank was the last to do anything."""
    rows = [
        ("forward", "compute", 0, 1, 0),
        ("backward", "compute", 1, 3, 0),
        ("recv", "comm", 2, 3.01, 0, -1, 8, 1),
        ("send", "comm", 3.02, 5, 0, 0, 16, 1),
        ("recv", "comm", 3.02, 7, 0, -1, 32, 1),
        ("forward", "compute", 7.01, 8, 1),
    ]
    other = [
        ("send", "comm", 2, 3, 0, -1, 8, 0),
        ("recv", "comm", 3, 5, 0, -1, 16, 0),
        ("send", "comm", 5, 7, 0, -1, 32, 0),
    ]
    nodes = read(made({0: rows, 1: other}).export_chakra(tmp_path / "trace"))[0]
    names = [node["name"] for node in nodes]
    before = {place: nodes[place]["data_deps"] for place in range(len(nodes))}
    (send,) = (place for place, name in enumerate(names) if name == "send")
    assert names[before[send][0]] == "unrecorded"
    assert sorted(names[place] for place in before[before[send][0]]) == ["backward", "recv"]
    assert [names[place] for place in before[before[len(nodes) - 1][0]]] == ["send", "recv"]


def test_a_message_within_a_rank_is_a_dependency(tmp_path: Path) -> None:
    """The server's second update waits for the gradient of the worker on its own rank, and for the first update."""
    rows = [
        ("forward", "compute", 0, 1, 0),
        ("backward", "compute", 1, 3, 0),
        ("recv", "comm", 0, 6, 0, -1, 8, 1),
        ("send", "comm", 3, 7.2, 0, 0, 0, 0),
        ("apply", "server", 6, 7, 0, 0),
        ("recv", "comm", 7, 7.1, 0, -1, 0, 0),
        ("apply", "server", 7.1, 8, 0, 0),
    ]
    other = [("send", "comm", 0, 6, 0, -1, 8, 0)]
    nodes = read(made({0: rows, 1: other}).export_chakra(tmp_path / "trace"))[0]
    found = {node["id"]: (node["name"], node["type"], node["data_deps"]) for node in nodes}
    assert found == {
        0: ("forward", COMPUTE, []),
        1: ("recv", RECEIVE, []),
        2: ("backward", COMPUTE, [0]),
        3: ("apply", COMPUTE, [1]),
        4: ("unrecorded", COMPUTE, [2, 3]),
        5: ("apply", COMPUTE, [4]),
    }


def test_what_cannot_be_exported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has no trace"):
        made({0: []}).export_chakra(tmp_path / "trace")
    run = made({0: [("forward", "compute", 0, 1, 0)]})
    with pytest.raises(ConfigError, match="such as graph"):
        run.export_chakra("")
    with pytest.raises(ConfigError, match="lasts 1e\\+15 s"):
        made({0: [("forward", "compute", 0, 1e18, 0)]}).export_chakra(tmp_path / "trace")
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(ConfigError, match=r"pip install 'sgd-workbench\[chakra\]'"):
        run.export_chakra(tmp_path / "trace")
    assert not list(tmp_path.iterdir())
