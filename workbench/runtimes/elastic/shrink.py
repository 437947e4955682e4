"""Ranks that wait for each other go on as fewer when one of them has left: `Settings.on_failure="shrink"`, or a method's own way.

All that remain come here out of whatever they were at. They agree on who remains and on the last step that any of them has finished,
make the library's groups anew, and take the replica of the lowest rank that had finished it; where replicas differ between steps
(Local SGD), whoever had finished it keeps its own, and then all take their mean. What was in flight is dropped: at most the gradients
of the step under way, and those that a delay still held; gradients that wait for a quorum are kept (`Context.unused`). Shares of the
data are those of fewer ranks from there on.

Whoever leaves meanwhile is found out as at any time, and those that then remain come here once more.
"""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any, final

import torch

from workbench.collectives.memory import forget_blocks, of_all_ranks
from workbench.errors import ConfigError, PeerFailed, Stalled
from workbench.gradients import WEIGHT
from workbench.program import Algorithm, Context, Replicas
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.control.controller import RunController
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import LEFT_TEXT, Membership
from workbench.runtimes.transport.base import Deadline, Transport
from workbench.runtimes.transport.measure_link import measure_link
from workbench.trace.store import read_info, update_run

GRACE_S = 5.0  # from a failure until it must be known that somebody has left
FAILURES = (PeerFailed, Stalled, RuntimeError)  # of a communication that cannot end
WHAT = "the ranks that remain"


