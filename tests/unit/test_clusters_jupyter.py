"""A notebook's handle of a training, and notebooks run from start to end, without ranks."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.forked import forked
from workbench import progress
from workbench.errors import ConfigError, WorkbenchError
from workbench.logs import shown_on_stderr
from workbench.trace import new_run, update_run

pytestmark = [pytest.mark.notebooks, pytest.mark.usefixtures("forked_kernels")]

# ---------------------------------------------------------------- what a handle says


class Silent:
    """Engines that say nothing."""

    engine_set = None
    reason: str | None = None

    def why_silent(self) -> str | None:
        return self.reason

    def last_output(self) -> str:
        return ""


def handle_of(folder: Path, num_ranks: int) -> tuple[Any, list[Future[Any]]]:
    from workbench.clusters.run_handle import RunHandle

    info = {
        "algorithm": {"name": "PipeSGD", "settings": {"width": 2}},
        "problem": {"name": "digits"},
        "num_workers": num_ranks,
    }
    results: list[Future[Any]] = [Future() for _ in range(num_ranks)]
    return RunHandle(new_run(info, folder), results, Silent()), results  # type: ignore[arg-type]


def remote(kind: str, words: str) -> Exception:
    from ipyparallel.error import RemoteError

    return RemoteError(kind, words, f"\x1b[31mTraceback\x1b[0m of {words}")


def test_the_cause_is_raised_and_not_those_that_left_because_of_it(runs: Path) -> None:
    run, results = handle_of(runs, 3)
    results[0].set_exception(remote("PeerFailed", "rank 2 failed"))
    results[2].set_exception(remote("Diverged", "the loss is nan"))
    with pytest.raises(WorkbenchError, match="rank 2: the loss is nan") as caught:
        run.wait(5)
    assert type(caught.value).__name__ == "Diverged"
    assert caught.value.__notes__ == ["Traceback on rank 2:\nTraceback of the loss is nan"]
    assert (run.done, run.status) == (False, "failed")


def test_a_victim_waits_a_little_for_the_cause(runs: Path) -> None:
    run, results = handle_of(runs, 2)
    results[0].set_exception(remote("PeerFailed", "rank 1 failed"))
    threading.Timer(0.3, results[1].set_exception, [remote("KeyError", "'x'")]).start()
    with pytest.raises(WorkbenchError, match="rank 1 failed: KeyError: 'x'"):
        run.wait(5)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ((1,), "rank 1's process is gone"),
        ((0, 1, 2), "the processes of ranks 0, 1, 2 are gone, and it is not known which was the first"),
    ],
)
def test_a_lost_process_is_explained_and_recorded(runs: Path, lost: tuple[int, ...], words: str) -> None:
    """mpiexec ends all ranks when it loses one, and no rank is blamed by guessing."""
    run, results = handle_of(runs, 3)
    for rank, result in enumerate(results):
        result.set_exception(remote("EngineError" if rank in lost else "PeerFailed", f"Engine {rank} died"))
    with pytest.raises(WorkbenchError, match=words):
        run.wait(5)
    info = json.loads((run.folder / "run.json").read_text())
    assert (info["status"], info["error"].startswith(words)) == ("failed", True)


def test_a_record_that_says_finished_is_left_alone(runs: Path) -> None:
    run, results = handle_of(runs, 2)
    results[0].set_result({})
    assert not run.done
    update_run(run.folder, status="finished")
    results[1].set_result({})
    assert run.wait(1).status == "finished"


def test_waiting_has_an_end_and_stopping_is_asked_for_in_the_folder(runs: Path) -> None:
    run, _ = handle_of(runs, 1)
    with pytest.raises(TimeoutError, match=r"still training after 0\.1 s.*starting"):
        run.wait(0.1)
    run.stop()
    assert [json.loads(line) for line in (run.folder / "control.jsonl").read_text().splitlines()] == [{"stop": True}]
    run.abandon("the cluster was stopped while it trained")
    assert (run.done, run.status, run.run.info["error"]) == (True, "failed", "the cluster was stopped while it trained")
    run.stop()
    assert len((run.folder / "control.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("lost", [False, True], ids=["before-its-ranks", "after-its-ranks"])
def test_a_wait_ends_when_another_process_has_ended_the_cluster(
    lost: bool, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks give no answer, or one that says only that they are gone."""
    run, results = handle_of(runs, 2)
    monkeypatch.setattr(Silent, "reason", "the cluster was stopped by another process while it trained")
    if lost:
        results[1].set_exception(remote("EngineError", "Engine 1 died"))
    begin = time.monotonic()
    with pytest.raises(WorkbenchError, match=r"stopped by another process.*Train on a new Cluster"):
        run.wait(20)
    assert time.monotonic() - begin < 8
    assert lost or (run.done, run.status) == (True, "failed")


