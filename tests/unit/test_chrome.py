"""A run's Chrome trace, read back: the same description and spans, with times to the nanosecond."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.analysis import compare, critical_path
from workbench.errors import ConfigError
from workbench.trace import Run, from_profiler
from workbench.trace.recorder import FileRecorder, MemoryRecorder

COMPUTE = wb.costs.Compute(forward_s=0.001, backward_s=0.002, update_s=0.0003)
ALGORITHMS = {
    "pipe": wb.PipeSGD(width=2),
    "lanes": wb.LayerwiseSGD(bucket_bytes=1e4, lanes=2, collective=wb.collectives.Ring()),
    "async": wb.AsyncSGD(),
}


def same(found: Run, expected: Run) -> None:
    """Check the description, the headers and the spans, with times to 2 ns."""
    assert found.info == json.loads(json.dumps({**expected.info, "id": expected.id}))
    assert found.headers == expected.headers
    ours, theirs = found.spans, expected.spans
    assert ours.lane_names.tolist() == theirs.lane_names.tolist()
    for column in theirs.table.dtype.names:
        if column.endswith("_s"):
            np.testing.assert_allclose(ours.table[column], theirs.table[column], rtol=0, atol=2e-9)
        elif column != "lane":
            assert ours.table[column].tolist() == theirs.table[column].tolist()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_comes_back(name: str, tmp_path: Path) -> None:
    problem = wb.problems.get("digits-mlp")
    run = wb.simulate(ALGORITHMS[name], problem, workers=3, timing_only=True, steps=5, compute=COMPUTE)
    found = from_profiler(run.export_chrome(tmp_path / "trace.json"))
    same(found, run)
    assert found.num_ranks == run.num_ranks and found.label == run.label
    assert critical_path(found.spans).per_rank() == pytest.approx(critical_path(run.spans).per_rank(), abs=1e-6)
    assert run.label in str(compare([found]))
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    same(from_profiler(packed), run)
    same(from_profiler(found.export_chrome(tmp_path / "again.json")), run)


def test_a_stored_run_of_ranks_with_clocks_of_their_own_comes_back(tmp_path: Path) -> None:
    """Its times are those of rank 0's clock; lanes have names of any kind, and spans of one lane overlap."""
    for rank in range(2):
        recorder = FileRecorder(tmp_path, rank, {"rank": rank, "host": f"node-{rank}", "pid": 40 + rank})
        recorder.clock(0.0, -1000.125 * rank)
        begin = 7.000_000_001 + 1000.125 * rank
        recorder.span("forward", "compute", begin, begin + 0.25, -1)
        recorder.span("all_reduce", "comm (2)", begin + 0.1, begin + 0.6, 3, 2, 2**40)
        recorder.span("all_reduce", "comm (2)", begin + 0.2, begin + 0.7, 3, 3, 4000, 1 - rank)
        recorder.close()
    (tmp_path / "run.json").write_text(json.dumps({"format": 2, "status": "finished", "num_workers": 2}))
    run = Run.load(tmp_path)
    found = from_profiler(run.export_chrome(tmp_path / "trace.json"))
    same(found, run)
    assert found.headers[1]["host"] == "node-1" and found.spans.lanes == ("compute", "comm (2)")


def test_a_failed_run_comes_back_without_a_word_on_its_steps(tmp_path: Path) -> None:
    """Rows of metrics are not exported, so nobody knows how many steps it took."""
    recorder = MemoryRecorder(0)
    recorder.span("forward", "compute", 0.0, 1.0, 7)
    run = Run.from_memory({"status": "failed", "error": "rank 1: the loss is nan"}, [recorder])
    found = from_profiler(run.export_chrome(tmp_path / "trace.json"))
    assert found.failure_summary == "failed: rank 1: the loss is nan"


def test_times_that_no_clock_shows_are_cut(tmp_path: Path) -> None:
    """A damaged file may hold them."""
    recorder = MemoryRecorder(0)
    recorder.span("forward", "compute", -1e308, 1e308, 0)
    run = Run.from_memory({"id": "damaged", "algorithm": {"name": "SynchronousSGD"}, "num_workers": 1}, [recorder])
    text = run.export_chrome(tmp_path / "trace.json").read_text()
    assert "Infinity" not in text and "NaN" not in text and json.loads(text)


def test_a_run_without_spans_comes_back(tmp_path: Path) -> None:
    run = Run.from_memory({"status": "finished"}, [MemoryRecorder(0), MemoryRecorder(1)])
    same(from_profiler(run.export_chrome(tmp_path / "trace.json")), run)


def written(tmp_path: Path) -> Any:
    recorder = MemoryRecorder(0)
    recorder.span("forward", "compute", 0.0, 1.0, 0)
    path = Run.from_memory({"status": "finished"}, [recorder]).export_chrome(tmp_path / "trace.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("otherData", "workbench", "info"), None),
        (("otherData", "workbench", "info", "status"), 3),
        (("otherData", "workbench", "origin_s"), "0"),
        (("traceEvents", -1, "cat"), "sideways"),
        (("traceEvents", -1, "dur"), None),
        (("traceEvents", -1, "args", "step"), 1.5),
        (("traceEvents", -1, "tid"), 9),
        (("traceEvents", -1, "pid"), 0),
        (("traceEvents", -1), "forward"),
    ],
)
def test_a_changed_file_is_one_error_that_says_what_to_do(where: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    trace = written(tmp_path)
    inner = trace
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(trace))
    with pytest.raises(ConfigError, match=r"changed\.json is not as .* wrote it .*: export the run again"):
        from_profiler(path)


def test_an_exported_run_is_read_alone(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(written(tmp_path)))
    (tmp_path / "trace.json").unlink()
    with pytest.raises(ConfigError, match=r"a\.json is a whole run .*: give this file alone"):
        from_profiler(tmp_path)


def test_a_trace_in_perfettos_protobuf_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    path.write_bytes(b"\n\x0c\x08\x01\x52\x08\xff\xfe\x00\x01\x02\x03\x04\x05")
    with pytest.raises(ConfigError, match="in protobuf: convert it with `traceconv json"):
        from_profiler(path)


def test_a_profile_in_the_formats_other_form_is_read(tmp_path: Path) -> None:
    """The format allows the list of events without an object around it; other tools write it."""
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 5.0}
    update = {**event, "cat": "user_annotation", "name": "Optimizer.step#SGD.step", "ts": 9.0}
    (tmp_path / "list.json").write_text(json.dumps([event, update]))
    assert from_profiler(tmp_path / "list.json").spans.kind_names.tolist() == ["forward", "apply"]
