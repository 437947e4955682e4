"""A worker's process is killed, and another takes its place in the run that continued without it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.killing import DiesAt, Slow, SlowUntil, outcomes, rank_here
from tests.distributed.pool import RankPool
from tests.distributed.ranks import Outcome
from tests.distributed.test_survivors import AT_STEP
from tests.laws import reference, tiny
from tests.laws.train import make_job
from tests.waiting import within
from workbench.algorithms import (
    ADPSGD,
    DPSGD,
    AsyncSGD,
    BackupSGD,
    ChocoSGD,
    DeAR,
    FedAvg,
    GradientTracking,
    NoCommunication,
    NoLoCo,
    PartialAllReduce,
    PipeSGD,
    StochasticGradientPush,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.codecs import ErrorFeedback, TopK
from workbench.collectives import Auto, Native, Once, PowerSGD, Ring
from workbench.errors import ConfigError
from workbench.problems.base import Sampler
from workbench.problems.loading import fetch
from workbench.program import Algorithm
from workbench.runtimes.checkpoint.files import complete_checkpoints
from workbench.runtimes.control.commands import PAUSE, RESUME, write_command
from workbench.runtimes.liveness.failure_detector import read_heartbeat
from workbench.runtimes.liveness.membership import Membership, left_name
from workbench.runtimes.rank.join import rejoin
from workbench.runtimes.rank.main import Job, run_rank
from workbench.runtimes.transport import measure_link as link
from workbench.runtimes.transport import torch_distributed as torch_dist
from workbench.settings import Settings
from workbench.trace.files.append import open_append
from workbench.trace.run import Run
from workbench.trace.store import read_info

NUM_RANKS, VICTIM = 3, 1
STEP_S = 0.08  # few long steps: what another process needs to join is time
HOW = Settings(steps=50, batch_size=2, timeout_s=20, evaluate_every=0, trace_steps=0)
SOON_STEPS = 30
SOON = replace(HOW, steps=SOON_STEPS)


def and_weights(train: Any, *args: Any) -> torch.Tensor:
    """A rank's parameters at the run's end."""
    train(*args)
    return torch.cat([value.reshape(-1) for value in tiny.remembered_state().values()])


def dies_at_the_door(job: Job, rank: int) -> None:
    """Join, and be killed when all others wait to meet it."""

    def die(*_: Any) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    torch_dist.TorchTransport.admit = die  # type: ignore[method-assign, assignment]
    until_left(job, rank)
    rejoin(job, rank)


def late() -> float:
    return 0.2 if rank_here() % 2 else 0.035


def came_path(job: Job) -> Path:
    """The file which says that the steps need not be long any more."""
    return Path(job.folder) / "came"


def at_pace(pace: Callable[[], float], path: Path) -> SlowUntil:
    return SlowUntil(pace(), path)


def with_another(
    algorithm: Algorithm,
    comes: Any,
    how: Settings = HOW,
    victim: int = VICTIM,
    *,
    before: Any = None,
    data: Any = None,
    num_ranks: int = NUM_RANKS,
    pace: Callable[[], float] | None = None,
) -> tuple[dict[int, Outcome], Outcome, Run]:
    """The outcomes of the first ranks and of the one that joined later; and the record.

    Args:
        before: what yet another process did, up to its end, before the one that joined.
        data: what they train on; None: the tiny data.
        pace: seconds of a rank's steps until another process has come; None: equal on all, or late on odd ranks for a
            quorum.
    """
    pace = pace or (late if isinstance(algorithm, PartialAllReduce) else lambda: STEP_S)
    problem = tiny.problem() if data is None else replace(tiny.problem(), train=data)
    job = make_job("torch", num_ranks, algorithm, problem, how)
    problem = replace(problem, model=tiny.Remembered(partial(at_pace, pace, came_path(job))))
    job = replace(job, problem=problem)
    dying = replace(job, problem=replace(problem, model=partial(DiesAt, AT_STEP)))
    found: dict[int, Outcome] = {}
    calls: list[Any] = [
        (run_rank, (dying,)) if rank == victim else (and_weights, (run_rank, job)) for rank in range(num_ranks)
    ]
    later = [(RankPool("torch", 1), does) for does in (before, comes) if does is not None]
    for pool, _ in later:
        pool.run(int)
    those = threading.Thread(target=lambda: found.update(outcomes(calls, 60)))
    those.start()
    try:
        *_, came = (pool.outcomes([(does, (job, victim))], may_die=True)[0] for pool, does in later)
    finally:
        came_path(job).touch()
        for pool, _ in later:
            pool.close()
        those.join(70)
    return found, came, Run.load(job.folder)


def rejoins(job: Job, rank: int) -> torch.Tensor:
    until_left(job, rank)
    return and_weights(rejoin, job, rank)


def rejoins_slowly(job: Job, rank: int) -> torch.Tensor:
    """Steps are long to the end."""
    until_left(job, rank)
    SlowUntil.makes_it_at = None
    return and_weights(rejoin, job, rank)


def until_left(job: Job, rank: int) -> None:
    """In the process that is to join: wait until its place is free."""
    SlowUntil.makes_it_at = 2
    assert within(30, (Path(job.folder) / "members" / left_name(rank, 0)).exists)


@pytest.mark.parametrize("algorithm", [AsyncSGD(), BackupSGD(backups=1), NoCommunication()], ids=str)
def test_another_process_takes_the_place(algorithm: Algorithm) -> None:
    found, came, run = with_another(algorithm, rejoins, replace(SOON, checkpoint_every=12))
    assert set(found) == {0, 2}
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
    assert run.info["status"] == "finished"
    assert [row["rank"] for row in run.info["departures"]] == [VICTIM]
    assert [row["rank"] for row in run.info["joined"]] == [VICTIM]
    first = run.info["joined"][0]["step"]
    steps = [row["step"] for row in run.metrics[VICTIM]]
    assert 0 < first < SOON_STEPS, "behind rank 0's last step, which may have been slower than the one that was killed"
    assert steps[:AT_STEP] == [*range(AT_STEP)], "what the dead one had written stands"
    backup = isinstance(algorithm, BackupSGD)  # the last updates do not wait for a late worker
    assert steps[-1] == SOON_STEPS - 1 or (backup and steps[-1] >= first)
    sent = [row["bytes_sent"] for row in run.metrics[VICTIM]]
    assert sent == sorted(sent), "the bytes of a rank, whichever process has it"
    assert not run.damaged
    if algorithm.requires.servers:
        assert all(torch.equal(outcome.value, came.value) for outcome in found.values()), (
            "all end with the same parameters"
        )
        by = Counter(source for update in run.updates() for source in update["sources"])
        assert by[VICTIM] > (0 if backup else (SOON_STEPS - first) * 0.9)
        if isinstance(algorithm, AsyncSGD):
            assert by == {0: SOON_STEPS, VICTIM: AT_STEP + SOON_STEPS - first, 2: SOON_STEPS}, (
                "its gradients are used, each once"
            )
        else:
            assert max(update["update"] for update in run.updates()) == SOON_STEPS
    assert not (Path(str(run.folder)) / "members").exists()


STEPS_OF_FEWER = replace(HOW, steps=30, on_failure="shrink", optimizer=tiny.momentum, checkpoint_every=12)


def expected(first_of_two: int, first_of_three: int) -> torch.Tensor:
    """Parameters of one process that takes the samples of three ranks, from one step on those of two, and then of three again."""
    problem = tiny.problem(partial(Slow, 0.0))
    model, optimizer, _ = reference.begin(problem, STEPS_OF_FEWER)
    three = Sampler(problem.num_samples(), (HOW.batch_size or 0) * NUM_RANKS, 1, HOW.seed)
    two = replace(
        three, batch_size=(HOW.batch_size or 0) * 2, origin=(first_of_two, three.samples_before(first_of_two))
    )
    again = replace(three, origin=(first_of_three, two.samples_before(first_of_three)))
    for step in range(STEPS_OF_FEWER.steps or 0):
        sampler = three if step < first_of_two else two if step < first_of_three else again
        optimizer.zero_grad()
        problem.batch_loss(model, fetch(problem.train_data(), sampler.share(step, 0))).backward()
        optimizer.step()
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()])


@pytest.mark.parametrize(
    ("algorithm", "victim"),
    [
        (SynchronousSGD(), 1),
        (SynchronousSGD(collective=Ring()), 0),
        (PipeSGD(width=3), 1),
        (DeAR(), 1),
        (SynchronousSGD(collective=PowerSGD(rank=1, alternate=True)), 1),
        (SynchronousSGD(collective=Once(codec=ErrorFeedback(codec=TopK(fraction=0.25)), spread="encoded")), 1),
        (PartialAllReduce(quorum="majority"), 0),
        (PartialAllReduce(quorum=1), 1),
        (StreamingDiLoCo(every=4, fragments=2, delay=1), 1),
        (DPSGD(), 1),
        (NoLoCo(every=3), 0),
        (FedAvg(every=4, fraction=0.6), 1),
        (ChocoSGD(), 1),
        (GradientTracking(), 0),
        (StochasticGradientPush(), 1),
    ],
    ids=str,
)
def test_those_that_went_on_as_fewer_are_as_many_again(algorithm: Algorithm, victim: int) -> None:
    """From there on the synchronous algorithm equals its run on three ranks, with momentum.

    Rank 0 can be replaced, too.
    """
    how = replace(STEPS_OF_FEWER, on_failure="stop") if isinstance(algorithm, PartialAllReduce) else STEPS_OF_FEWER
    found, came, run = with_another(algorithm, rejoins, how, victim)
    others = [rank for rank in range(NUM_RANKS) if rank != victim]
    assert list(found) == others
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
    assert run.info["status"] == "finished"
    assert [row["rank"] for row in run.info["departures"]] == [victim]
    assert [row["ranks"] for row in run.info["shrunk"]] == [others]
    assert [row["rank"] for row in run.info["joined"]] == [victim]
    fewer, more = run.info["shrunk"][0]["step"], run.info["joined"][0]["step"]
    assert fewer < more < (how.steps or 0)
    for rank, rows in run.metrics.items():
        steps = [row["step"] for row in rows]
        assert steps[-1] == (how.steps or 0) - 1
        assert rank != victim or {*range(more, how.steps or 0)} <= set(steps), "it takes all steps from there on"
    assert all(torch.equal(outcome.value, came.value) for outcome in found.values()), "all end with the same parameters"
    assert complete_checkpoints(Path(str(run.folder)))[0].num_ranks == (NUM_RANKS if more <= 24 else NUM_RANKS - 1)
    assert not (Path(str(run.folder)) / "members").exists()
    if isinstance(algorithm, SynchronousSGD) and isinstance(algorithm.collective, Native | Ring):
        assert torch.allclose(came.value, expected(fewer, more), rtol=1e-11, atol=1e-13)


def uneven() -> float:
    return 0.1 if rank_here() == 3 else 0.06


OWN_PACE = replace(
    HOW,
    steps=60,
    on_failure="shrink",
    optimizer=tiny.momentum,
    schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.95),
    checkpoint_every=55,
)


def sets_lr_and_comes(job: Job, rank: int) -> torch.Tensor:
    """Set a learning rate, which the schedule then lowers, and join."""
    until_left(job, rank)
    folder, other = Path(job.folder), 0 if rank else 1
    write_command(folder, {"set": {"lr": 0.03}})
    assert within(20, lambda: read_info(folder).get("steering"))
    at = len(Run.load(folder).metrics[other])
    assert within(20, lambda: len(Run.load(folder).metrics[other]) > at + 5)
    return and_weights(rejoin, job, rank)


@pytest.mark.parametrize("victim", [1, 2, 0], ids=["one that asks", "one that answers", "rank 0"])
def test_ranks_at_their_own_pace_admit_a_process_at_the_step_of_the_furthest(victim: int) -> None:
    """In a ring of four, ranks 0 and 2 answer, 1 and 3 ask. No step and no sample is left out or taken twice."""
    found, came, run = with_another(ADPSGD(), sets_lr_and_comes, OWN_PACE, victim, num_ranks=4, pace=uneven)
    others = [rank for rank in range(4) if rank != victim]
    assert list(found) == others
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
    assert run.info["status"] == "finished"
    assert [row["rank"] for row in run.info["departures"]] == [victim]
    assert [row["ranks"] for row in run.info["shrunk"]] == [others]
    assert [row["rank"] for row in run.info["joined"]] == [victim]
    assert all(torch.equal(outcome.value, came.value) for outcome in found.values())
    fewer, more, num_steps = run.info["shrunk"][0]["step"], run.info["joined"][0]["step"], OWN_PACE.steps or 0
    asked_at = run.info["steering"][-1]["steps"]
    assert fewer < min(asked_at) < max(asked_at) == more < num_steps
    rows = {rank: [row for row in run.metrics[rank] if "evaluation" not in row] for rank in range(4)}
    for rank in range(4):
        first = more if rank == victim else fewer  # the one that was killed may have been ahead of `fewer`
        assert [row["step"] for row in rows[rank] if row["step"] >= first] == [*range(first, num_steps)]
    at_step = {rank: {row["step"]: row for row in rows[rank]} for rank in range(4)}
    for step in range(fewer + 1, num_steps):
        here = [at_step[rank][step] for rank in range(4) if rank != victim or step >= more]
        (total,) = {row["samples"] for row in here}
        assert total - at_step[others[0]][step - 1]["samples"] == sum(row["num_samples"] for row in here)
    assert all(at_step[victim][step]["lr"] == at_step[others[0]][step]["lr"] for step in range(more, num_steps))
    newest = complete_checkpoints(Path(str(run.folder)))[0]
    assert (newest.step, newest.num_ranks) == (54, 4)


def joins_and(act: Callable[[], None], done: Callable[[Any], Any], job: Job, rank: int) -> torch.Tensor:
    """Join, and call `act` as soon as the record says so; steps are long until its effect is `done`, by the record."""
    until_left(job, rank)
    SlowUntil.makes_it_at = None
    folder = Path(job.folder)

    def wait_and_act() -> None:
        assert within(30, lambda: read_info(folder).get("joined"))
        act()
        assert within(30, lambda: done(read_info(folder)))
        came_path(job).touch()

    acting = threading.Thread(target=wait_and_act)
    acting.start()
    try:
        return and_weights(rejoin, job, rank)
    finally:
        acting.join()


def comes_and_kills(job: Job, rank: int) -> torch.Tensor:
    """Join, and kill rank 3 after that."""
    folder = Path(job.folder)

    def kill() -> None:
        at = len(Run.load(folder).metrics[3])
        assert within(30, lambda: len(Run.load(folder).metrics[3]) > at + 2)
        os.kill((read_heartbeat(folder, 3) or {})["pid"], signal.SIGKILL)

    return joins_and(kill, lambda info: len(info["shrunk"]) == 2, job, rank)


def test_ranks_at_their_own_pace_shrink_again_after_an_admission() -> None:
    found, came, run = with_another(ADPSGD(), comes_and_kills, OWN_PACE, num_ranks=4, pace=uneven)
    assert list(found) == [0, 2]
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
        assert torch.equal(outcome.value, came.value)
    assert run.info["status"] == "finished"
    assert [row["rank"] for row in run.info["departures"]] == [VICTIM, 3]
    assert [row["ranks"] for row in run.info["shrunk"]] == [[0, 2, 3], [0, 1, 2]]
    assert [row["rank"] for row in run.info["joined"]] == [VICTIM]
    assert {max(row["step"] for row in run.metrics[rank]) for rank in range(3)} == {(OWN_PACE.steps or 0) - 1}


HELD_S = 1.5


def holds_and_comes(job: Job, rank: int) -> torch.Tensor:
    """Pause the run for a while, resume it, and join."""
    until_left(job, rank)
    folder = Path(job.folder)
    write_command(folder, PAUSE)
    assert within(30, lambda: read_info(folder)["status"] == "paused")
    time.sleep(HELD_S)
    write_command(folder, RESUME)
    return and_weights(rejoin, job, rank)


@pytest.mark.parametrize("algorithm", [SynchronousSGD(), AsyncSGD()], ids=str)
def test_seconds_of_one_that_comes_are_the_others(algorithm: Algorithm) -> None:
    """An earlier pause of the run is no training."""
    found, came, run = with_another(
        algorithm, holds_and_comes, STEPS_OF_FEWER if isinstance(algorithm, SynchronousSGD) else SOON
    )
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
    first = run.info["joined"][0]["step"]
    seconds = {
        rank: {row["step"]: row["seconds"] for row in run.metrics[rank] if "loss" in row} for rank in (0, VICTIM)
    }
    late = [seconds[VICTIM][step] - seconds[0][step] for step in seconds[VICTIM] if step > first]
    assert late and abs(late[0]) < HELD_S / 2


def twice(job: Job, rank: int) -> torch.Tensor:
    """Ask for a place when another process has asked too, and be refused with "ask again"."""
    until_left(job, rank)
    write_command(Path(job.folder), {"join": rank})
    return and_weights(rejoin, job, rank)


@pytest.mark.parametrize("algorithm", [SynchronousSGD(), AsyncSGD()], ids=str)
def test_who_is_told_to_ask_again_does(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    how = STEPS_OF_FEWER if isinstance(algorithm, SynchronousSGD) else HOW
    found, came, run = with_another(algorithm, twice, how)
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
    assert [row["rank"] for row in run.info["joined"]] == [VICTIM]
    first, second = (row.get("refused", "") for row in run.info["steering"])
    assert first.startswith(("another process", "rank 1 had ended")) and second == "", (
        "the first asked in vain: it was alone, or not the last"
    )


def comes_and_steers(job: Job, rank: int) -> torch.Tensor:
    """Join, and then write a command."""
    return joins_and(
        lambda: write_command(Path(job.folder), {"set": {"lr": 0.01}}),
        lambda info: len(info["steering"]) == 2,
        job,
        rank,
    )


def test_what_was_said_before_it_came_stays_said() -> None:
    """Rank 0 keeps the record, also where another process is rank 0."""
    _, came, run = with_another(SynchronousSGD(), comes_and_steers, STEPS_OF_FEWER, victim=0)
    assert came.error is None, came.trace
    first, second = run.info["steering"]
    assert (first["number"], first["join"], second["number"], second["set"]) == (1, 0, 2, {"lr": 0.01})
    assert {[row["lr"] for row in rows if "lr" in row][-1] for rows in run.metrics.values()} == {0.01}


def test_one_comes_after_one_that_was_killed_at_the_door() -> None:
    how = replace(STEPS_OF_FEWER, steps=50)
    found, came, run = with_another(SynchronousSGD(), rejoins, how, before=dies_at_the_door)
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
    assert [row["rank"] for row in run.info["joined"]] == [VICTIM]
    first, second = run.info["steering"]
    assert "had ended again" in first["refused"] and "refused" not in second


def steers_and_comes(job: Job, rank: int) -> tuple[torch.Tensor, int]:
    """Write a command, and join. Return how often this rank then met the others."""
    until_left(job, rank)
    folder = Path(job.folder)
    write_command(folder, {"set": {"lr": 0.03}})
    assert within(20, lambda: read_info(folder).get("steering"))
    at = len(Run.load(folder).metrics[1])
    assert within(20, lambda: len(Run.load(folder).metrics[1]) > at + 5), "the schedule has lowered it since"
    number, gather = [0], Membership.gather_texts

    def counting(*args: Any, **named: Any) -> list[str]:
        number[0] += 1
        return gather(*args, **named)

    Membership.gather_texts = counting  # type: ignore[method-assign]
    return and_weights(rejoin, job, rank), number[0]


def test_it_has_the_others_learning_rate_and_meets_them_no_more_than_they_did() -> None:
    """A learning rate that was set, and that a schedule has lowered since, is not set again.

    Old commands of rank 0 are not announced at every step.
    """
    how = replace(
        STEPS_OF_FEWER,
        steps=50,
        schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.9),
        checkpoint_every=None,
    )
    found, came, run = with_another(SynchronousSGD(), steers_and_comes, how, victim=0)
    assert came.error is None, came.trace
    weights, number = came.value
    assert all(torch.equal(outcome.value, weights) for outcome in found.values())
    first = run.info["joined"][0]["step"]
    rates = [{row["step"]: row["lr"] for row in rows if "lr" in row} for rows in run.metrics.values()]
    assert all(len({rate[step] for rate in rates}) == 1 for step in range(first, how.steps or 0)), (
        "at every step all have one rate"
    )
    assert number < 10 < (how.steps or 0) - first


@pytest.mark.parametrize("algorithm", [AsyncSGD(), SynchronousSGD(), PartialAllReduce(quorum=1), ADPSGD()], ids=str)
def test_one_that_is_killed_at_the_door_is_not_waited_for(algorithm: Algorithm) -> None:
    how = {AsyncSGD: HOW, PartialAllReduce: replace(STEPS_OF_FEWER, on_failure="stop")}.get(
        type(algorithm), STEPS_OF_FEWER
    )
    found, came, run = with_another(algorithm, dies_at_the_door, how)
    assert isinstance(came.error, EOFError | OSError), "it was to be killed"
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
    assert run.info["status"] == "finished"
    assert "joined" not in run.info
    assert "rank 1 had ended again" in run.info["steering"][-1]["refused"]


def dies_behind_the_door(job: Job, rank: int) -> None:
    """Join, be admitted, and be killed while all ranks measure their network again."""
    number, hop = [0], link._hop

    def die(*args: Any) -> None:
        number[0] += 1
        os.kill(os.getpid(), signal.SIGKILL) if number[0] == 4 else hop(*args)

    link._hop = die
    until_left(job, rank)
    rejoin(job, rank)


def test_one_that_is_killed_while_links_are_measured_has_left_once_more() -> None:
    found, came, run = with_another(SynchronousSGD(collective=Auto()), dies_behind_the_door, STEPS_OF_FEWER)
    assert isinstance(came.error, EOFError | OSError), "it was to be killed"
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
    assert torch.equal(found[0].value, found[2].value)
    assert run.info["status"] == "finished"
    assert [row["rank"] for row in run.info["joined"]] == [VICTIM]
    assert [row["rank"] for row in run.info["departures"]] == [VICTIM, VICTIM]
    assert [row["ranks"] for row in run.info["shrunk"]] == [[0, 2], [0, 2]]
    assert run.steps()[-1]["step"] == STEPS_OF_FEWER.steps - 1


@pytest.mark.parametrize(
    ("algorithm", "rank", "words"),
    [
        (AsyncSGD(), 2, "rank 2 of the run .* is alive"),
        (AsyncSGD(), 0, "cannot continue without rank 0"),
        (SynchronousSGD(), 1, "cannot continue without rank 1"),
    ],
    ids=str,
)
def test_who_is_needed_or_there_cannot_be_replaced(algorithm: Algorithm, rank: int, words: str) -> None:
    from workbench.runtimes.liveness.failure_detector import FailureDetector

    job = make_job("torch", NUM_RANKS, algorithm, tiny.problem(), HOW)
    (Path(job.folder) / "members").mkdir()
    with FailureDetector(Path(job.folder), 2, NUM_RANKS), pytest.raises(ConfigError, match=words):
        rejoin(job, rank)


def test_a_record_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_bytes(b"{1}\n{2}\n" + b"half of a line" * 10_000)
    file = open_append(path)
    os.write(file, b"{3}\n")
    os.close(file)
    assert path.read_bytes() == b"{1}\n{2}\n{3}\n"
    path.write_bytes(b"half of the first")
    os.close(open_append(path))
    assert path.read_bytes() == b""
