"""Replay a recorded run in one process, with its messages in the recorded order.

The events of an asynchronous run contain what depends on timing: the sender of each receive from any rank, the ticket
that each `WaitAny` found, the time of each `Now`, and when the run was asked to stop. A replay gives the same programs
the same answers. So they compute bit-identical numbers, also if gradients were summed in order of arrival. The times of
a replay are meaningless.

Not bit-identical: sums of a library (the all-reduce of gloo and MPI adds in another order), and runs on a GPU or on
another processor. A run whose settings were changed during the training cannot be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from torch import Tensor

from workbench import costs
from workbench.costs import Compute
from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.program import Algorithm, Restart
from workbench.replica.local_training import run_info
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run


@final
@dataclass(frozen=True, eq=False)
class Replay:
    """The result of a replay.

    Attributes:
        run: the record of the replay: metrics and updates. Its times are meaningless.
        parameters: rank -> its trainable parameters at the end, flat.
    """

    run: Run
    parameters: list[Tensor]


def replay(run: Run | Path | str, algorithm: Algorithm, problem: Problem, settings: Settings) -> Replay:
    """Run a recorded run again, with the same algorithm, problem and settings.

    Raises:
        ConfigError: the run had another algorithm, problem or settings, its events were not recorded, or it was
            steered.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    name = (run.info.get("algorithm") or {}).get("name")
    if name != type(algorithm).__name__:
        raise ConfigError(f"the run {run.id} is of {name}: it cannot be replayed as {type(algorithm).__name__}")
    given = run_info(algorithm, problem, settings, "", 1)
    recorded = given["algorithm"]["settings"]
    if recorded != (run.info["algorithm"].get("settings") or {}):
        raise ConfigError(
            f"the run {run.id} was of {name} with {run.info['algorithm'].get('settings')}, not with {recorded}"
        )
    # An older record lacks newer settings.
    recorded = {**Settings(steps=1).as_record(), **(run.info.get("settings") or {})}
    if settings.as_record() != recorded:
        found = {key: value for key, value in settings.as_record().items() if recorded.get(key) != value}
        raise ConfigError(
            f"the run {run.id} had other settings: {', '.join(f'{key} was {recorded.get(key)!r}' for key in found)}"
        )
    if run.info.get("resumed"):
        raise ConfigError(
            f"the run {run.id} continued from {run.info['resumed']}: a replay starts at the first step; replay that "
            "run instead"
        )
    if run.info.get("departures"):
        raise ConfigError(f"the run {run.id} cannot be replayed: ranks left it, so their records are incomplete")
    if any(not row.get("stop") for row in run.info.get("steering", ())):
        raise ConfigError(
            f"the run {run.id} was steered: it cannot be replayed, because a replay has the same settings in all steps"
        )
    if algorithm.restart == Restart.FROM_PARAMETERS:
        raise ConfigError(
            f"{algorithm} cannot be replayed: its workers contribute gradients without a message, and the record "
            "holds only messages"
        )
    if algorithm.asynchronous and not run.events:
        raise ConfigError(
            f"the run {run.id} cannot be replayed: it has no events, so the order of its messages is unknown"
        )
    before = run.info.get("content") or {}  # None: it could not be read
    for part, content in given["content"].items():
        if None not in (content, before.get(part)) and content != before[part]:
            raise ConfigError(
                f"the run {run.id} had another {part} of the same name (its code, or a value that it uses, differs): "
                "give the one that it had"
            )
    threads = int(run.headers.get(0, {}).get("threads", 1))
    free = Compute(forward_s=0.0, backward_s=0.0)
    simulation = Simulation(
        algorithm,
        problem,
        replace(settings, threads=threads),
        int(run.info["num_workers"]),
        network=costs.free,
        compute=free,
    )
    simulation.cluster.recorded = run.events
    stop_after = run.info.get("stop_after")
    if run.info.get("status") == "stopped" and not algorithm.asynchronous:
        stop_after = run.info["result"]["last_step"]  # by a command, or by `stop_after`
    replayed = simulation.run(stop_after=stop_after)
    return Replay(replayed, [worker.trained.read_parameters() for worker in simulation.workers])
