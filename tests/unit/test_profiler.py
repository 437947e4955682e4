"""Profiles of torch.profiler as runs: a real one of this process, and traces of GPU ranks written here in the profiler's format."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

import workbench as wb
from tests.forked import forked
from workbench import plots
from workbench.analysis import critical_path, overlap
from workbench.errors import ConfigError
from workbench.trace import from_profiler
from workbench.trace.profile import Row, calls, on_one_clock

Event = dict[str, Any]


# ---------------------------------------------------------------- a real profile, on the processor


LOOP = """
import sys
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from workbench.trace import from_profiler

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=2, repeat=1)) as prof:
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        prof.step()
prof.export_chrome_trace(sys.argv[1])
with profile(activities=[ProfilerActivity.CPU]) as prof:
    torch.ones(8).add_(1)
spans = from_profiler(prof).spans
print("ended", spans.kind_names.tolist(), spans.table["step"].tolist())
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a plain loop, of which the schedule records the last two; in a process of its own, for profilers have crashed."""
    path = tmp_path_factory.mktemp("profile") / "loop.json"
    process = subprocess.run(forked("-c", LOOP, str(path)), capture_output=True, text=True, timeout=100, check=True)
    assert "ended ['forward'] [0]" in process.stdout, "a profiler itself is read, too"
    return path


def test_a_real_profile_has_the_phases_of_its_steps(recorded: Path) -> None:
    run = from_profiler(recorded)
    assert (run.id, run.label, run.info["runtime"]) == ("loop", "loop", "torch.profiler") and run.headers[0][
        "rank"
    ] == 0
    phases = [(int(row["step"]), kind) for row, kind in zip(run.spans.table, run.spans.kind_names, strict=True)]
    assert phases == [(step, kind) for step in (1, 2) for kind in ("forward", "backward", "apply")], (
        "clipping is a part of the update"
    )
    table = run.spans.table
    assert run.spans.lanes == ("compute",) and table["start_s"][0] == 0
    assert (table["end_s"] > table["start_s"]).all() and (table["start_s"][1:] >= table["end_s"][:-1]).all()
    found = overlap(run.spans)
    assert found.fraction is None and (found.compute_s > 0).all()
    assert set(critical_path(run.spans).kind_names) <= {"forward", "backward", "apply", "nothing"}


def test_spans_last_as_long_as_the_profiler_says(recorded: Path) -> None:
    events = json.loads(recorded.read_text())["traceEvents"]
    updates = [event for event in events if str(event.get("name")).startswith("Optimizer.step#")]
    spans = from_profiler(recorded).spans.select(kinds=["apply"]).table
    ends = [event["ts"] + event["dur"] for event in updates]
    assert spans["end_s"][1] - spans["end_s"][0] == pytest.approx((ends[1] - ends[0]) * 1e-6, abs=1e-8)
    for span, event in zip(spans, updates, strict=True):
        assert span["end_s"] - span["start_s"] >= event["dur"] * 1e-6 - 1e-8


def test_packed_files_and_folders_are_read_too(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "of-a-day").mkdir()
    (tmp_path / "of-a-day" / "a.json.gz").write_bytes(gzip.compress(recorded.read_bytes()))
    assert from_profiler(tmp_path / "of-a-day").id == "of-a-day"


def test_a_profile_becomes_a_figure_and_is_saved_and_read_again(recorded: Path, tmp_path: Path) -> None:
    run = from_profiler(recorded)
    again = wb.Run.load(run.save(tmp_path / "run"))
    assert len(again.spans) == len(run.spans) and again.label == "loop"
    figure = plots.timeline(run, steps=slice(1, 3))
    assert {bar.name for bar in figure.data} == {"forward", "backward", "apply"}


# ---------------------------------------------------------------- traces in the profiler's format, of a GPU


def gpu_trace(
    rank: int, *, late_us: float = 0.0, host: str = "node", base_ns: int = 0, sum_us: float = 1200.0
) -> dict[str, Any]:
    """Two steps of 3 ms on streams 7 and 20, as Kineto writes them: names, categories and arguments are Kineto's, times
    are invented.

    The host launches forward at 0 to 200 us and backward at 300 to 400, from a thread of autograd's; kernels run from
    500 us on.
    """
    events: list[Event] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}}]
    number = iter(range(100, 200))

    def host_event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 4242, "tid": tid, "ts": ts + late_us, "dur": dur, "args": args}
        )

    def kernel(
        name: str,
        launch: float,
        ts: float,
        dur: float,
        *,
        stream: int = 7,
        tid: int = 1,
        cat: str = "kernel",
        **args: Any,
    ) -> None:
        key = next(number)
        host_event("cudaLaunchKernel", "cuda_runtime", launch, 5, tid, correlation=key)
        args = {"device": rank, "stream": stream, "correlation": key, **args}
        events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": rank,
                "tid": stream,
                "ts": ts + late_us,
                "dur": dur,
                "args": args,
            }
        )

    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    told = {"Collective name": "allreduce", "dtype": "Float", "Group size": 2}
    for step in (5, 6):
        at = 3000.0 * (step - 5)
        host_event(f"ProfilerStep#{step}", "user_annotation", at, 3000)
        host_event("DistributedDataParallel.forward", "user_annotation", at + 10, 190)
        host_event("aten::mm", "cpu_op", at + 100, 50)
        kernel("Memcpy HtoD (Pageable -> Device)", at + 20, at + 500, 100, cat="gpu_memcpy")
        kernel("sm90_xmma_gemm", at + 120, at + 600, 300)
        host_event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", at + 300, 100, tid=2)
        kernel("sm90_xmma_gemm", at + 310, at + 900, 400, tid=2)
        kernel(
            nccl,
            at + 350,
            at + 1100,
            sum_us,
            stream=20,
            tid=2,
            **told,
            **{"In msg nelems": 1000, "Out msg nelems": 1000},
        )
        host_event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", at + 380, 60, tid=2)
        kernel("sm90_xmma_gemm", at + 390, at + 1300, 500, tid=2)
        host_event("Optimizer.step#SGD.step", "user_annotation", at + 500, 60)
        kernel("multi_tensor_apply_kernel", at + 510, at + max(1100 + sum_us, 1800), 200)
        host_event("nccl:all_reduce", "user_annotation", at + 345, 20, tid=2)
        events.append(
            {
                "ph": "X",
                "cat": "gpu_user_annotation",
                "name": "nccl:all_reduce",
                "pid": rank,
                "tid": 20,
                "ts": at,
                "dur": 9,
            }
        )
    kernel("elementwise_kernel", -1, 5900, 50)
    return {
        "schemaVersion": 1,
        "host_name": host,
        "baseTimeNanoseconds": base_ns,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": events,
    }


def written(folder: Path, *traces: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, trace in enumerate(traces):
        (folder / f"trace{number}.json").write_text(json.dumps(trace))
    return folder


def test_streams_are_lanes_and_kernels_are_of_the_phase_that_launched_them(tmp_path: Path) -> None:
    run = from_profiler(written(tmp_path / "gpu", gpu_trace(1)))
    spans = run.spans
    assert spans.ranks == [1] and spans.lanes == ("stream 7", "stream 20") and run.info["num_workers"] == 2
    rows = zip(spans.kind_names.tolist(), spans.lane_names.tolist(), spans.table, strict=True)
    found = [
        (kind, lane, round(float(row["start_s"]) * 1e6), int(row["step"]), int(row["bytes"]))
        for kind, lane, row in rows
    ]
    assert found[:6] == [
        ("forward", "stream 7", 0, 5, 0),  # the copy; times begin with the first span
        ("forward", "stream 7", 100, 5, 0),
        ("backward", "stream 7", 400, 5, 0),
        ("all_reduce", "stream 20", 600, 5, 4000),
        ("backward", "stream 7", 800, 5, 0),
        ("apply", "stream 7", 1800, 5, 0),
    ]
    rows_named = plots.timeline(run, slice(5, 7)).layout.yaxis.ticktext
    assert ["stream 7" in rows_named[0], "stream 20" in rows_named[1]] == [True, True], (
        "computation above communication"
    )
    assert found[-1] == ("compute", "stream 7", 5400, -1, 0), "a kernel that was launched before the first step"


def test_overlap_of_a_gpu_rank_in_numbers_done_in_the_head(tmp_path: Path) -> None:
    """The sum runs from 1100 to 2300.

    Backward overlaps it until 1300, and from 1300 to 1800: 700 of 1200 are hidden.
    """
    found = overlap(from_profiler(written(tmp_path / "gpu", gpu_trace(0))).spans, slice(5, 6))
    assert found.fraction == pytest.approx(700 / 1200) and found.exposed_s[0] == pytest.approx(500e-6)
    assert found.compute_s[0] == pytest.approx(1500e-6) and found.window_s[0] == pytest.approx(3000e-6)


def test_all_ranks_are_on_one_clock_and_the_path_goes_over_them(tmp_path: Path) -> None:
    """Rank 1 comes 600 us late to each sum, on another host whose clock is 7 s ahead; NCCL's sums end together."""
    late = gpu_trace(1, late_us=600 + 7e6, host="other", sum_us=600)
    spans = from_profiler(written(tmp_path / "two", gpu_trace(0), late)).spans
    sums = spans.select(kinds=["all_reduce"]).table
    ends = [sums["end_s"][sums["rank"] == rank] for rank in (0, 1)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)
    path = critical_path(spans, slice(5, 6))
    kinds = list(zip(path.rank.tolist(), path.kind_names, strict=True))
    assert (1, "backward") in kinds and (0, "backward") not in kinds, "who came last to the sum"


