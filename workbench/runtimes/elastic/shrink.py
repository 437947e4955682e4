"""Synchronous ranks continue as fewer when one has left: `on_failure="shrink"`, or an algorithm that always shrinks.

When a call fails, the remaining ranks shrink the run. They agree on the members, and on the last step that any of
them has finished. They make new groups of the library, and take the replica of the lowest rank that has finished that
step. If replicas differ between steps (Local SGD), each rank that has finished the step keeps its replica, the others
copy one, and then all take the mean of the replicas of ranks that have finished it. If ranks take steps at their own
pace (AD-PSGD), all take the mean of all replicas, and slower ranks leave out the steps up to that one.

Gradients in flight are dropped: at most those of the current step, and those that wait because of a delay. Gradients
that wait for a quorum are kept (`State.unused`). Then the data are shared among fewer ranks.

If another rank leaves meanwhile, the remaining ranks detect it as at any other time, and begin to shrink again.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from workbench.collectives.memory import forget_blocks, of_all_ranks
from workbench.errors import ConfigError, PeerFailed, Stalled
from workbench.gradients import WEIGHT
from workbench.ops import State
from workbench.program import Algorithm, Context, Replicas, leaves
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.control.controller import RunController
from workbench.runtimes.control.generations import is_at_own_pace
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import LEFT_TEXT, Membership
from workbench.runtimes.transport.base import Deadline, Transport
from workbench.runtimes.transport.measure_link import measure_link
from workbench.trace.store import read_info, update_run

GRACE_S = 5.0  # how long after a failure a departure may become known; else the failure is raised
FAILURES = (PeerFailed, Stalled, RuntimeError)  # of a communication that cannot end
WAITED_FOR = "the ranks that remain"


@final
class Shrinker:
    """Shrinks the run on one rank. If the run may not shrink, it raises the failure again."""

    def __init__(
        self, worker: LocalTraining, interpreter: Interpreter, controller: RunController, folder: Path
    ) -> None:
        self._worker, self._interpreter, self._controller, self._folder = worker, interpreter, controller, folder
        self._transport = interpreter.transport

    def shrink(self, error: Exception, algorithm: Algorithm, ctx: Context, last: int) -> int:
        """Continue with the remaining ranks. Return the step after which they continue.

        Args:
            last: the last step that this rank has finished.

        Raises:
            the error itself, if no rank has left.
            ConfigError: the algorithm cannot continue with so few ranks.
        """
        members = self._transport.members
        with self._interpreter.clock.doing("shrinking to fewer ranks"):
            while True:
                if (
                    members is None
                    or not members.shrinks
                    or isinstance(error, ConfigError)
                    or not self._has_departure(members)
                ):
                    raise error
                try:
                    return self._continue(members, algorithm, ctx, last)
                except FAILURES as again:  # one more rank may have left meanwhile
                    error = again

    def _continue(self, members: Membership, algorithm: Algorithm, ctx: Context, last: int) -> int:
        place, timeout_s = f"shrink-{members.num_shrinks}", self._worker.settings.timeout_s
        members.num_shrinks += 1
        self._transport.abandon()
        deadline = Deadline(WAITED_FOR, lambda: None, timeout_s, peer_status=members.detector)
        texts = members.gather_texts(json.dumps(self._place(ctx, members, last)), deadline, place)
        remain = [rank for rank, text in enumerate(texts) if text != LEFT_TEXT]
        _check(algorithm, members, len(remain))
        members.accept(remain)
        places = {rank: json.loads(texts[rank]) for rank in remain}
        furthest = {name: max(int(place[name]) for place in places.values()) for name in places[remain[0]]}
        step, ahead = furthest["step"], _taken(algorithm, {rank: place["step"] for rank, place in places.items()})
        # Not all ranks have counted a meeting that the failure ended: the next number is new to all.
        members.num_texts = furthest["num_texts"] + 1
        self._controller.follow(furthest["num_words"], step)
        self._interpreter.reset_transport()
        self._transport.shrink(
            remain,
            members.folder / place,
            Deadline(WAITED_FOR, members.failure, timeout_s, peer_status=members.detector),
        )
        self._take_parameters(algorithm, [remain.index(rank) for rank in ahead], ctx)
        ctx.link = None
        if self._controller.algorithm.requires.link:  # measured here: if another rank leaves now, it is noticed
            size = self._worker.replica.layout.message_bytes
            ctx.link = measure_link(self._transport, self._interpreter.clock.deadline, size)
        kept = _unused(ctx, step)
        samples = self._worker.sampler.samples_before(max(step, furthest["begun"]) + 1)
        renumber_ranks(self._worker, ctx, self._transport, step, samples, kept)
        ctx.first_step, ctx.resumed = step + 1, kept
        self._record(step, remain, ahead[0])
        return step

    def _place(self, ctx: Context, members: Membership, last: int) -> dict[str, int]:
        """Return this rank's last finished step, its last unused minibatch, and its meetings and commands."""
        begun = max((gradient.step for gradient in leaves(_unused(ctx, last))), default=last)
        return {"step": last, "begun": begun, "num_texts": members.num_texts, "num_words": self._controller.num_taken}

    def _has_departure(self, members: Membership) -> bool:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if (reason := members.failure()) is not None:
                if members.has_left(members.rank):
                    raise PeerFailed(reason)
                return True
            time.sleep(0.02)
        return False

    def _take_parameters(self, algorithm: Algorithm, ahead: list[int], ctx: Context) -> None:
        """Take over the parameters of the ranks that have finished the last step."""
        replica, transport = self._worker.replica, self._transport
        common = algorithm.replicas == Replicas.EVERY_STEP
        self._take_replica(ahead[0], ctx, keeps_own=not common and transport.rank in ahead)
        if common:
            return
        values = replica.read_parameters()
        share = torch.cat([values, values.new_ones(1)]) * (transport.rank in ahead)
        transport.all_reduce(share, self._interpreter.clock.deadline("the parameters that all ranks continue with"))
        replica.write_parameters(share[:-1] / share[-1])

    def _take_replica(self, root: int, ctx: Context, *, keeps_own: bool) -> None:
        """Take over the root's replica, and memories that are equal on all ranks, unless this rank keeps its own."""
        replica, transport = self._worker.replica, self._transport
        deadline = self._interpreter.clock.deadline("the parameters that all ranks continue with")
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


