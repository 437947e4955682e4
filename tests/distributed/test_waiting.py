"""A rank that waits reports for what and for which rank; and every wait has an end."""

from __future__ import annotations

import io
import os
import re
import signal
import threading
import time
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from tests.distributed.pool import PoolDied, RankPool, shared_pool
from tests.laws import tiny
from tests.laws.train import make_job, on_real_runtimes, train
from workbench import units
from workbench.algorithms import PipeSGD, SynchronousSGD
from workbench.errors import PeerFailed, Stalled
from workbench.runtimes.liveness import failure_detector as detector
from workbench.runtimes.liveness.deadline import Deadline
from workbench.runtimes.rank.main import Job, run_rank
from workbench.settings import Settings

HOW = Settings(steps=4, batch_size=1, timeout_s=60)
WAIT_REPORT_S, HEARTBEAT_S = 0.5, 0.1  # in place of ten seconds and one


class LateAt(torch.nn.Module):
    """The MLP, with an action in the third backward of a rank."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.body, self.what, self.count = tiny.mlp(), what, 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        if self.training:
            self.count += 1
            if self.count == 3:
                out.register_hook(lambda _: self.what())
        return out


def stop_myself() -> None:
    time.sleep(3 * HEARTBEAT_S)  # so that it is known where
    os.kill(os.getpid(), signal.SIGSTOP)


def heard(job: Job) -> tuple[str, BaseException | None]:
    """On a rank: its standard error while it trains, and the outcome."""
    before = detector.HEARTBEAT_S, units.WAIT_REPORT_S
    detector.HEARTBEAT_S, units.WAIT_REPORT_S = HEARTBEAT_S, WAIT_REPORT_S
    error: BaseException | None = None
    with redirect_stderr(io.StringIO()) as said:
        try:
            run_rank(job)
        except (PeerFailed, Stalled) as caught:
            error = caught
        finally:
            detector.HEARTBEAT_S, units.WAIT_REPORT_S = before
    return said.getvalue(), error


def outcomes(
    pool: RankPool, algorithm: Any, what: Any, how: Settings
) -> tuple[list[tuple[str, BaseException | None]], Job]:
    """The ranks' messages in a training in which rank 1 is late."""
    job = make_job(pool.runtime, 2, algorithm, tiny.problem(partial(LateAt, lambda: None)), how)
    late = replace(job, problem=tiny.problem(partial(LateAt, what)))
    found = pool.outcomes([(heard, (job,)), (heard, (late,))])
    for outcome in found:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in found], job


@on_real_runtimes
@pytest.mark.parametrize(
    ("algorithm", "what"), [(SynchronousSGD(), "the all-reduce of step 2"), (PipeSGD(width=2), r"\w.* \(step 3\)")]
)
def test_a_waiting_rank_says_for_what_and_who_has_not_come(runtime: Any, algorithm: Any, what: str) -> None:
    told, job = outcomes(shared_pool(runtime, 2), algorithm, partial(time.sleep, 2.0), HOW)
    assert [error for _, error in told] == [None, None]
    lines = [line for line in told[0][0].splitlines() if line.startswith("waiting")]
    assert 1 <= len(lines) <= 8, lines  # at 0.5 and 1 s, on the lane's thread too
    words = rf"waiting [12] s for {what}: rank 1 has not arrived \(alive, in backward of step 2\)"
    assert any(re.fullmatch(words, line) for line in lines), lines
    assert list(Path(job.folder).glob("present-*")) == [], "of a run that is over nobody asks"


def test_a_rank_that_was_stopped_is_told_from_a_slow_one() -> None:
    pool = shared_pool("torch", 2)
    pool.run(os.getpid)

    def go_on() -> None:
        rank = psutil.Process(pool.pids[1])
        while rank.status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
        time.sleep(3)
        rank.resume()

    waker = threading.Thread(target=go_on)
    waker.start()
    told, _ = outcomes(pool, SynchronousSGD(), stop_myself, replace(HOW, timeout_s=1.5))
    waker.join()
    words = (
        r"waited \d s for the all-reduce of step 2: rank 1 has not arrived \(stopped, in backward of step 2\): "
        "a rank has ended, is much slower"
    )
    assert isinstance(told[0][1], Stalled)
    assert re.match(words, str(told[0][1])), told[0][1]
    assert isinstance(told[1][1], PeerFailed)
    starts = pool.num_starts
    train("torch", 2, SynchronousSGD(), tiny.problem(), HOW)
    assert pool.num_starts == starts


