"""Commands to a running training: written, read, and refused before they are written."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    LayerwiseSGD,
    PartialAllReduce,
    PipeSGD,
    StaleSGD,
    SynchronousSGD,
    Uniform,
    named,
    recorded,
)
from workbench.cli.main import main
from workbench.clusters.commands import send_settings
from workbench.codecs import ErrorFeedback, Linear8, TopK, Truncate16
from workbench.collectives import Once, PowerSGD, Ring
from workbench.errors import ConfigError, Stalled
from workbench.ops import EndStep
from workbench.problems import digits_mlp
from workbench.program import Algorithm
from workbench.replica.local_training import run_info
from workbench.runtimes.control.commands import PAUSE, RESUME, STOP, CommandReader, read_commands, write_command
from workbench.runtimes.control.controller import RunController
from workbench.runtimes.control.reconfigure import changed, encoded
from workbench.runtimes.liveness.interrupts import deferred_interrupt, single_interrupt
from workbench.runtimes.transport import base as transport
from workbench.runtimes.transport.base import Deadline
from workbench.settings import Settings
from workbench.trace import new_run, update_run

# ---------------------------------------------------------------- the file


def test_words_are_read_once_each_and_a_half_written_line_waits(tmp_path: Path) -> None:
    reader = CommandReader(tmp_path)
    assert reader.poll() == 0
    write_command(tmp_path, PAUSE)
    assert (reader.poll(), reader.commands) == (1, [PAUSE])
    path = tmp_path / "control.jsonl"
    with path.open("a") as file:
        file.write('{"set": {"lr"')
    assert reader.poll() == 1
    with path.open("a") as file:
        file.write(": 0.5}}\nnonsense\n[1]\n")
    assert (reader.poll(), reader.commands) == (4, [PAUSE, {"set": {"lr": 0.5}}, {}, {}])
    write_command(tmp_path, RESUME)
    assert reader.poll() == 5
    assert read_commands(tmp_path) == reader.commands


def test_a_look_at_nothing_new_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_command(tmp_path, STOP)
    reader = CommandReader(tmp_path)
    reader.poll()
    monkeypatch.setattr(Path, "open", None)
    assert reader.poll() == 1


# ---------------------------------------------------------------- what may change

REFUSED: list[tuple[Algorithm, dict[str, Any], str]] = [
    (PipeSGD(), {}, "nothing to set: give one of lr, width"),
    (PipeSGD(), {"widht": 3}, "did you mean width"),
    (PipeSGD(), {"delay": 2, "width": 5}, "delay and width are the same setting"),
    (StaleSGD(), {"delay": 1, "staleness": "Constant(2)"}, "delay and staleness are the same setting"),
    (PipeSGD(), {"lr": 10**400}, "above 0"),
    (PipeSGD(), {"width": 0}, "width=0"),
    (PipeSGD(), {"width": "3"}, "give a whole number"),
    (PipeSGD(), {"delay": -1}, "delay=-1"),
    (PipeSGD(), {"lr": 0}, "above 0"),
    (PipeSGD(), {"lr": float("nan")}, "above 0"),
    (PipeSGD(), {"lr": True}, "above 0"),
    (PipeSGD(), {"codec": Truncate16()}, "such as collective=Ring"),
    (SynchronousSGD(collective=Ring()), {"codec": "truncate16"}, "give one of truncate16"),
    (SynchronousSGD(), {"width": 2}, "width of SynchronousSGD is not a setting"),
    (LayerwiseSGD(), {"bucket_bytes": 10.0}, "cannot change while it runs: ranks began with it"),
    (LayerwiseSGD(), {"apply": "any"}, "start another run"),
    (AsyncSGD(), {"shards": 2}, "ranks began with it"),
    (BackupSGD(), {"backups": 3}, "at most 2"),
    (PartialAllReduce(), {"quorum": 2}, "only lr can change"),
    (PipeSGD(), {"collective": "__import__('os').system('true')"}, "cannot be read"),
    (PipeSGD(), {"collective": "Context(rank=1)"}, "no setting is called 'Context'"),
]


@pytest.mark.parametrize(("algorithm", "changes", "words"), REFUSED, ids=str)
def test_what_cannot_be_set_is_refused_with_what_can(algorithm: Algorithm, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        changed(algorithm, changes, 3)


CHANGED: list[tuple[Algorithm, dict[str, Any], Algorithm]] = [
    (PipeSGD(width=2), {"width": 3}, PipeSGD(width=3)),
    (PipeSGD(width=2), {"delay": 3}, PipeSGD(width=4)),
    (PipeSGD(), {"collective": Ring(codec=Linear8())}, PipeSGD(collective=Ring(codec=Linear8()))),
    (PipeSGD(), {"collective": Ring(), "codec": Truncate16()}, PipeSGD(collective=Ring(codec=Truncate16()))),
    (SynchronousSGD(collective=Ring(codec=Linear8(), chunks=2)), {"codec": None}, SynchronousSGD(collective=Ring(chunks=2))),
    (SynchronousSGD(collective=Once(codec=Linear8())), {"codec": ErrorFeedback(codec=TopK(k=5))},
     SynchronousSGD(collective=Once(codec=ErrorFeedback(codec=TopK(k=5))))),
    (SynchronousSGD(), {"collective": PowerSGD(rank=2)}, SynchronousSGD(collective=PowerSGD(rank=2))),
    (StaleSGD(), {"staleness": Uniform(0, 3)}, StaleSGD(staleness=Uniform(0, 3))),
    (BackupSGD(), {"backups": 2}, BackupSGD(backups=2)),
]  # fmt: skip


@pytest.mark.parametrize(("before", "changes", "after"), CHANGED, ids=str)
def test_a_change_that_was_written_out_makes_the_algorithm(
    before: Algorithm, changes: dict[str, Any], after: Algorithm
) -> None:
    line = json.loads(json.dumps(encoded(before, changes)))
    assert changed(before, line, 3) == (after, None)
    assert changed(before, {**line, "lr": 2}, 3) == (after, 2.0)


@pytest.mark.parametrize(("before", "changes", "after"), CHANGED, ids=str)
def test_what_a_record_shows_can_be_given_back(before: Algorithm, changes: dict[str, Any], after: Algorithm) -> None:
    """From a shell, say: an object as it is written out in `control.jsonl`, and none."""
    line = {name: "none" if value is None else value for name, value in encoded(before, changes).items()}
    assert changed(before, encoded(before, named(line)), 3) == (after, None)


def test_an_object_that_ranks_could_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="only workbench's own objects"):
        encoded(SynchronousSGD(collective=Ring()), {"codec": object()})


def test_a_collective_of_messages_needs_a_progress_that_moves_them() -> None:
    with pytest.raises(ConfigError, match=r"only Native\(\) is possible"):
        changed(PipeSGD(), {"collective": Ring()}, 3, "library")


@pytest.mark.parametrize("algorithm", [case[2] for case in CHANGED], ids=str)
def test_an_algorithm_is_known_by_its_record(algorithm: Algorithm) -> None:
    info = run_info(algorithm, digits_mlp(), Settings(steps=1), "mpi", 3)
    assert recorded(json.loads(json.dumps(info["algorithm"]))) == algorithm


# ---------------------------------------------------------------- from a notebook and a shell


def folder_of(runs: Path, algorithm: Algorithm, /, **more: Any) -> Path:
    info = run_info(algorithm, digits_mlp(), Settings(steps=100), "mpi", 3)
    return new_run({**info, "status": "running", **more}, runs)


def handle_of(folder: Path, engines: Any = None) -> tuple[Any, list[Future[Any]]]:
    from workbench.clusters.run_handle import RunHandle

    results: list[Future[Any]] = [Future() for _ in range(3)]
    return RunHandle(folder, results, engines), results  # type: ignore[arg-type]


def test_the_handle_writes_words_and_refuses_before_it_does(runs: Path) -> None:
    folder = folder_of(runs, PipeSGD(width=2))
    run, results = handle_of(folder)
    run.set(width=3, lr=0.05).pause().set(collective="ring").set(codec="truncate16").resume().stop()
    words = read_commands(folder)
    assert words[:3] == [{"set": {"width": 3, "lr": 0.05}}, PAUSE, {"set": {"collective": "Ring()"}}]
    assert words[3:] == [{"set": {"codec": "Truncate16(rounding='toward-zero')"}}, RESUME, STOP]
    for changes, message in (
        ({"widht": 2}, "did you mean width"),
        ({"width": 0}, "width=0"),
        ({"shards": 2}, "shards of PipeSGD"),
    ):
        with pytest.raises(ConfigError, match=message):
            run.set(**changes)
    assert len(read_commands(folder)) == 6
    update_run(folder, status="paused")
    assert run.status == "paused"
    update_run(folder, status="finished")
    for result in results:
        result.set_result({})
    for ask in (lambda: run.set(lr=1.0), run.pause, run.resume):
        with pytest.raises(ConfigError, match="has ended"):
            ask()
    assert len(read_commands(folder)) == 6


def test_an_algorithm_of_the_notebooks_own_is_steered_by_the_names_of_its_record(runs: Path) -> None:
    folder = folder_of(runs, PipeSGD(), algorithm={"name": "MySGD", "settings": {"patience": 3}})
    send_settings(folder, {"patience": 4})
    assert read_commands(folder) == [{"set": {"patience": 4}}]
    with pytest.raises(ConfigError, match="did you mean patience"):
        send_settings(folder, {"patienc": 4})


def test_a_shell_steers(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(runs))
    folder = folder_of(runs, PipeSGD(width=2))
    assert main(["steer", "last", "lr=0.05", "width=3", "collective=ring:truncate16"]) == 0
    assert main(["steer", folder.name, "pause"]) == 0
    assert main(["steer", folder.name[:-2], "resume"]) == 0
    assert "asked to resume" in capsys.readouterr().out
    ring = "Ring(codec=Truncate16(rounding='toward-zero'))"
    assert read_commands(folder) == [{"set": {"lr": 0.05, "width": 3, "collective": ring}}, PAUSE, RESUME]
    for wrong in (["stop", "lr=2"], ["halt"], ["lr"], ["widht=2"], ["lr=fast"]):
        assert main(["steer", "last", *wrong]) == 2
    assert len(read_commands(folder)) == 3
    update_run(folder, status="stopped")
    assert main(["steer", "last", "lr=0.1"]) == 2
    assert "has ended (stopped)" in capsys.readouterr().err
    folder_of(runs, PipeSGD(), runtime="simulated")
    assert main(["steer", "last", "stop"]) == 2


def test_an_interrupt_goes_to_the_ranks_that_have_not_come_back(runs: Path) -> None:
    sent: list[tuple[Any, ...]] = []

    class Engines:
        class client:  # noqa: N801 - stands in for an object
            @staticmethod
            def send_signal(number: int, targets: list[int], block: bool) -> None:
                sent.append((number, targets, block))

        @staticmethod
        def why_silent() -> None:
            """They answer."""

    run, results = handle_of(folder_of(runs, PipeSGD()), Engines)
    run.interrupt(1)
    results[2].set_result({})
    run.interrupt()
    assert sent == [(signal.SIGINT, [1], True), (signal.SIGINT, [0, 1], True)]
    with pytest.raises(ConfigError, match="rank 3 of 3: 0 to 2"):
        run.interrupt(3)


# ---------------------------------------------------------------- how a rank waits, and is interrupted


def test_a_pause_is_short_next_to_the_wait_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(transport.time, "sleep", pauses.append)
    deadline = Deadline("a message", lambda: None, None)
    for _ in range(5000):
        deadline.pause()
    assert pauses == sorted(pauses) and pauses[0] <= 1e-4 and pauses[-1] >= 1e-3, "a long wait takes little of a core"
    assert all(pause <= max(1e-4, 0.02 * waited) for pause, waited in zip(pauses[1:], accumulate(pauses), strict=False))


def test_time_that_a_run_is_held_is_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now, held = [100.0], [7.0]
    monkeypatch.setattr(transport.time, "perf_counter", lambda: now[0])
    deadline = Deadline("a message", lambda: None, 5.0, pause_seconds=lambda: held[0])
    now[0], held[0] = 160.0, 63.0  # 56 s of the 60 were a pause
    deadline.check()
    now[0] = 162.0
    with pytest.raises(Stalled, match="waited 6 s for a message"):
        deadline.check()


def test_a_rank_hears_one_interrupt_and_none_while_it_leaves() -> None:
    before = signal.getsignal(signal.SIGINT)
    with single_interrupt() as leave:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # while it leaves
        leave()
    assert signal.getsignal(signal.SIGINT) is before
    with single_interrupt() as leave:
        leave()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_waits_while_peers_count_on_the_rank() -> None:
    bound, passed = [True], []

    def looked() -> bool:
        passed.append(len(passed))
        bound[0] = len(passed) < 4
        return bound[0]

    with single_interrupt(looked):
        os.kill(os.getpid(), signal.SIGINT)
        assert passed == [0], "not in the midst of it"
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(30)
    assert passed == [0, 1, 2, 3]


# ---------------------------------------------------------------- ranks that agree


class OfTwo:
    """The transport of rank 0 of two, and what rank 1 says; all else that a controller needs of its rank."""

    rank, num_workers = 0, 2
    has_server_copy = False

    def __init__(self, other: list[list[dict[str, Any]]]) -> None:
        self.transport = self.replica = self.clock = self
        self.other, self.events, self.lr = other, [], 0.1

    def deadline(self, what: str) -> None: ...

    def set_paused(self, on: bool) -> None: ...

    def doing(self, activity: str) -> AbstractContextManager[None]:
        return nullcontext()

    def end_step(self) -> None: ...

    def gather_texts(self, text: str, deadline: None) -> list[str]:
        return [text, json.dumps({"commands": self.other.pop(0), "step": 5, "left": True, "versions": None})]

    def event(self, row: dict[str, Any]) -> None:
        self.events.append(row)

    def set_lr(self, lr: float) -> None:
        self.lr = lr


def test_a_rank_whose_file_lags_takes_what_the_other_has_read(runs: Path) -> None:
    """And takes none of it twice when the file shows it too."""
    folder = folder_of(runs, PipeSGD(width=2))
    ranks = OfTwo([[{"set": {"lr": 0.05, "width": 3}}], [{"set": {"lr": 0.025}}]])
    controller = RunController(PipeSGD(width=2), Settings(steps=9), ranks, ranks, folder)  # type: ignore[arg-type]
    agreed = controller.agree(EndStep(4), left=True)
    assert (agreed.algorithm, agreed.num_commands, agreed.any_left) == (PipeSGD(width=3), 1, True)
    assert (controller.algorithm, ranks.lr, controller.num_taken) == (PipeSGD(width=3), 0.05, 1)
    for changes in ({"lr": 0.05, "width": 3}, {"lr": 0.025}):
        write_command(folder, {"set": changes})
    assert controller.num_commands_read() == 2
    controller.agree(EndStep(6), left=True)
    assert (ranks.lr, controller.num_taken) == (0.025, 2)
    assert [(row["steer"], row["step"], row["set"]) for row in ranks.events] == [
        (1, 5, {"lr": 0.05, "width": 3}),
        (2, 7, {"lr": 0.025}),
    ]
    info = json.loads((folder / "run.json").read_text())
    assert [(row["number"], row["step"]) for row in info["steering"]] == [(1, 5), (2, 7)]


def test_held_it_goes_on_when_told_to_and_takes_words_meanwhile(runs: Path) -> None:
    folder = folder_of(runs, PipeSGD())
    ranks = OfTwo([[PAUSE], [], [{"set": {"lr": 0.5}}], [RESUME]])
    controller = RunController(PipeSGD(), Settings(steps=9), ranks, ranks, folder)  # type: ignore[arg-type]
    agreed = controller.agree(EndStep(2), left=True)
    while agreed.paused:
        agreed = controller.pause(agreed, left=True)
    assert (agreed.stop, agreed.num_commands) == (False, 3)
    assert (ranks.lr, ranks.other, controller.num_taken) == (0.5, [], 3)
    assert json.loads((folder / "run.json").read_text())["status"] == "running"
    ranks.other = [[PAUSE], [STOP]]
    agreed = controller.pause(controller.agree(EndStep(3), left=True), left=True)
    assert (agreed.stop, agreed.num_commands) == (True, 2)
    assert json.loads((folder / "run.json").read_text())["status"] == "running"


def test_a_rank_that_joins_takes_what_the_others_took_and_refuses_what_they_refused(runs: Path) -> None:
    """They refused width 3 with a rate below 0, and width 4 because of their number of ranks at that time."""
    folder = folder_of(runs, PipeSGD(width=2))
    for changes in ({"lr": -1, "width": 3}, {"width": 4}, {"lr": 0.5, "warmup_steps": 2}, {"lr": 0.25}):
        write_command(folder, {"set": changes})
    rows: list[dict[str, Any]] = [{"number": number, "step": 3} for number in range(1, 5)]
    for row in rows[:2]:
        row["refused"] = "no"
    update_run(folder, steering=rows)
    ranks = OfTwo([])
    controller = RunController(PipeSGD(width=2), Settings(steps=9), ranks, ranks, folder)  # type: ignore[arg-type]
    controller.catch_up(4, 1, trained=True)
    assert (controller.algorithm, ranks.lr, controller.num_taken) == (PipeSGD(width=2, warmup_steps=2), 0.1, 4)
    controller.catch_up(4, 1, trained=False)
    assert ranks.lr == 0.25


def test_an_interrupt_is_put_off_and_a_second_one_is_not() -> None:
    done: list[str] = []

    def begin(word: str, num_interrupts: int) -> None:
        with deferred_interrupt("in words"):
            for _ in range(num_interrupts):
                signal.raise_signal(signal.SIGINT)
            done.append(word)
            float(word)

    with pytest.raises(KeyboardInterrupt, match="in words"):
        begin("1", 1)
    with pytest.raises(KeyboardInterrupt):
        begin("2", 2)
    with pytest.raises(ValueError, match="three"):
        begin("three", 0)
    begin("4", 0)
    assert done == ["1", "three", "4"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