def test_an_interrupt_says_whether_the_training_continues(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = handle_of(runs, 2)

    def interrupt(self: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(run), "_has_returned", interrupt)
    with pytest.raises(KeyboardInterrupt, match="the training continues"):
        run.wait()
    monkeypatch.setattr(Silent, "reason", "the cluster was stopped by another process while it trained")
    with pytest.raises(KeyboardInterrupt, match="the training has ended: the cluster was stopped by another process"):
        run.wait()


# ---------------------------------------------------------------- notebooks


def notebook(folder: Path, *cells: str) -> Path:
    """A notebook whose first cell holds the parameter `steps`."""
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    parameters = new_code_cell("steps: int = 5  # how many", metadata={"tags": ["parameters"]})
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    path = folder / "question.ipynb"
    nbformat.write(new_notebook(cells=[parameters, *map(new_code_cell, cells)], metadata={"kernelspec": kernel}), path)
    return path


def outcome(path: Path) -> tuple[list[str], bool | None]:
    """Each cell's status, and whether the notebook says that it failed."""
    metadata = [cell["metadata"].get("papermill", {}) for cell in json.loads(path.read_text())["cells"]]
    return [item["status"] for item in metadata if "status" in item], json.loads(path.read_text())["metadata"][
        "papermill"
    ]["exception"]


def run_notebook(*args: Any, **options: Any) -> Path:
    from workbench.experiments import run_notebook

    return run_notebook(*args, **options)


# Papermill's and its kernel client's own
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@QUIET
def test_a_notebook_runs_with_its_parameters_and_without_interaction(
    tmp_path: Path, no_process_left: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)  # as after 30 seconds
    path = notebook(tmp_path, "import os; print(steps, os.environ['IPP_NONINTERACTIVE'])")
    with shown_on_stderr(logging.INFO):
        done = run_notebook(path, tmp_path / "new" / "out.ipynb", {"steps": 7})
    assert re.search(r"^\d of \d cells after [\d:]+, [\d:?]+ left$", capsys.readouterr().err, re.MULTILINE)
    assert json.loads(done.read_text())["cells"][-1]["outputs"][0]["text"] == ["7 1\n"]
    assert "IPP_NONINTERACTIVE" not in os.environ


@QUIET
def test_a_failing_cell_is_one_error_that_names_it(tmp_path: Path) -> None:
    path = notebook(tmp_path, "1 / 0", "print('never')")
    with pytest.raises(WorkbenchError, match=r"cell \[2\]: ZeroDivisionError: division by zero .*out\.ipynb"):
        run_notebook(path, tmp_path / "out.ipynb")
    assert outcome(tmp_path / "out.ipynb") == (["completed", "failed", "pending"], True)


@QUIET
def test_a_notebook_out_of_time_says_so_and_leaves_nothing(tmp_path: Path, no_process_left: None) -> None:
    path = notebook(
        tmp_path,
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)",
        "import time; time.sleep(600)",
        "print('never')",
    )
    with pytest.raises(WorkbenchError, match="had not ended after 2 s"):
        run_notebook(path, tmp_path / "out.ipynb", timeout_s=2)
    assert outcome(tmp_path / "out.ipynb") == (["completed", "completed", "failed", "pending"], True)


