"""Ranks as the panel in JupyterLab shows them: what they do and use, and which one is a straggler."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.lab_server import write_run
from workbench.clusters.supervision.registry import Entry
from workbench.lab.rank_rows import EMPTY, RankRows, stragglers
from workbench.runtimes.liveness import usage
from workbench.runtimes.liveness.failure_detector import FailureDetector, read_heartbeat
from workbench.runtimes.liveness.usage import Usage

CREATED = "2026-01-01T00:00:00+00:00"


def running(root: Path, *, losses: tuple[float, ...] = (2.0, 1.0, 0.5), **info: Any) -> Path:
    """A run of two ranks that this process says it trains."""
    process = psutil.Process()
    own = {"host": socket.gethostname(), "pid": process.pid, "process_started": process.create_time()}
    return write_run(root, "run", created=CREATED, losses=losses, status="running", process=own, **info)


def write_trace(folder: Path, rank: int, compute_s: float, num_steps: int = 5) -> None:
    rows: list[Any] = [{"rank": rank, "host": "far", "pid": 7, "device": "cpu"}]
    for step in range(num_steps):
        rows.append(["forward", "compute", 1.0 * step, step + compute_s / 4, step, -1, 0, -1])
        rows.append(["all_reduce", "comm", step + 0.5, step + 0.9, step, -1, 800, -1])
        rows.append(["backward", "compute", step + 0.2, step + 0.2 + 0.75 * compute_s, step, -1, 0, -1])
    (folder / f"trace-{rank:05d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rank_row(**values: Any) -> dict[str, Any]:
    return {**EMPTY, "state": "training", "step": 100, "compute_s": 0.1, **values}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([rank_row(), rank_row()], {}, id="equal"),
        pytest.param([rank_row(), rank_row(compute_s=0.12)], {}, id="a little slower is chance"),
        pytest.param([rank_row(), rank_row(), rank_row(compute_s=0.2)], {2: "2.0 times"}, id="slow"),
        pytest.param([rank_row(step=100), rank_row(step=95)], {}, id="files are not read at one moment"),
        pytest.param([rank_row(step=1000), rank_row(step=960)], {}, id="4 % behind"),
        pytest.param([rank_row(step=1000), rank_row(step=900)], {1: "100 steps behind"}, id="behind"),
        pytest.param([rank_row(waits="a sum"), rank_row(), rank_row(waits="a sum")], {1: "all other ranks wait"}, id="hangs"),
        pytest.param([rank_row(waits="a sum"), rank_row(waits="a sum")], {}, id="all wait"),
        pytest.param([rank_row(), rank_row(compute_s=None)], {}, id="an old trace says nothing"),
        pytest.param([rank_row(), rank_row(state="gone", step=3)], {}, id="one that is gone"),
        pytest.param([rank_row(compute_s=9.0)], {}, id="alone"),
    ],
)  # fmt: skip
def test_stragglers(rows: list[dict[str, Any]], expected: dict[int, str]) -> None:
    found = stragglers(rows)
    assert found.keys() == expected.keys()
    assert all(text in found[rank] for rank, text in expected.items())


def test_a_row_holds_what_a_rank_wrote(tmp_path: Path) -> None:
    folder = running(tmp_path)
    write_trace(folder, 0, 0.1), write_trace(folder, 1, 0.3)
    with FailureDetector(folder, 0, 2, step=lambda: 3), FailureDetector(folder, 1, 2, step=lambda: 3):
        found = RankRows().of_run(folder)
    assert (found["run"], found["status"]) == ("run", "running")
    first, second = found["ranks"]
    assert (first["rank"], first["step"], first["state"], first["device"]) == (0, 3, "training", "cpu")
    assert (first["host"], first["pid"]) == (socket.gethostname(), os.getpid()), "the heartbeat's, which is newer"
    assert first["sent_bytes_per_s"] == pytest.approx(100 / 0.1), (
        "200 bytes in the 0.2 s between the first and last step"
    )
    assert first["memory_bytes"] > 10e6 and first["beat_s"] < 60
    assert first["compute_s"] == pytest.approx(0.1) and second["compute_s"] == pytest.approx(0.3)
    assert first["straggler"] is None and "3.0 times as long" in second["straggler"]


def test_a_rank_that_stalls_sends_nothing(tmp_path: Path) -> None:
    folder = running(tmp_path)
    os.utime(folder / "metrics-00000.jsonl", (1, 1))
    with FailureDetector(folder, 0, 2), FailureDetector(folder, 1, 2):
        rates = [row["sent_bytes_per_s"] for row in RankRows().of_run(folder)["ranks"]]
    assert rates == [0.0, pytest.approx(1000.0)]


def test_before_the_first_step_and_after_the_end(tmp_path: Path) -> None:
    folder = running(tmp_path, losses=())
    assert [row["state"] for row in RankRows().of_run(folder)["ranks"]] == ["starting", "starting"]
    over = write_run(tmp_path, "over", created=CREATED)
    rows = RankRows().of_run(over)["ranks"]
    assert [(row["state"], row["step"], row["beat_s"]) for row in rows] == [("ended", 3, None)] * 2


def test_a_damaged_file_is_read_as_far_as_possible(tmp_path: Path) -> None:
    folder = running(tmp_path)
    with (folder / "metrics-00000.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "sec')
    (folder / "trace-00000.jsonl").write_bytes(b"\xff{not json\n[1, 2]\n")
    (folder / "present-00000.json").write_text("{")
    row = RankRows().of_run(folder)["ranks"][0]
    assert (row["step"], row["state"], row["device"]) == (3, "ended", None)


def test_idle_ranks_of_a_cluster_are_looked_up(tmp_path: Path) -> None:
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    gone = {"host": socket.gethostname(), "pid": 2**22 - 1}
    far = {"host": "elsewhere", "pid": 5}
    entry = Entry(tmp_path, {"ranks": [here, gone, far]}, None)
    rows, found = RankRows(), list[Any]()
    for _ in range(2):
        found = rows.of_cluster(entry)["ranks"]
        end_s = time.process_time() + 0.1  # the system counts in steps of 0.01 s
        while time.process_time() < end_s:
            sum(range(10**5))
    assert [row["state"] for row in found] == ["idle", "gone", "idle"]
    assert found[0]["memory_bytes"] > 10e6 and found[0]["cpu_cores"] > 0
    assert found[2]["memory_bytes"] is None, "of another machine nothing is known"


def test_a_heartbeat_holds_the_cores_in_use(tmp_path: Path) -> None:
    found = Usage()
    assert found.row()["cpu_cores"] is None, "too early to say"
    end_s = time.process_time() + 2 * usage.SHORTEST_S
    while time.process_time() < end_s:
        sum(range(10**5))
    assert 0 < found.row()["cpu_cores"] < 10
    with FailureDetector(tmp_path, 0, 1):
        row = read_heartbeat(tmp_path, 0)
    assert row is not None and row["gpu"] is None and "cpu_cores" in row


def test_a_heartbeat_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    about = {"host": "h", "place": "p", "pid": 1, "started_s": 1.0, "memory_bytes": 5}
    (tmp_path / "present-00000.json").write_text(json.dumps(about))
    row = read_heartbeat(tmp_path, 0)
    assert row is not None and (row["cpu_cores"], row["gpu"]) == (None, None)


class Cuda:
    """Two GPUs; the second is this process's."""

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def memory_reserved(device: int) -> int:
        return 1000 * device

    @staticmethod
    def get_device_name(device: int) -> str:
        return f"GPU {device}"

    @staticmethod
    def get_device_properties(device: int) -> Any:
        return types.SimpleNamespace(uuid=f"id-{device}")


# NVML of two GPUs, as nvidia-ml-py gives it
NVML = types.SimpleNamespace(
    NVMLError=RuntimeError,
    nvmlInit=lambda: None,
    nvmlDeviceGetHandleByUUID=lambda name: name,
    nvmlDeviceGetMemoryInfo=lambda device: types.SimpleNamespace(used=30, total=80 if device == "GPU-id-1" else 0),
    nvmlDeviceGetUtilizationRates=lambda device: types.SimpleNamespace(gpu=45),
)


def test_a_gpu_is_read_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its number, which CUDA_VISIBLE_DEVICES changes, nor the current device, of which each thread has its own."""
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=Cuda))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pynvml", NVML)  # type: ignore[arg-type]
    row = Usage().row()
    assert row["gpu"] == {"name": "GPU 1", "share": 0.45, "used_bytes": 30, "total_bytes": 80}
    assert row["memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss + 1000, rel=0.1)


def test_without_nvml_there_is_no_gpu_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=Cuda))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = Usage()
    assert found.row()["gpu"] is None and found.row()["gpu"] is None
    assert usage.gpu_of_this_process() == 1
