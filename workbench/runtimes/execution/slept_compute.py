"""Slept compute: on real ranks, forward, backward and update take the seconds of a cost model.

The gradient is real, of a small model. A rank computes it, then sleeps until the modelled pass would end. Many
ranks can then share few cores. Messages and clocks are real. A bucket is sent after its share of backward, as in the
simulator. The same seed gives each rank the seconds of the simulated worker in each step.

Communication in the foreground interrupts the pass: the rest of the pass begins after the call.

`decisions/0040` has the measurements.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from workbench.errors import ConfigError
from workbench.gradients import Layout
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.execution.endpoint import RankClock
from workbench.runtimes.liveness.deadline import CHECK_S, Deadline
from workbench.runtimes.liveness.membership import LEFT_TEXT
from workbench.runtimes.transport.base import Transport
from workbench.settings import ComputeTimes

POLL_S = 1e-3  # between two polls of communication that no thread drives
TOLERANCE = 0.01  # of the seconds of a step without stragglers: a pass that ends later than this is late
WARN_SHARE = 0.01  # of the passes: with more late ones, the run warns


@final
@dataclass(slots=True)
class LatePasses:
    """The passes whose real compute took longer than the slept time. A rank's first pass, its warm-up, does not count.

    Attributes:
        num_passes: all passes, and the updates of a server.
        num_late: those that ended too late.
        seconds: sum of their delays.
    """

    num_passes: int = 0
    num_late: int = 0
    seconds: float = 0.0

    @property
    def loud(self) -> bool:
        """Whether enough passes were late that the times of the run are wrong."""
        return self.num_late > 0 and self.num_late >= WARN_SHARE * self.num_passes

    @property
    def note(self) -> str:
        """A sentence for the run's record; "" if no pass was late.

        >>> LatePasses(num_passes=200, num_late=3, seconds=0.03).note
        'compute took longer than the slept time in 1.5 % of the steps (by 10 ms): use longer times, fewer ranks or an idle machine'
        """
        if not self.num_late:
            return ""
        percent, late_ms = 100 * self.num_late / self.num_passes, 1e3 * self.seconds / self.num_late
        return (
            f"compute took longer than the slept time in {_two_digits(percent)} % of the steps (by "
            f"{_two_digits(late_ms)} ms): use longer times, fewer ranks or an idle machine"
        )


def _two_digits(value: float) -> str:
    """Format a number with two digits, without an exponent.

    >>> _two_digits(1.53), _two_digits(100.0)
    ('1.5', '100')
    """
    return f"{float(f'{value:.2g}'):g}"


def gather_late_passes(late: LatePasses, transport: Transport, deadline: Deadline) -> LatePasses:
    """Return the late passes of all ranks that have not left. They all call it."""
    texts = transport.gather_texts(json.dumps([late.num_passes, late.num_late, late.seconds]), deadline)
    counts = [json.loads(text) for text in texts if text != LEFT_TEXT]
    return LatePasses(*map(sum, zip(*counts, strict=True)))


@final
class SleptCompute:
    """The compute of one rank.

    Args:
        compute: seconds and stragglers.
        seed: of the stragglers.
        rank: whose stragglers. It is the number at the beginning of the run: a slow machine stays slow if ranks are
            renumbered.
        layout: the gradient's.
        share_of_batch: step -> this rank's samples over those of a full minibatch.
        whole: no bucket leaves before the end of backward.

    Attributes:
        compute, seed: as given.
        late: passes that took longer.
    """

    def __init__(
        self,
        compute: ComputeTimes,
        seed: int,
        rank: int,
        layout: Layout,
        share_of_batch: Callable[[int], float] = lambda step: 1.0,
        *,
        whole: bool = False,
    ) -> None:
        if layout.device.type != "cpu":
            raise ConfigError(
                "compute= sleeps on ranks that compute on a CPU, and this one has a GPU: leave compute out, or hide "
                "the GPU"
            )
        self.late = LatePasses()
        self.compute, self.seed, self._rank = compute, seed, rank
        self._share_of_batch = share_of_batch
        self._numel = layout.numel
        self._updates_late_s = 0.0  # since the last pass
        shares = compute.ready_shares(layout)
        self.ready_shares = (1.0,) * len(shares) if whole else shares
        self.forward_parts = compute.forward_parts(layout)
        self._is_warm = False

    @classmethod
    def of(cls, worker: LocalTraining, rank: int) -> SleptCompute | None:
        """Return the slept compute of a rank's training; None if it computes in real time.

        Args:
            rank: its number at the beginning of the run.
        """
        settings = worker.settings
        if settings.compute is None:
            return None

        def share_of_batch(step: int) -> float:
            return float(worker.sampler.shares(step)[worker.rank])

        layout, whole = worker.replica.layout, worker.replica.sends_whole
        return cls(settings.compute, settings.seed, rank, layout, share_of_batch, whole=whole)

    def seconds(self, step: int) -> tuple[float, float]:
        """Return (forward, backward) seconds of a step, with stragglers that do not depend on the clock."""
        compute = self.compute
        slowness = float(compute.factors(self.seed, step, self._rank + 1)[self._rank])
        slowness *= float(compute.time_share(self._share_of_batch(step)))
        return compute.forward_s * slowness, compute.backward_s * slowness

    def finish_s(self, begin_s: float, seconds: float) -> float:
        """Return the time on the rank's clock at which work of `seconds` ends if it begins at `begin_s`."""
        return self.compute.finish_s(self.seed, self._rank, begin_s, seconds)

    def end_update(self, numel: int, begin_s: float, sleep: Sleep, *, server: bool) -> None:
        """Sleep until an update of `numel` elements of the gradient ends. Its delay counts with that of the next pass."""
        late_s = sleep.until(begin_s + self.compute.update_s * numel / self._numel)
        if server:
            self._count(late_s)
        else:
            self._updates_late_s += late_s

    def end_pass(self, late_s: float) -> None:
        """Count a pass that ended `late_s` too late, with the delays of the updates before it."""
        self._count(late_s + self._updates_late_s)
        self._updates_late_s = 0.0

    def _count(self, late_s: float) -> None:
        if not self._is_warm:
            self._is_warm = True
            return
        self.late.num_passes += 1
        if late_s > TOLERANCE * (self.compute.forward_s + self.compute.backward_s + self.compute.update_s):
            self.late.num_late += 1
            self.late.seconds += late_s


