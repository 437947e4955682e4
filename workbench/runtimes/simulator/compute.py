"""A simulated worker's forward and backward pass in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench import ops
from workbench.gradients import Gradient
from workbench.ops import Ticket

if TYPE_CHECKING:
    from workbench.runtimes.simulator.process import SimProcess


def begin_backward(thread: SimProcess, request: ops.Backward) -> None:
    """Forward, in pieces where buckets must arrive first, then backward; the program goes on when it is through."""
    worker, simulation = thread.worker, thread.simulation
    clock, compute, layout = simulation.clock, simulation.compute, worker.replica.layout
    worker.step = request.step
    forward_parts = simulation.forward_parts
    needed = [piece.index for piece in reversed(layout.buckets)] if request.before_forward else []

    def forward(position: int) -> None:
        """The piece of the pass that uses bucket `needed[position]`, once it is there."""
        part = forward_parts[needed[position]]
        if position + 1 == len(needed):
            _last(thread, request, part)
            return
        begin = clock.now_s
        end = simulation.finish_s(worker.rank, compute.forward_s * simulation.slowness(request.step, worker.rank) * part, begin)
        if worker.traced:
            worker.recorder.span("forward", "compute", begin, end, request.step)
        clock.at(end, need, position + 1)

    def need(position: int) -> None:
        assert request.before_forward is not None
        thread.inline(request.before_forward(needed[position]), lambda value: forward(position))

    need(0) if needed else _last(thread, request, 1.0)


def _last(thread: SimProcess, request: ops.Backward, part: float) -> None:
    """The last piece of the forward pass, which is all of it but for what had to arrive first, and the backward pass."""
    worker, on_bucket = thread.worker, request.on_bucket
    tickets: list[Ticket] = []
    gradient: Gradient | None = None

    def compute(_: None) -> None:
        nonlocal gradient
        gradient = worker.backward(request.step)

    def launch(bucket: int) -> None:
        assert on_bucket is not None and gradient is not None
        work = on_bucket(gradient.part(bucket))
        tickets.append(thread.start(work if isinstance(work, ops.Start) else ops.Start(work)))

    def through(late: tuple[int, ...]) -> None:
        if on_bucket is None:
            thread.resume(gradient)
            return
        for bucket in late:
            launch(bucket)
        thread.resume(tuple(tickets))

    begin_pass(thread, request.step, part, launch if on_bucket is not None else None, through, compute)


def begin_pass(
    thread: SimProcess,
    step: int,
    part: float,
    launch: Callable[[int], None] | None,
    through: Callable[[tuple[int, ...]], None],
    compute: Callable[[Any], None] | None = None,
) -> None:
    """A part of forward, and backward.

    Args:
        launch: called with each bucket's number when its gradients are final, unless that is at the end.
        through: called at the end with the numbers of the other buckets.
        compute: called between forward and backward.
    """
    worker, simulation = thread.worker, thread.simulation
    clock, costs, rank = simulation.clock, simulation.compute, worker.rank
    worker.step = step
    factors, begin = simulation.factors.get(step), clock.now_s
    slow = simulation.slowness(step, rank) if factors is None else factors[rank]
    if simulation.timed:
        middle = simulation.finish_s(rank, costs.forward_s * slow * part, begin)
        end = simulation.finish_s(rank, costs.backward_s * slow, middle)
    else:
        middle = begin + costs.forward_s * slow * part
        end = middle + costs.backward_s * slow
    if worker.traced:
        worker.recorder.span("forward", "compute", begin, middle, step)
        worker.recorder.span("backward", "compute", middle, end, step)
    if compute is not None:
        clock.at(middle, compute)
    if launch is not None:
        for bucket, share in simulation.early:
            clock.at(min(middle + (end - middle) * share, end), launch, bucket)
    clock.at(end, through, simulation.late)