def _taken(algorithm: Algorithm, last_steps: Mapping[int, int]) -> list[int]:
    """The ranks whose parameters the run continues with, of those that remain with their last steps.

    These are the ranks that have finished the last step; all of them if each takes steps at its own pace.
    """
    all_count = is_at_own_pace(algorithm)
    return [rank for rank, step in last_steps.items() if all_count or step == max(last_steps.values())]


def _unused(ctx: Context, step: int) -> State | None:
    """Return this rank's gradients that are in none of the sums up to that step."""
    return None if ctx.resumed is None else ctx.resumed.unused(step)


def renumber_ranks(
    worker: LocalTraining, ctx: Context, transport: Transport, step: int, samples: int, kept: State | None = None
) -> None:
    """Renumber the ranks as the transport does, and share the data among them after that step and that many samples.

    Args:
        kept: gradients of this rank that are not yet used: they weigh as much as new ones of as many samples.
    """
    before = worker.sampler.global_batch
    worker.set_rank(transport.rank, transport.num_workers, (step + 1, samples))
    ctx.rank, ctx.num_workers = transport.rank, transport.num_workers
    forget_blocks(ctx.memory)
    worker.replica.control_out = worker.replica.control_seen = 0  # a new rank 0 announces commands again
    for gradient in leaves(kept):
        for piece, flat in gradient.slices():  # parameters, and directly after them the weight
            flat[: piece.tail - piece.start + WEIGHT + 1].mul_(before / worker.sampler.global_batch)


def _check(algorithm: Algorithm, members: Membership, num_ranks: int) -> None:
    """Raise `ConfigError` unless the algorithm can run on this many ranks."""
    try:
        algorithm.check(num_ranks)
    except ConfigError as error:
        raise ConfigError(
            f"{members.failure()}. {algorithm} cannot continue with {num_ranks} ranks: {error}"
        ) from error