@final
class Shrinker:
    """Kept by a session; where a run is not to shrink, the failure goes on as it came."""

    def __init__(self, worker: LocalTraining, interpreter: Interpreter, controller: RunController, folder: Path) -> None:
        self._worker, self._interpreter, self._controller, self._folder = worker, interpreter, controller, folder
        self._transport = interpreter.transport

    def shrink(self, error: Exception, algorithm: Algorithm, ctx: Context, last: int) -> int:
        """Go on behind a step, which is returned, with those that remain; `last` is the last that this rank has finished.

        Raises:
            the error itself, where nobody has left.
            ConfigError: the method cannot go on with so few.
        """
        members = self._transport.members
        while True:
            if members is None or not members.shrinks or isinstance(error, ConfigError) or not self._somebody_left(members):
                raise error
            try:
                return self._go_on(members, algorithm, ctx, last)
            except FAILURES as again:  # of those that remained, one more may have left
                error = again

    def _go_on(self, members: Membership, algorithm: Algorithm, ctx: Context, last: int) -> int:
        place, timeout_s = f"shrink-{members.num_shrinks}", self._worker.settings.timeout_s
        members.num_shrinks += 1
        self._transport.abandon()
        deadline = Deadline(WHAT, lambda: None, timeout_s, lookout=members.detector)
        texts = members.gather_texts(json.dumps(self._place(ctx, members, last)), deadline, place)
        remain = [rank for rank, text in enumerate(texts) if text != LEFT_TEXT]
        _check(algorithm, members, len(remain))
        members.accept(remain)
        places = {rank: json.loads(texts[rank]) for rank in remain}
        furthest = {name: max(int(place[name]) for place in places.values()) for name in places[remain[0]]}
        step, ahead = furthest["step"], [rank for rank in remain if places[rank]["step"] == furthest["step"]]
        members.num_texts = furthest["num_texts"] + 1  # a meeting that the death broke is no rank's next one
        self._controller.follow(furthest["num_words"], step)
        self._interpreter.renew()
        self._transport.shrink(remain, members.folder / place, Deadline(WHAT, members.failure, timeout_s, lookout=members.detector))
        self._take_parameters(algorithm, [remain.index(rank) for rank in ahead], ctx)
        needs_link = (
            self._controller.algorithm.requires.link
        )  # measured anew: here, so that who leaves in the midst of that has left as at any time
        size = self._worker.replica.layout.message_bytes
        ctx.link = measure_link(self._transport, self._interpreter.clock.deadline, size) if needs_link else None
        kept = ctx.unused(step) if ctx.unused else ()
        samples = self._worker.sampler.samples_before(max(step, furthest["begun"]) + 1)
        number_anew(self._worker, ctx, self._transport, step, samples, kept)
        ctx.first_step, ctx.resumed, ctx.unused = step + 1, kept or None, None
        self._record(step, remain, ahead[0])
        return step

    def _place(self, ctx: Context, members: Membership, last: int) -> dict[str, int]:
        """Where this rank is: the last step it has finished, the last minibatch that it has not used, meetings and words."""
        begun = max((gradient.step for gradient in ctx.unused(last)), default=last) if ctx.unused else last
        return {"step": last, "begun": begun, "num_texts": members.num_texts, "num_words": self._controller.num_taken}

    def _somebody_left(self, members: Membership) -> bool:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if (words := members.failure()) is not None:
                if members.has_left(members.rank):
                    raise PeerFailed(words)
                return True
            time.sleep(0.02)
        return False

    def _take_parameters(self, algorithm: Algorithm, ahead: list[int], ctx: Context) -> None:
        """Go on from what these ranks have, which are furthest."""
        replica, transport = self._worker.replica, self._transport
        common = algorithm.replicas == Replicas.EVERY_STEP
        self._take_replica(ahead[0], ctx, keeps_own=not common and transport.rank in ahead)
        if common:
            return
        values = replica.read_parameters()
        share = torch.cat([values, values.new_ones(1)]) * (transport.rank in ahead)
        transport.all_reduce(share, self._interpreter.clock.deadline("the weights that all go on with"))
        replica.write_parameters(share[:-1] / share[-1])

    def _take_replica(self, root: int, ctx: Context, *, keeps_own: bool) -> None:
        """The root's weights, buffers, optimizer state and what collectives remember that is all ranks', unless this rank keeps its own."""
        replica, transport = self._worker.replica, self._transport
        deadline = self._interpreter.clock.deadline("the weights that all go on with")
        held = io.BytesIO()
        torch.save({"replica": replica.state(), "memory": of_all_ranks(ctx.memory)}, held)
        size = torch.tensor([held.tell()])
        transport.broadcast(size, root, deadline)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if transport.rank == root:
            content.copy_(torch.frombuffer(bytearray(held.getvalue()), dtype=torch.uint8))
        transport.broadcast(content, root, deadline)
        if transport.rank != root and not keeps_own:
            found = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
            replica.load(found["replica"])
            ctx.memory.update(found["memory"])

    def _record(self, step: int, remain: list[int], source: int) -> None:
        if self._transport.rank == 0:
            row: dict[str, Any] = {"step": step + 1, "ranks": remain, "weights_of": source}
            update_run(self._folder, shrunk=[*read_info(self._folder).get("shrunk", []), row])


def number_anew(worker: LocalTraining, ctx: Context, transport: Transport, step: int, samples: int, kept: tuple[Any, ...] = ()) -> None:
    """Behind that step and so many samples, ranks are those of the transport as it is now, and data are dealt in their batches.

    `kept`: gradients of this rank that are still to be used: they weigh as much as new ones of as many samples.
    """
    before = worker.sampler.global_batch
    worker.number(transport.rank, transport.num_workers, (step + 1, samples))
    ctx.rank, ctx.num_workers = transport.rank, transport.num_workers
    forget_blocks(ctx.memory)
    worker.replica.control_out = worker.replica.control_seen = 0  # rank 0 may be another: it says anew what it has heard
    for gradient in kept:
        for piece, flat in gradient.slices():  # parameters, and at once behind them the weight
            flat[: piece.tail - piece.start + WEIGHT + 1].mul_(before / worker.sampler.global_batch)


def _check(algorithm: Algorithm, members: Membership, num_ranks: int) -> None:
    """Raise `ConfigError` unless the method can go on with so many."""
    try:
        algorithm.check(num_ranks)
    except ConfigError as error:
        raise ConfigError(f"{members.failure()}. {algorithm} cannot go on with {num_ranks} ranks: {error}") from error