def test_one_sum_that_ended_late_moves_no_clock() -> None:
    """The other host's clock is 7 s ahead; its first sum is seen to end 3 s after the others'."""

    def sums(*ends_s: float) -> list[Row]:
        return [("all_reduce", "comm", end_s - 0.5, end_s, step, 0, 4, -1) for step, end_s in enumerate(ends_s)]

    here, there = on_one_clock([(0, "here", sums(10, 11, 12)), (1, "there", sums(20, 18, 19))])
    assert here.table["end_s"].tolist() == [0.5, 1.5, 2.5]
    assert sorted(there.table["end_s"].tolist()) == [1.5, 2.5, 3.5]


def test_times_that_count_from_different_days_are_brought_together(tmp_path: Path) -> None:
    moved = gpu_trace(1, late_us=-5e6, base_ns=5_000_000_000)
    table = from_profiler(written(tmp_path / "two", gpu_trace(0), moved)).spans.table
    assert table["start_s"][table["rank"] == 1] == pytest.approx(table["start_s"][table["rank"] == 0], abs=1e-6)


def test_buckets_are_the_same_on_all_ranks_though_two_threads_begin_in_any_order(tmp_path: Path) -> None:
    def trace(rank: int, order: list[int]) -> dict[str, Any]:
        events: list[Event] = [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5},
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": "Optimizer.step#SGD.step",
                "pid": 1,
                "tid": 1,
                "ts": 90,
                "dur": 5,
            },
        ]
        for place, numel in enumerate(order):
            args = {"Input Dims": [[numel]], "Input type": ["c10::Half"]}
            name = "gloo:all_reduce"
            events.append(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": name,
                    "pid": 1,
                    "tid": 8 + place,
                    "ts": 10 + place,
                    "dur": 50,
                    "args": args,
                }
            )
        return {"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 2}}

    spans = from_profiler(written(tmp_path / "two", trace(0, [100, 30]), trace(1, [30, 100]))).spans
    sums = spans.select(kinds=["all_reduce"]).table
    assert {(int(row["bucket"]), int(row["bytes"])) for row in sums} == {(0, 200), (1, 60)}
    assert {name for name in spans.lanes if name.startswith("gloo")} == {"gloo 1", "gloo 2"}


def test_what_libraries_did_has_a_kind(tmp_path: Path) -> None:
    names = {
        "ncclDevKernel_AllGather_RING_LL(x)": "all_gather",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)": "reduce_scatter",
        "ncclKernel_Broadcast_RING_LL_Sum_int8_t(x)": "broadcast",
        "ncclDevKernel_SendRecv(x)": "communicate",
        "gloo:all_reduce": "all_reduce",
        "gloo:_reduce_scatter_base": "reduce_scatter",
        "gloo:_all_gather_base": "all_gather",
        "gloo:send": "send",
        "gloo:all_to_all": "communicate",
        "mpi:barrier": "barrier",
    }
    for name, kind in names.items():
        event = {"cat": "kernel" if "nccl" in name else "user_annotation", "name": name, "ts": 0, "dur": 1}
        assert [call.kind for call in calls([event])] == [kind], name
    assert calls([{"cat": "user_annotation", "name": "nccl:all_reduce", "ts": 0, "dur": 1}]) == [], (
        "that is when the host launched it"
    )


def test_what_is_no_profile_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no profile"):
        from_profiler(tmp_path / "empty")
    with pytest.raises(ConfigError, match="both of rank 0"):
        from_profiler(written(tmp_path / "twice", gpu_trace(0), gpu_trace(0)))
    for told, words in (
        ("no json", "not a Chrome trace"),
        ("[1]", "traceEvents"),
        ('{"traceEvents": []}', "no work of a training step"),
    ):
        (tmp_path / "bad.json").write_text(told)
        with pytest.raises(ConfigError, match=words):
            from_profiler(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        from_profiler(tmp_path / "none.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    with pytest.raises(ConfigError, match="truncated"):
        from_profiler(tmp_path / "cut.json.gz")