def stops_inside(job: Job) -> None:
    """On a rank: rank 1 stops after the barrier, when the others are already in the library's call."""
    from workbench.runtimes.transport import mpi

    detector.HEARTBEAT_S, units.WAIT_REPORT_S = HEARTBEAT_S, WAIT_REPORT_S
    number, to_host = [0], mpi.MpiTransport._to_host

    def counting(self: Any, flat: Tensor) -> Tensor:
        number[0] += self.bound
        if self.rank == 1 and number[0] == 6:
            stop_myself()
        return to_host(self, flat)

    mpi.MpiTransport._to_host = counting  # type: ignore[method-assign]
    run_rank(job)


@pytest.mark.mpi
def test_a_call_that_nothing_can_interrupt_ends_with_its_process() -> None:
    pool = RankPool("mpi", 2)
    job = make_job("mpi", 2, SynchronousSGD(), tiny.problem(), replace(HOW, steps=20, timeout_s=1.5))
    begin = time.monotonic()
    with pytest.raises(PoolDied) as caught:
        pool.run(stops_inside, job)
    pool.close()
    assert time.monotonic() - begin < 40
    assert re.search(
        r"waiting \d s for the library's own call in step \d, which all ranks had reached: rank 1 is stopped",
        str(caught.value),
    )
    assert re.search(
        r"waited 2 s for the library's own call .* Nothing can interrupt it, so rank 0 ends: heal\(\)",
        str(caught.value),
    )
    assert "rank 0 failed: Stalled" in (Path(job.folder) / "failed-00000.json").read_text()


class Clock:
    """A clock that advances only during `sleep`, and counts its readings."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def perf_counter(self) -> float:
        self.looks += 1
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_wait_says_so_after_ten_seconds_and_then_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr("workbench.runtimes.liveness.deadline.time", clock)
    deadline = Deadline("the barrier", lambda: None, 100.0)

    def wait() -> None:
        while True:
            deadline.pause()

    with pytest.raises(Stalled, match="waited 100 s for the barrier: a rank has ended"):
        wait()
    assert [line.split()[1] for line in caplog.messages] == ["10", "20", "40", "80"]


def test_a_short_wait_does_not_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("workbench.runtimes.liveness.deadline.time", clock)
    deadline = Deadline("the barrier", lambda: None, 100.0)
    for _ in range(250):
        deadline.pause()
    assert clock.looks == 1, "once, when it begins"


def never_joins(job: Job, leaves_word: bool) -> None:
    """On a rank: it fails before it joins, like a rank that cannot read its job."""
    if leaves_word:
        (Path(job.folder) / "ended-00001.json").write_text(
            '{"ename": "KeyboardInterrupt", "evalue": "", "traceback": ""}'
        )


@pytest.mark.parametrize(
    ("runtime", "leaves_word", "error"),
    [
        ("torch", False, Stalled),
        pytest.param("mpi", True, PeerFailed, marks=pytest.mark.mpi),
        pytest.param("mpi", False, Stalled, marks=pytest.mark.mpi),
    ],
)
def test_a_rank_that_never_joins_is_told_and_the_next_run_goes_well(
    runtime: Any, leaves_word: bool, error: type[Exception]
) -> None:
    pool = shared_pool(runtime, 2)
    timeout_s = 20 if leaves_word else 1
    job = make_job(runtime, 2, SynchronousSGD(), tiny.problem(), replace(HOW, timeout_s=timeout_s))
    found = pool.outcomes([(run_rank, (job,)), (never_joins, (job, leaves_word))])
    assert isinstance(found[0].error, error)
    words = (
        "rank 1 failed before it joined the run: KeyboardInterrupt"
        if leaves_word
        else "waited 1 s for all ranks to join the run"
    )
    assert words in str(found[0].error)
    starts = pool.num_starts
    train(runtime, 2, PipeSGD(width=2), tiny.problem(), replace(HOW, timeout_s=20))
    assert pool.num_starts == starts
