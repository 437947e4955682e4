"""Other settings while a run continues: it is the run that was stopped there and resumed with them, bit-identical."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.laws import tiny
from tests.laws.spoken import Speaks, train_and_look
from tests.laws.train import COMPUTE, NETWORK, make_job, on_real_runtimes, run_on_ranks
from tests.laws.variants import name_of
from workbench import topologies
from workbench.algorithms import (
    DPSGD,
    AdaptiveDelaySGD,
    AsyncSGD,
    BackupSGD,
    ChocoSGD,
    DeAR,
    DelayCompensatedSGD,
    DelayedSGD,
    DiLoCo,
    GradientTracking,
    LayerwiseSGD,
    LocalSGD,
    NoCommunication,
    NoLoCo,
    PartialAllReduce,
    PipeSGD,
    SoftsyncSGD,
    StaleSGD,
    StaleSynchronousSGD,
    StochasticGradientPush,
    SynchronousSGD,
)
from workbench.algorithms.gossip import GossipAlgorithm
from workbench.codecs import ErrorFeedback, TopK, Truncate16
from workbench.collectives import Once, Ring
from workbench.errors import ConfigError
from workbench.laws.sentences import assert_near
from workbench.program import Algorithm, record_of
from workbench.runtimes.control.commands import PAUSE, RESUME, STOP, Command, write_command
from workbench.runtimes.control.reconfigure import changed, encoded
from workbench.runtimes.simulator.replay import replay
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.topologies import Complete, FromAdjacency, Star
from workbench.trace.run import Run
from workbench.trace.store import read_info

STEPS = 9
settings = partial(Settings, steps=STEPS, batch_size=3, timeout_s=30, seed=3, optimizer=tiny.momentum)


def simulation(algorithm: Algorithm, num_ranks: int, how: Settings) -> Simulation:
    return Simulation(algorithm, tiny.problem(), how, num_ranks, network=NETWORK, compute=COMPUTE, check_in_flight=True)


def parameters(made: Simulation) -> list[Tensor]:
    return [worker.trained.read_parameters() for worker in made.workers]


def with_lr(checkpoints: list[dict[str, Any]], lr: float | None) -> list[dict[str, Any]]:
    """The same checkpoints, of an optimizer that continues with another learning rate."""
    other = deepcopy(checkpoints)
    for saved in other:
        for group in saved["replica"]["optimizer"]["param_groups"]:
            group["lr"] = lr if lr is not None else group["lr"]
    return other


def stopped_and_resumed(
    algorithm: Algorithm, changes: dict[str, Any], num_ranks: int, step: int, how: Settings
) -> Simulation:
    """Stopped at the end of the step before `step`, and resumed with those changes."""
    first = simulation(algorithm, num_ranks, how)
    first.run(stop_after=step - 1)
    other, lr = changed(algorithm, encoded(algorithm, changes), num_ranks)
    second = simulation(other, num_ranks, how)
    second.run(resume=with_lr(first.checkpoints.at_stop, lr))
    return second


# ---------------------------------------------------------------- real ranks


def steer(
    runtime: str,
    algorithm: Algorithm,
    words: dict[int, tuple[Command, ...]],
    *,
    beside: Callable[[Path], None] | None = None,
    stop_after: int | None = None,
    num_ranks: int = 3,
    **how: Any,
) -> tuple[Run, list[Tensor]]:
    """Train on real ranks with commands during the run: the record, and each rank's parameters at the end.

    Args:
        beside: called with the run's folder on a separate thread meanwhile.
    """
    job = replace(make_job(runtime, num_ranks, algorithm, tiny.problem(), settings(**how)), stop_after=stop_after)
    problem = tiny.problem(tiny.Remembered(partial(Speaks, job.folder, words)))
    thread = threading.Thread(target=beside, args=(Path(job.folder),)) if beside else None
    if thread is not None:
        thread.start()
    found = run_on_ranks(train_and_look, replace(job, problem=problem), num_ranks)
    if thread is not None:
        thread.join(10)
    return Run.load(job.folder), found


def wait_for(folder: Path, status: str) -> str:
    """Wait for that status, at most half a minute. Return the status."""
    deadline = time.monotonic() + 30
    while read_info(folder)["status"] != status and time.monotonic() < deadline:
        time.sleep(0.02)
    return str(read_info(folder)["status"])


def steps_of(run: Run, rank: int) -> list[int]:
    return [row["step"] for row in run.metrics[rank] if "evaluation" not in row]


PATH = FromAdjacency(lists=((1,), (0, 2), (1,)))  # the last rank hears from rank 0 after two steps
IN_STEP = [
    (PipeSGD(width=2, collective=Ring()), {"width": 4, "lr": 0.02}),
    (PipeSGD(width=4, collective=Ring()), {"width": 1}),
    (PipeSGD(width=3, collective=Ring()), {"codec": Truncate16()}),
    (DelayedSGD(delay=1, collective=Ring()), {"delay": 3}),
    (StaleSGD(collective=Ring()), {"delay": 1}),
    (LayerwiseSGD(bucket_bytes=200.0, collective=Ring()), {"collective": Ring(codec=Truncate16()), "lr": 0.02}),
    (LocalSGD(every=3, collective=Ring()), {"every": 2}),
    (DeAR(bucket_bytes=200.0), {"lr": 0.02}),
    (DiLoCo(every=3, collective=Ring()), {"outer_lr": 0.3}),
    (SynchronousSGD(collective=Ring()), {"collective": Once(codec=ErrorFeedback(codec=TopK(k=5)))}),
    (DPSGD(topology=PATH), {"topology": Star(), "lr": 0.02}),
    (DPSGD(overlap=False, topology=PATH), {"topology": Complete(), "overlap": True}),
    (GradientTracking(topology=PATH), {"topology": topologies.Ring(), "lr": 0.02}),
    (StochasticGradientPush(), {"topology": Star()}),
    (ChocoSGD(topology=PATH), {"codec": TopK(k=20), "consensus_lr": 0.2, "topology": Complete()}),
    (NoLoCo(topology=PATH, every=2), {"outer_lr": 0.3, "every": 1}),
]


@on_real_runtimes
@pytest.mark.parametrize(("algorithm", "changes"), IN_STEP, ids=str)
def test_ranks_in_step_take_it_at_one_step_as_if_resumed_there(
    algorithm: Algorithm, changes: dict[str, Any], runtime: str
) -> None:
    run, found = steer(runtime, algorithm, {2: ({"set": encoded(algorithm, changes)},)}, steps=14)
    (entry,) = run.info["steering"]
    assert (entry["number"], entry["set"]) == (1, encoded(algorithm, changes))
    steered = record_of(changed(algorithm, encoded(algorithm, changes), 3)[0])
    for name, value in entry["became"].items():
        assert value == (changes["lr"] if name == "lr" else steered[name])
    assert ("lr" in entry["became"]) == ("lr" in changes)
    assert 2 < entry["step"] < 12
    told = [[row for row in run.events[rank] if "steer" in row] for rank in range(3)]
    assert [[(row["steer"], row["step"]) for row in rows] for rows in told] == [[(1, entry["step"])]] * 3
    assert [steps_of(run, rank) for rank in range(3)] == [list(range(14))] * 3
    resumed = parameters(stopped_and_resumed(algorithm, changes, 3, entry["step"], settings(steps=14)))
    law = f"{name_of(algorithm)}: steered is stopped and resumed"
    rounding = 1e-14 if isinstance(algorithm, GossipAlgorithm) else 0.0  # it ends with the library's own sum
    for rank, (ours, theirs) in enumerate(zip(found, resumed, strict=True)):
        assert_near(
            law, ours, theirs, rounding, f"with {changes} from step {entry['step']} on, at the end, rank {rank}"
        )
    plain = simulation(algorithm, 3, settings(steps=14))
    plain.run()
    assert not torch.equal(found[0], parameters(plain)[0])


SERVED = [
    (BackupSGD(backups=1), {"backups": 0, "lr": 0.02}),
    (BackupSGD(backups=0, shards=2), {"backups": 1}),
    (AsyncSGD(), {"lr": 0.02}),
    (AsyncSGD(shards=2), {"cutoff": 0}),
    (AsyncSGD(dedicated=True), {"clip_norm": 0.1, "lr": 0.02}),
    (StaleSynchronousSGD(bound=0), {"bound": 2}),
    (SoftsyncSGD(), {"splits": 2}),
    (DelayCompensatedSGD(), {"strength": 0.5}),
]


@on_real_runtimes
@pytest.mark.parametrize(("algorithm", "changes"), SERVED, ids=str)
def test_servers_take_it_at_one_version(algorithm: Algorithm, changes: dict[str, Any], runtime: str) -> None:
    run, _ = steer(runtime, algorithm, {3: ({"set": encoded(algorithm, changes)},)}, steps=20)
    (entry,) = run.info["steering"]
    assert run.info["status"] == "finished"
    assert entry["versions"]
    for rank in range(algorithm.roles(3).num_computing):
        (told,) = [row for row in run.events[rank] if "steer" in row]
        assert told["step"] == entry["steps"][rank] < 20
        assert steps_of(run, rank) == sorted(set(steps_of(run, rank)))
        assert isinstance(algorithm, BackupSGD) or steps_of(run, rank) == list(range(20))
    with pytest.raises(ConfigError, match="was steered"):
        replay(run, algorithm, tiny.problem(), settings(steps=20))


@on_real_runtimes
def test_ranks_for_themselves_take_it_at_steps_of_their_own(runtime: str) -> None:
    run, _ = steer(runtime, NoCommunication(), {2: ({"set": {"lr": 0.01}},)}, steps=12)
    (entry,) = run.info["steering"]
    for rank in range(3):
        rates = [row["lr"] for row in run.metrics[rank] if "evaluation" not in row]
        assert rates == [0.05] * entry["steps"][rank] + [0.01] * (12 - entry["steps"][rank])


# A round of three takes all ranks. With fewer, two ranks can end the run while rank 0, which reads commands, is late.
IN_THE_BACKGROUND = PartialAllReduce(quorum=3)
HELD = [(algorithm, "torch") for algorithm in (PipeSGD(width=3), AsyncSGD(), IN_THE_BACKGROUND, NoCommunication())]
HELD_ON_MPI = [pytest.param(algorithm, "mpi", marks=pytest.mark.mpi) for algorithm in (PipeSGD(width=3), AsyncSGD())]


@pytest.mark.parametrize(("algorithm", "runtime"), [*HELD, *HELD_ON_MPI], ids=str)
def test_paused_it_holds_and_takes_words_and_goes_on(algorithm: Algorithm, runtime: str) -> None:
    """Commands after the pause reach the paused run. The last command is written once the run is seen to be paused."""
    seen: list[str] = []

    def let_go(folder: Path) -> None:
        seen.append(wait_for(folder, "paused"))
        write_command(folder, {"set": {"lr": 0.01}})
        write_command(folder, RESUME)

    run, _ = steer(runtime, algorithm, {2: (PAUSE,)}, steps=12, beside=let_go)
    assert seen == ["paused"]
    assert run.info["status"] == "finished"
    pause, change, resume = run.info["steering"]
    assert (pause["pause"], change["set"], resume["resume"]) == (True, {"lr": 0.01}, True)
    places = [row.get("steps", row.get("step")) for row in (pause, change, resume)]
    assert places == [places[0]] * 3, "nobody moved meanwhile"
    assert [len(steps_of(run, rank)) for rank in range(3)] == [12] * 3
    assert next(row["lr"] for row in reversed(run.metrics[0]) if "evaluation" not in row) == 0.01


@pytest.mark.parametrize(
    ("algorithm", "runtime"),
    [(PipeSGD(width=3), "torch"), pytest.param(AsyncSGD(), "mpi", marks=pytest.mark.mpi)],
    ids=str,
)
def test_stopped_while_paused_it_keeps_a_checkpoint(algorithm: Algorithm, runtime: str) -> None:
    def stop(folder: Path) -> None:
        wait_for(folder, "paused")
        write_command(folder, STOP)

    run, _ = steer(runtime, algorithm, {2: (PAUSE,)}, steps=12, beside=stop)
    assert run.info["status"] == "stopped"
    assert run.folder is not None
    assert len(list(run.folder.glob("checkpoint-*.pt"))) == 3


def test_a_pause_that_is_longer_than_the_time_out_ends_nothing() -> None:
    """Also where sub-programs wait in the background of each rank for what comes after it."""

    def later(folder: Path) -> None:
        wait_for(folder, "paused")
        time.sleep(4.5)  # the property is of time
        write_command(folder, RESUME)

    run, _ = steer("torch", IN_THE_BACKGROUND, {2: (PAUSE,)}, steps=8, timeout_s=3.0, beside=later)
    assert run.info["status"] == "finished"
    assert run.info["result"]["seconds"] < 4.5, "what it was held for does not count"


def test_what_is_set_does_not_move_the_step_that_a_run_is_to_stop_at() -> None:
    algorithm = AsyncSGD()
    run, _ = steer("torch", algorithm, {3: ({"set": {"lr": 0.02}},)}, steps=20, stop_after=15)
    assert run.info["status"] == "stopped"
    assert [steps_of(run, rank) for rank in range(3)] == [list(range(16))] * 3


@on_real_runtimes
def test_a_word_that_cannot_be_done_is_refused_by_all_ranks_and_training_goes_on(runtime: str) -> None:
    """A file written by hand may contain anything."""
    said = (
        {"set": {"width": 0}},
        {"sett": 1},
        {"set": {"lr": "fast"}},
        {"set": {"lr": float("inf")}},
        {"set": {"lr": 10**400}},
    )
    words: dict[int, tuple[Command, ...]] = {2: said}
    run, _ = steer(runtime, PipeSGD(width=2), words, steps=10)
    assert run.info["status"] == "finished"
    first, second, third, fourth, fifth = run.info["steering"]
    assert "width=0" in first["refused"]
    assert second == {"number": 2, "step": second["step"]}, "no word"
    assert "lr='fast'" in third["refused"]
    assert "a finite number" in fourth["refused"]
    assert fifth == {"number": 5, "step": fifth["step"]}, "a number that a record could not be read with"


@on_real_runtimes
def test_a_delay_that_follows_the_clock_takes_another_bound(runtime: str) -> None:
    """More lanes than it began with, too; every gradient is used once."""
    run, _ = steer(runtime, AdaptiveDelaySGD(max_delay=1, adapt_every=2), {2: ({"set": {"max_delay": 3}},)}, steps=14)
    assert run.info["status"] == "finished"
    assert "refused" not in run.info["steering"][0]
    assert steps_of(run, 1) == list(range(14))
