"""A simulated worker's forward and backward pass in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench import ops
from workbench.ops import Ticket

if TYPE_CHECKING:
    from workbench.runtimes.sim_thread import SimThread


def begin_backward(thread: SimThread, request: ops.Backward) -> None:
    """Forward, in pieces where buckets must arrive first, then backward; the program goes on when it is through."""
    worker, simulation = thread.worker, thread.simulation
    clock, compute, layout = simulation.clock, simulation.compute, worker.replica.layout
    worker.step = request.step
    slow = simulation.slowness(request.step, worker.rank)
    forward_parts = simulation.forward_parts
    needed = [piece.index for piece in reversed(layout.buckets)] if request.before_forward else []

    def forward(position: int) -> None:
        """The piece of the pass that uses bucket `needed[position]`, once it is there."""
        seconds = compute.forward_s * slow * (forward_parts[needed[position]] if needed else 1.0)
        begin, end = clock.now_s, simulation.finish_s(worker.rank, seconds)
        if worker.traced:
            worker.recorder.span("forward", "compute", begin, end, request.step)
        last = position + 1 >= len(needed)
        clock.at(end, *((back, None) if last else (need, position + 1)))

    def back(_: None) -> None:
        _backward(thread, request, slow)

    def need(position: int) -> None:
        assert request.before_forward is not None
        thread.inline(request.before_forward(needed[position]), lambda value: forward(position))

    need(0) if needed else forward(0)


def _backward(thread: SimThread, request: ops.Backward, slow: float) -> None:
    worker, simulation = thread.worker, thread.simulation
    clock, on_bucket = simulation.clock, request.on_bucket
    begin = clock.now_s
    end = simulation.finish_s(worker.rank, simulation.compute.backward_s * slow)
    gradient = worker.backward(request.step)
    if worker.traced:
        worker.recorder.span("backward", "compute", begin, end, request.step)
    if on_bucket is None:
        clock.at(end, thread.resume, gradient)
        return
    tickets: list[Ticket] = []

    def launch(bucket: int) -> None:
        work = on_bucket(gradient.part(bucket))
        tickets.append(thread.start(work if isinstance(work, ops.Start) else ops.Start(work)))

    for piece, share in zip(gradient.layout.buckets, simulation.ready_shares, strict=True):
        clock.at(min(begin + (end - begin) * share, end), launch, piece.index)
    clock.at(end, lambda _: thread.resume(tuple(tickets)))
