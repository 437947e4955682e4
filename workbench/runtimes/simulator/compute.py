"""Handlers of requests that use a worker's processor: `Backward`, `Apply` and `Local`."""

from __future__ import annotations

from typing import Any, final

from workbench import ops
from workbench.gradients import Gradient
from workbench.ops import Ticket
from workbench.runtimes.execution.endpoint import bucket_of
from workbench.runtimes.execution.interpreter import update_event
from workbench.runtimes.simulator.background import start, start_send
from workbench.runtimes.simulator.state import PENDING, SimCluster, SimProcess


def backward(cluster: SimCluster, process: SimProcess, request: ops.Backward) -> Any:
    """Begin a forward and a backward pass."""
    process.worker.step = request.step
    if request.before_forward is None:
        _Pass(process, request).begin(1.0)
    else:
        _begin_in_parts(cluster, process, request)
    return PENDING


def _begin_in_parts(cluster: SimCluster, process: SimProcess, request: ops.Backward) -> None:
    """Compute forward bucket by bucket.

    The sub-program of `before_forward` runs before the part that uses its bucket.
    """
    worker, times, clock = process.worker, cluster.times, cluster.clock
    needed = [piece.index for piece in reversed(worker.replica.layout.buckets)]

    def wait_for(position: int) -> None:
        assert request.before_forward is not None
        program = request.before_forward(needed[position])
        SimProcess(cluster, worker, program, lambda value, error: forward(position)).resume()

    def forward(position: int) -> None:
        part = times.forward_parts[needed[position]]
        if position + 1 == len(needed):
            _Pass(process, request).begin(part)
            return
        begin_s = clock.now_s
        end_s = times.finish_s(
            worker.rank, times.compute.forward_s * times.slowness(request.step, worker.rank) * part, begin_s
        )
        if worker.traced:
            worker.recorder.span("forward", "compute", begin_s, end_s, request.step)
        clock.at(end_s, wait_for, position + 1)

    wait_for(0)


@final
class _Pass:
    """The last part of a forward pass, and the backward pass."""

    __slots__ = ("_gradient", "_process", "_request", "_tickets")

    def __init__(self, process: SimProcess, request: ops.Backward) -> None:
        self._process, self._request = process, request
        self._gradient: Gradient | None = None
        self._tickets: list[Ticket] = []

    def begin(self, part: float) -> None:
        """Begin with the last `part` of forward."""
        process, step = self._process, self._request.step
        cluster, worker = process.cluster, process.worker
        clock, times = cluster.clock, cluster.times
        begin_s = clock.now_s
        middle_s, end_s = times.passes_s(step, worker.rank, part, begin_s)
        if worker.traced:
            worker.recorder.span("forward", "compute", begin_s, middle_s, step)
            worker.recorder.span("backward", "compute", middle_s, end_s, step)
        if worker.has_values or process.task != 0 or process.num_tasks:
            clock.at(middle_s, self._compute)
        else:  # no other program of the worker can update it meanwhile, and no value is computed: one event less
            self._gradient = worker.backward(step)
        if self._request.on_bucket is not None:
            for bucket, share in times.early:
                clock.at(min(middle_s + (end_s - middle_s) * share, end_s), self._launch, bucket)
        clock.at(end_s, self._end)

    def _compute(self, _: None) -> None:
        self._gradient = self._process.worker.backward(self._request.step)

    def _launch(self, bucket: int) -> None:
        """Start the work that the program returns for a bucket with final gradients."""
        assert self._request.on_bucket is not None and self._gradient is not None
        process = self._process
        work = self._request.on_bucket(process.worker.bucket_view(self._gradient, bucket))
        if work is None:
            return
        if work.__class__ is ops.Send:
            ticket = start_send(process.cluster, process, work)
        else:
            ticket = start(process.cluster, process, work if isinstance(work, ops.Start) else ops.Start(work))
        self._tickets.append(ticket)

    def _end(self, _: None) -> None:
        process = self._process
        if self._request.on_bucket is None:
            process.resume(self._gradient)
            return
        for bucket in process.cluster.times.late:
            self._launch(bucket)
        process.resume(tuple(self._tickets))


def apply(cluster: SimCluster, process: SimProcess, request: ops.Apply) -> Any:
    """Begin an update of the replica, or of the server's copy."""
    worker, clock, gradient = process.worker, cluster.clock, request.gradient
    now_s = clock.now_s
    end_s = now_s + cluster.times.compute.update_s * gradient.flat.numel() / gradient.layout.numel
    if request.server_copy:
        update = worker.apply_to_server_copy(gradient, request.lr_scale)
        if process.task == 0:  # a server on a dedicated rank: its steps are its updates
            worker.step = update - 1
        worker.recorder.events.append(update_event(request, bucket_of(gradient), update, end_s))
        if cluster.on_update is not None:
            cluster.on_update(worker, request, end_s)
    else:
        worker.apply(gradient, request.lr_scale, request.local)
    if worker.traced:
        lane = "server" if request.server_copy else "compute"
        step = gradient.step if gradient.step >= 0 else worker.step
        worker.recorder.span("apply", lane, now_s, end_s, step, bucket_of(gradient))
    if request.server_copy:
        clock.at(end_s, _end_update, process)
    else:
        clock.at(end_s, process.resume)
    return PENDING


def _end_update(process: SimProcess) -> None:
    """End a server's update. Answer True if any gradient that has reached this rank asked the run to stop."""
    process.resume(bool(process.worker.replica.server_copy.control_seen))


def local(cluster: SimCluster, process: SimProcess, request: ops.Local) -> Any:
    """Encode, decode or sum."""
    worker, clock = process.worker, cluster.clock
    skipped = request.kind == "sum" and not worker.has_values
    answer = None if skipped else request.action()
    seconds = cluster.network.local_s(request.kind, request.num_bytes)
    end_s = clock.now_s + seconds
    if worker.traced:
        worker.recorder.span(request.kind, "comm", clock.now_s, end_s, worker.step, -1, request.num_bytes)
    if seconds <= 0:
        return answer
    clock.at(end_s, process.resume, answer)
    return PENDING
