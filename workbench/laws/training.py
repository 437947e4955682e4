"""Training on simulated workers, for the laws to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from workbench.costs import AnyNetwork, Compute, Lognormal, Network
from workbench.ops import EndStep, Program, ReadParameters
from workbench.problems.base import Problem
from workbench.program import Algorithm, Context, Elasticity, Replicas, Requirements, Restart, Roles, Update
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

# An all-reduce of the tiny model takes about as long as a step, and no two steps or ranks take equally long.
NETWORK = Network(latency_s=0.1, bandwidth_bytes_per_s=1000.0)
COMPUTE = Compute(forward_s=0.3, backward_s=0.7, update_s=0.1, stragglers=(Lognormal(sigma=0.5),))

SEEN: dict[int, list[Tensor]] = {}  # rank -> what `Watched` saw there, in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper(Algorithm):
    """Another algorithm, run otherwise. Runtimes cannot tell the difference."""

    inner: Algorithm

    @property
    def max_staleness(self) -> int | None:
        return self.inner.max_staleness

    @property
    def replicas(self) -> Replicas:
        return self.inner.replicas

    @property
    def update(self) -> Update:
        return self.inner.update

    @property
    def asynchronous(self) -> bool:
        return self.inner.asynchronous

    @property
    def depends_on_timing(self) -> bool:
        return self.inner.depends_on_timing

    @property
    def requires(self) -> Requirements:
        return self.inner.requires

    @property
    def elasticity(self) -> Elasticity:
        return self.inner.elasticity

    @property
    def restart(self) -> Restart:
        return self.inner.restart

    def roles(self, num_ranks: int) -> Roles:
        return self.inner.roles(num_ranks)

    def check(self, num_ranks: int) -> None:
        self.inner.check(num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(Wrapper):
    """Another algorithm, whose parameters are read at each `EndStep` and after its end."""

    def worker(self, ctx: Context) -> Program:
        seen = SEEN[ctx.rank] = []
        program, answer = self.inner.worker(ctx), None
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                break
            if isinstance(request, EndStep):
                seen.append((yield ReadParameters()))
            answer = yield request
        seen.append((yield ReadParameters()))


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run: `parameters[rank]` after each step and, last, at its end; the record; how to resume it."""

    parameters: list[list[Tensor]]
    run: Run
    checkpoint: Any  # what `resume=` takes

    @property
    def final(self) -> Tensor:
        """Rank 0's parameters at the end of the run."""
        return self.parameters[0][-1]

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """The rank's rows of steps."""
        return [row for row in self.run.metrics[rank] if "evaluation" not in row]


def train_simulated(
    num_ranks: int,
    algorithm: Algorithm,
    problem: Problem,
    settings: Settings,
    *,
    resume: Any = None,
    stop_after: int | None = None,
    network: AnyNetwork = NETWORK,
    compute: Compute = COMPUTE,
) -> Trained:
    """Train with that algorithm on simulated workers."""
    watched = Watched(inner=algorithm)
    simulation = Simulation(
        watched, problem, settings, num_ranks, network=network, compute=compute, check_in_flight=True
    )
    run = simulation.run(resume=resume, stop_after=stop_after)
    return Trained([SEEN[rank] for rank in range(num_ranks)], run, simulation.checkpoints.at_stop)