def test_a_terminated_notebook_ends_what_it_started(tmp_path: Path, no_process_left: None) -> None:
    path = notebook(
        tmp_path,
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)",
        f"open({str(tmp_path / 'ready')!r}, 'w').close(); import time; time.sleep(600)",
    )
    code = (
        f"from workbench.experiments import run_notebook; run_notebook({str(path)!r}, {str(tmp_path / 'out.ipynb')!r})"
    )
    runner = subprocess.Popen(forked("-c", code), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    _, said = runner.communicate(timeout=20)
    assert runner.returncode == 128 + signal.SIGTERM, said.decode()
    assert outcome(tmp_path / "out.ipynb") == (["completed", "completed", "failed"], True)


BEGIN = """
import threading, time
from concurrent.futures import Future
from workbench.clusters.run_handle import RunHandle
from workbench.trace import FileRecorder, new_run, update_run

def begin(num_steps):
    answer = Future()
    info = {"algorithm": {"name": "PipeSGD", "settings": {}}, "problem": {"name": "digits"}, "num_workers": 1, "status": "running"}
    run = RunHandle(new_run(info), [answer], None)
    def train():
        recorder = FileRecorder(run.folder, 0, {"rank": 0})
        for step in range(num_steps):
            time.sleep(0.03)
            recorder.span("forward", "compute", step * 0.03, step * 0.03 + 0.01, step)
            recorder.span("all_reduce", "comm", step * 0.03 + 0.01, step * 0.03 + 0.02, step)
            row = {"step": step, "seconds": step * 0.03, "samples": step, "bytes_sent": 0, "staleness": None, "num_samples": 1, "lr": 0.1}
            recorder.metrics({**row, "loss": 1 / (step + 1)})
            recorder.end_step()
        recorder.close()
        update_run(run.folder, status="finished")
        answer.set_result({})
    threading.Thread(target=train).start()
    return run
"""


def num_points(column: Any) -> int:
    """Length of a trace's column, plain or packed."""
    return (
        len(base64.b64decode(column["bdata"])) // int(column["dtype"][1:]) if isinstance(column, dict) else len(column)
    )


@QUIET
def test_a_saved_notebook_keeps_the_whole_curve_and_not_the_live_view(tmp_path: Path, runs: Path) -> None:
    path = notebook(tmp_path, BEGIN, "begin(2).wait()", "run = begin(40)\nrun", "run.wait();")
    done = run_notebook(path, tmp_path / "out.ipynb")
    ended, live, waited = [cell["outputs"] for cell in json.loads(done.read_text())["cells"][-3:]]
    assert waited == []
    for outputs, num_steps, num_bars in ((ended, 2, [2]), (live, 40, [6])):
        assert not any("application/vnd.jupyter.widget-view+json" in output["data"] for output in outputs)
        header, *others = [output["data"] for output in outputs]
        assert f"step {num_steps} " in "".join(header["text/html"])
        assert not any("<img" in "".join(data.get("text/html", "")) for data in others), "no picture beside a figure"
        plotly = "application/vnd.plotly.v1+json"
        curves, *timeline = [data[plotly]["data"] for data in others if plotly in data]
        assert max(num_points(curve["x"]) for curve in curves) == num_steps
        assert [sum(num_points(bars["x"]) for bars in spans) for spans in timeline] == num_bars, "the newest steps"
    assert done.stat().st_size < 500_000


@pytest.mark.parametrize(
    ("path", "parameters", "words"),
    [
        ("question.ipynb", {"step": 1}, "is called 'step': did you mean steps"),
        ("nowhere.ipynb", {}, "there is no notebook"),
    ],
)
@QUIET
def test_what_cannot_be_run_is_refused_before_it_starts(
    tmp_path: Path, path: str, parameters: dict[str, Any], words: str
) -> None:
    notebook(tmp_path, "1")
    with pytest.raises(ConfigError, match=words):
        run_notebook(tmp_path / path, tmp_path / "out.ipynb", parameters)
    assert not (tmp_path / "out.ipynb").exists()