@final
class Sleep:
    """Sleeps until a time on the rank's clock, and looks for failed peers meanwhile.

    Args:
        poll: called during the sleep if no thread drives the communication; else None.
    """

    def __init__(self, clock: RankClock, poll: Callable[[], object] | None) -> None:
        self._clock, self._poll = clock, poll
        self._peers = clock.peers()

    def until(self, end_s: float) -> float:
        """Sleep until then. Return the seconds by which the caller continues too late."""
        while (left_s := end_s - self._clock.now()) > 0:
            if self._poll is None:
                time.sleep(min(left_s, CHECK_S))
            else:
                self._poll()
                time.sleep(min(max(0.0, end_s - self._clock.now()), POLL_S))
            self._peers.check()
        return -left_s


@final
class SleptPass:
    """One forward and backward pass: when each part of it ends.

    Args:
        num_samples: of each micro-batch; none if the rank has no samples in this step.
        in_parts: whether parts of the forward pass wait for updates.
    """

    def __init__(
        self,
        slept: SleptCompute,
        step: int,
        num_samples: Sequence[int],
        begin_s: float,
        sleep: Sleep,
        *,
        in_parts: bool,
    ) -> None:
        self._slept, self._sleep, self._in_parts = slept, sleep, in_parts
        self._forward_s, self._backward_s = slept.seconds(step) if num_samples else (0.0, 0.0)
        self._shares = [number / sum(num_samples) for number in num_samples]
        self._micro = -1  # the present micro-batch
        self._begin_s = self._end_s = begin_s  # of the present part
        self._begun = False  # whether a part is under way
        self._late_s = 0.0

    def turn(self, phase: str) -> None:
        """End the present part, and begin a micro-batch's "forward" or "backward"; "" ends the pass."""
        self._end()
        if phase == "forward":
            self._micro += 1
            if self._micro > 0 or not self._in_parts:
                self._begin(self._forward_s * self._shares[self._micro])
        elif phase == "backward" and self._shares:
            self._begin(self._backward_s * self._shares[self._micro])
        elif not phase and self._shares:
            self._slept.end_pass(self._late_s)

    def end_forward_part(self) -> None:
        """End the part of forward before one that uses another bucket's parameters."""
        self._end()

    def begin_forward_part(self, bucket: int, begin_s: float) -> None:
        """Begin the part of forward that uses a bucket's parameters, which have been updated."""
        self._begin_s = self._end_s = begin_s
        share = self._shares[0] if self._shares else 0.0
        self._begin(self._forward_s * share * self._slept.forward_parts[bucket])

    def wait_for_bucket(self, bucket: int) -> None:
        """Sleep until a bucket's gradients are final."""
        share = self._slept.ready_shares[bucket]
        self._until(min(self._begin_s + (self._end_s - self._begin_s) * share, self._end_s))

    def interrupt(self, seconds: float) -> None:
        """Do not count these seconds, in which the rank communicated."""
        self._begin_s += seconds
        self._end_s += seconds

    def _begin(self, seconds: float) -> None:
        self._begun = True
        self._begin_s = self._end_s
        self._end_s = self._slept.finish_s(self._begin_s, seconds)

    def _end(self) -> None:
        if self._begun:
            self._begun = False
            self._until(self._end_s)

    def _until(self, end_s: float) -> None:
        self._late_s = max(self._late_s, self._sleep.until(end_s))
