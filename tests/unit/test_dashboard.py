"""The dashboard without a browser and without ranks: its fields, the trainings that it starts, its messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

pytest.importorskip("ipywidgets", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

import workbench as wb
from tests.waiting import until
from workbench import algorithms
from workbench.catalogue import describe
from workbench.dashboard.board import SIMULATED, Dashboard
from workbench.dashboard.form import AlgorithmForm
from workbench.dashboard.session import Choice, Entry, Session
from workbench.errors import ConfigError
from workbench.plots.live.buttons import parts_of
from workbench.run_spec import compute_of
from workbench.trace.store import remove_run, update_run

pytestmark = pytest.mark.notebooks


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize("name", algorithms.names())
def test_every_algorithm_has_a_field_for_each_of_its_settings(name: str) -> None:
    form = AlgorithmForm(name)
    made = algorithms.get(name, **form.options())
    assert form.options() == {} and made == algorithms.get(name)
    assert list(form.fields) == [setting["name"] for setting in describe("algorithms", name)["settings"]]
    assert all(field.tooltip for field in form.fields.values()), "each says what it may be"


def test_what_is_changed_reaches_the_algorithm() -> None:
    form = AlgorithmForm("pipe-sgd")
    form.fields["width"].value = 3
    form.fields["first"].value = "duplicate"
    form.fields["collective"].value = "ring:truncate16"
    assert algorithms.get("pipe-sgd", **form.options()) == algorithms.get(
        "pipe-sgd", width=3, first="duplicate", collective="ring:truncate16"
    )
    assert form.fields["width"].tooltip.startswith("K, number of iterations in flight"), "from the docstring"
    assert form.fields["width"].tooltip.endswith("(a whole number)")
    form = AlgorithmForm("layerwise-sgd")
    form.fields["bucket_bytes"].value = "64KiB"
    assert algorithms.get("layerwise-sgd", **form.options()).bucket_bytes == 65536
    form.fields["bucket_bytes"].value = "none"
    assert form.options() == {"bucket_bytes": None}
    form = AlgorithmForm("parameter-server-sgd")
    form.fields["dedicated"].value = True
    assert form.options() == {"dedicated": True}


def test_a_codec_is_chosen_beside_its_collective() -> None:
    form = AlgorithmForm("synchronous-sgd")
    form.fields["collective"].value, form.codec.value = "ring", "linear8"
    assert form.options() == {"collective": "ring:linear8"}
    assert form.codec in form.widget.children
    without = next(name for name in algorithms.names() if "collective" not in AlgorithmForm(name).fields)
    assert AlgorithmForm(without).codec not in AlgorithmForm(without).widget.children


def test_optimizer_and_schedule_are_classes_of_torch_with_arguments() -> None:
    board = Dashboard()
    assert {"optimizer", "schedule"}.isdisjoint(board._choice().settings), "the problem's own"
    board._optimizer.value, board._schedule.value = "adamw weight_decay=0.01", "CosineAnnealingLR T_max=20"
    chosen = board._choice().settings
    assert (chosen["optimizer"].func, chosen["optimizer"].keywords) == (torch.optim.AdamW, {"weight_decay": 0.01})
    assert chosen["schedule"].func is torch.optim.lr_scheduler.CosineAnnealingLR
    assert "AdamW" in board._optimizer.options and "StepLR" in board._schedule.options
    for field, text, words in (
        (board._schedule, "CosineAnealingLR", "no schedule is called .*did you mean CosineAnnealingLR"),
        (board._schedule, "StepLR gama=1", "StepLR has no option 'gama'"),
        (board._optimizer, "SGD momentun=1", "SGD has no option 'momentun'"),
    ):
        field.value = text
        with pytest.raises(ConfigError, match=words):
            board._choice()
        field.value = ""


def test_no_tooltip_is_null() -> None:
    board = Dashboard()
    board._algorithm.value = "local-sgd"
    parts = list(parts_of(board.widget))
    assert len(parts) > 40 and all(getattr(part, "tooltip", "") is not None for part in parts)


# ---------------------------------------------------------------- what is started


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.close()


def simulated(**settings: Any) -> Choice:
    return Choice(
        algorithm=wb.SynchronousSGD(),
        problem="digits-softmax",
        workers=2,
        network="free",
        settings={"steps": 3, **settings},
    )


def test_a_simulation_runs_beside_and_is_what_simulate_gives(session: Session) -> None:
    entry = session.start(simulated(seed=4))
    assert entry.over.wait(60) and entry.error is None
    same = wb.simulate(wb.SynchronousSGD(), wb.problems.digits_softmax(), workers=2, network="free", steps=3, seed=4)
    assert entry.run is not None and [row["loss"] for row in entry.run.steps()] == [row["loss"] for row in same.steps()]
    assert entry.num_gradients >= 6 and session.active is None and entry.status == "finished"


def test_a_simulation_is_held_goes_on_and_is_stopped(session: Session) -> None:
    entry = session.start(simulated(steps=100_000))
    until(lambda: entry.num_gradients > 20, "it computes")
    session.pause()
    until(lambda: entry.status == "paused", "it is held")
    time.sleep(0.05)  # a gradient that had begun
    held = entry.num_gradients
    time.sleep(0.1)
    assert entry.num_gradients == held
    session.resume()
    until(lambda: entry.num_gradients > held, "it goes on")
    with pytest.raises(ConfigError, match="run 1 still trains: wait for it, or stop it"):
        session.start(simulated())
    session.stop()
    assert entry.over.wait(30) and entry.status == "stopped" and entry.run is None
    assert session.start(simulated()).over.wait(60), "and another one can begin"


def test_what_cannot_be_is_refused_before_it_begins(session: Session) -> None:
    for settings, words in (
        ({"lr": "much"}, "lr='much': give a finite number above 0"),
        ({"epochs": 2}, "either epochs=... or steps="),
    ):
        with pytest.raises(ConfigError, match=words):
            session.start(simulated(**settings))
    with pytest.raises(ConfigError, match="nothing is training: press Start"):
        session.pause()
    assert session.entries == []


class FakeCluster:
    """A cluster with only `train`; the test ends its handles."""

    num_ranks = 2

    def __init__(self, *_: Any, **__: Any) -> None:
        self.state = "ready"
        self.asked: list[tuple[Any, ...]] = []
        self.stopped = False

    def train(self, algorithm: Any, problem: Any, **settings: Any) -> Any:
        from workbench.clusters.run_handle import RunHandle
        from workbench.trace import new_run

        self.asked.append((algorithm, problem.name, settings))
        info = {
            "algorithm": {"name": "PipeSGD", "settings": {}},
            "problem": {"name": problem.name},
            "num_workers": 2,
            "status": "running",
        }
        self.answer: Future[Any] = Future()
        self.handle = RunHandle(new_run(info), [self.answer], None)  # type: ignore[arg-type]
        return self.handle

    def status(self) -> None:
        """A table, in a real one."""

    def stop(self) -> None:
        self.stopped = True


def test_a_cluster_that_was_given_trains_and_is_left_alone(runs: Any) -> None:
    cluster = FakeCluster()
    session = Session(cluster)
    entry = session.start(
        Choice(algorithm=wb.PipeSGD(), problem=wb.problems.digits_mlp(), workers=2, settings={"epochs": 1, "lr": 0.1})
    )
    until(lambda: entry.handle is not None, "it trains")
    assert cluster.asked == [(wb.PipeSGD(), "digits-mlp", {"epochs": 1, "lr": 0.1})]
    session.stop()
    assert '{"stop": true}' in (cluster.handle.folder / "control.jsonl").read_text()
    cluster.answer.set_exception(RuntimeError("rank 1 has no memory"))
    assert entry.over.wait(10) and entry.status == "failed" and "no memory" in str(entry.error)
    session.close()
    assert not cluster.stopped


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[FakeCluster]:
    """Those that were started."""
    made: list[FakeCluster] = []

    def start(*given: Any, **named: Any) -> FakeCluster:
        made.append(FakeCluster(*given, **named))
        return made[-1]

    monkeypatch.setattr("workbench.clusters.Cluster", start, raising=False)
    return made


def on_ranks(session: Session) -> Entry:
    entry = session.start(Choice(algorithm=wb.PipeSGD(), problem="digits-mlp", workers=2, settings={"steps": 3}))
    until(lambda: entry.handle is not None or entry.over.is_set(), "it trains")
    return entry


@pytest.mark.parametrize("state", ["lost", "stopped"])
def test_ranks_that_are_gone_are_replaced(runs: Any, session: Session, clusters: list[FakeCluster], state: str) -> None:
    for number, before in enumerate(("ready", "ready", state)):
        if clusters:
            clusters[-1].state = before
        entry = on_ranks(session)
        assert len(clusters) == (1 if number < 2 else 2)
        clusters[-1].answer.set_result(None)
        assert entry.over.wait(10)
    assert [cluster.stopped for cluster in clusters] == [True, False]


def test_a_cluster_that_starts_while_the_dashboard_is_closed_ends(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, made = threading.Event(), FakeCluster()

    def start(*_: Any, **__: Any) -> FakeCluster:
        ready.wait(10)
        return made

    monkeypatch.setattr("workbench.clusters.Cluster", start, raising=False)
    monkeypatch.setattr("workbench.dashboard.session.CLOSE_S", 0.01)
    session = Session()
    entry = session.start(Choice(algorithm=wb.PipeSGD(), problem="digits-mlp", workers=2, settings={"steps": 3}))
    session.close()
    ready.set()
    assert entry.over.wait(10) and made.stopped and not made.asked
    assert session.cluster is None and entry.status == "stopped"


def test_the_last_rows_of_a_run_are_seen_though_nobody_looks_after_its_end(
    runs: Any, session: Session, clusters: list[FakeCluster]
) -> None:
    from workbench.trace import FileRecorder

    entry = on_ranks(session)
    recorder = FileRecorder(entry.handle.folder, 0, {"rank": 0})
    for step in range(3):
        row = {
            "step": step,
            "seconds": 0.1 * step,
            "samples": 64,
            "bytes_sent": 1,
            "staleness": 0,
            "loss": 1.0,
            "num_samples": 32,
            "lr": 0.1,
        }
        recorder.metrics(row)
    assert entry.run is None or not entry.run.metrics.get(0)
    recorder.close()
    clusters[0].answer.set_result(None)
    assert entry.over.wait(10) and entry.error is None
    assert entry.run is not None and len(entry.run.metrics[0]) == 3


def test_a_run_that_was_removed_breaks_no_later_training(
    runs: Any, session: Session, clusters: list[FakeCluster]
) -> None:
    board = Dashboard()
    board._session = session
    first = on_ranks(session)
    update_run(first.handle.folder, status="finished")
    clusters[0].answer.set_result(None)
    assert first.over.wait(10) and first.status == "finished"
    remove_run(first.handle.folder)
    second = on_ranks(session)
    board._refresh()
    assert [box.description.split(": ")[1] for box in board._list.children] == ["finished", "running"]
    assert len(board.runs) == 2
    clusters[0].answer.set_result(None)
    assert second.over.wait(10)


# ---------------------------------------------------------------- what is shown


def test_the_dashboard_starts_compares_and_says_what_is_wrong_in_one_line() -> None:
    trains = threading.Event()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert trains.wait(30)
        return wb.problems.digits_softmax().loss(output, target)

    mine = wb.Problem(
        model=wb.problems.digits_softmax().model,
        loss=loss,
        train=wb.problems.digits_softmax().train,
        name="mine",
    )
    board = Dashboard(own=[mine])
    assert board._problem.value == "mine" and "digits-mlp" in board._problem.options
    board._where.value, board._workers.value, board._unit.value, board._network.value = SIMULATED, 2, "steps", "free"
    board._lr.value = "much"
    board._start.click()
    assert (
        "<b>ConfigError:</b> lr=&#x27;much&#x27;: give a finite number above 0" in board._line.value and not board.runs
    )
    board._lr.value = "0.5"
    for number, algorithm in enumerate(("pipe-sgd", "synchronous-sgd"), 1):
        board._algorithm.value = algorithm
        trains.clear()
        board._start.click()
        assert board._line.value == "" and board._start.disabled
        trains.set()
        until(
            lambda count=number: (
                len(board.runs) == count and board._ticker is not None and not board._ticker.is_alive()
            ),
            "it ends",
        )
    assert not board._start.disabled and board._buttons.stop.disabled
    assert [box.description.split(", loss")[0] for box in board._list.children] == [
        "1. PipeSGD(width=2): finished, step 5",
        "2. SynchronousSGD: finished, step 5",
    ]
    assert {trace.name for trace in board.static().data if trace.showlegend} == {"PipeSGD(width=2)", "SynchronousSGD"}
    board._boxes[1].value = False
    assert {trace.name for trace in board.static().data if trace.showlegend} == {"SynchronousSGD"}
    assert [run.info["problem"]["name"] for run in board.runs] == ["mine", "mine"]
    assert repr(board) == "<Dashboard: 2 runs, idle>"
    board.close()
    assert board._start.disabled


def test_a_training_that_fails_is_one_line_and_the_next_one_clears_it() -> None:
    broken = wb.Problem(
        model=wb.problems.digits_softmax().model,
        loss=lambda output, target: 1 / 0,
        train=wb.problems.digits_softmax().train,
        name="broken",
    )
    board = Dashboard(own=[broken])
    board._where.value, board._workers.value, board._network.value = SIMULATED, 2, "free"
    board._start.click()
    until(lambda: "division by zero" in board._line.value, "the error")
    assert board._line.value.count("<br>") == 0 and "failed" in board._list.children[0].description
    until(lambda: not board._start.disabled, "it can be started again")
    board._problem.value = "digits-softmax"
    board._start.click()
    assert board._line.value == ""
    until(lambda: not board._ticker.is_alive(), "it ends")
    assert board._line.value == "" and len(board.runs) == 1
    board.close()


def test_seconds_of_compute_are_given_to_the_ranks_and_to_a_simulation() -> None:
    cluster = FakeCluster()
    board = Dashboard(cluster)
    board._compute.value, board._stragglers.value = "forward_s=0.03 backward_s=0.07", "lognormal:0.3 uniform:0.5,2"
    compute = compute_of(["forward_s=0.03", "backward_s=0.07"], ["lognormal:0.3", "uniform:0.5,2"])
    assert board._choice().settings["compute"] == compute
    board._where.value, board._workers.value, board._network.value = SIMULATED, 2, "free"
    board._problem.value, board._unit.value = "digits-softmax", "steps"
    board._start.click()
    until(lambda: board._ticker is not None and not board._ticker.is_alive(), "it ends")
    forward = board.runs[0].spans.select(kinds=["forward"], ranks=[0], steps=slice(0, 1)).table
    factor = compute.factors(0, 0, 2)[0]
    assert float((forward["end_s"] - forward["start_s"])[0]) == pytest.approx(0.03 * factor)
    board._compute.value = ""
    board._start.click()
    assert "stragglers multiply the seconds of compute" in board._line.value
    board._compute.value = "forward_s"
    board._start.click()
    assert "write it as name=value" in board._line.value
    board.close()


def test_a_terminal_is_told_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a process that has imported what a notebook's kernel needs."""
    import ipykernel.zmqshell  # noqa: F401

    Dashboard()._ipython_display_()
    assert capsys.readouterr().out == "<Dashboard: 0 runs, idle>\n"
    assert threading.active_count() < 50
