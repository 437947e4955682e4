"""Trainings on the simulator with random delays: workers are late at times, and sums of one lane overtake those of
another.

The ranks' parameters are noted at each step's end and at the run's end, and so are the values that a rank takes over
from others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from torch import Tensor

from workbench.costs import Compute, Lognormal, Network
from workbench.laws import tiny
from workbench.laws.training import Wrapper
from workbench.ops import (
    AllReduce,
    Backward,
    Barrier,
    EndStep,
    Program,
    ReadParameters,
    Request,
    Start,
    Ticket,
    UnpackParameters,
    WaitAny,
)
from workbench.program import Algorithm, Context, perform
from workbench.rng import generator
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

COMPUTE = Compute(forward_s=0.3, backward_s=0.7, update_s=0.1, stragglers=(Lognormal(sigma=1.0),))
NETWORK = Network(latency_s=0.1, bandwidth_bytes_per_s=2e3)  # a sum of the tiny model takes about as long as a step


@final
@dataclass(slots=True, repr=False)  # a record of the run prints settings, and what is seen is long
class Seen:
    """The values of one rank.

    Attributes:
        steps: (n,) parameters at each `EndStep`; last, those at the end.
        taken: bucket (-1 for all) and, with servers, the version, else a count from 0 -> step and values that it took
            over.
        finished: numbers of the background sums in the order of their ends.
    """

    steps: list[Tensor] = field(default_factory=list)
    taken: dict[tuple[int, int], tuple[int, Tensor]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Jittered(Wrapper):
    """Another algorithm, whose background sums begin and end late: each on each rank by a time of its own, at most `pause_s` twice."""

    pause_s: float
    seed: int
    seen: dict[int, Seen] = field(default_factory=dict, compare=False, repr=False)

    def worker(self, ctx: Context) -> Program:
        seen = self.seen[ctx.rank] = Seen()
        number = Counter[str]()
        yield from self._followed(self.inner.worker(ctx), ctx.rank, seen, number)
        seen.steps.append((yield ReadParameters()))

    def _followed(self, program: Program, rank: int, seen: Seen, number: Counter[str]) -> Program:
        answer: Any = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            match request:
                case EndStep():
                    seen.steps.append((yield ReadParameters()))
                case UnpackParameters(value):
                    bucket = -1 if value.bucket is None else value.bucket
                    name = (bucket, value.version if self.requires.servers else number[f"bucket {bucket}"])
                    number[f"bucket {bucket}"] += 1
                    seen.taken[name] = len(seen.steps), value.flat.clone()
                case Backward(step, on_bucket, before_forward) if on_bucket is not None:
                    begin = partial(self._begun, on_bucket, rank, seen, number)
                    request = Backward(step, on_bucket=begin, before_forward=before_forward)
                case Start():
                    request = self._late(request, rank, seen, number)
            answer = yield request

    def _begun(self, on_bucket: Any, rank: int, seen: Seen, number: Counter[str], bucket: Any) -> Request | Program:
        work = on_bucket(bucket)
        return self._late(work if isinstance(work, Start) else Start(work), rank, seen, number)

    def _late(self, start: Start, rank: int, seen: Seen, number: Counter[str]) -> Start:
        """The same work, late; a server's program on a worker's rank is unchanged."""
        if start.shares_tags:
            assert not isinstance(start.work, Request)
            return Start(
                self._followed(start.work, rank, seen, number),
                lane=start.lane,
                priority=start.priority,
                shares_tags=True,
            )
        if not self.pause_s or (isinstance(start.work, Request) and not isinstance(start.work, AllReduce)):
            return start
        number["sum"] += 1
        return Start(self._paused(start.work, rank, seen, number["sum"]), lane=start.lane, priority=start.priority)

    def _paused(self, work: Request | Program, rank: int, seen: Seen, number: int) -> Program:
        before_s, after_s = self.pause_s * generator(self.seed, "pause", rank, number).random(2)
        yield from _sleep(before_s)
        value = yield from perform(work)
        yield from _sleep(after_s)
        seen.finished.append(number)
        return value


def _sleep(seconds: float) -> Program:
    never = Ticket(0, Barrier(), [])
    yield WaitAny((never,), timeout_s=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """How a training is disturbed. 23 samples, so that last batches are short.

    Attributes:
        pause_s: a background sum is late by at most twice this, in addition to the network's time; a step takes about
            one second.
    """

    num_ranks: int = 3
    steps: int = 7
    batch_size: int = 3
    pause_s: float = 3.0
    seed: int = 0


def run(algorithm: Algorithm, situation: Situation) -> list[Seen]:
    """Return the values of each rank that computes."""
    jittered = Jittered(inner=algorithm, pause_s=situation.pause_s, seed=situation.seed)
    how = Settings(
        steps=situation.steps,
        batch_size=situation.batch_size,
        optimizer=tiny.momentum,
        seed=situation.seed,
        evaluate_every=0,
    )
    Simulation(jittered, tiny.problem(test=None), how, situation.num_ranks, network=NETWORK, compute=COMPUTE).run()
    return [jittered.seen[rank] for rank in range(algorithm.roles(situation.num_ranks).num_computing)]
