"""A simulated cluster in one process: virtual time from a cost model, and real gradients or none at all.

The programs are those of real ranks. Work of a program and of what it starts takes virtual time. Gradients of a minibatch are
computed (unless timing only), and sums are taken in rank order. So a run is a pure function of its inputs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from workbench import ops
from workbench.costs import AnyNetwork, Compute
from workbench.errors import ConfigError, Stalled
from workbench.gradients import Layout
from workbench.ops import Apply, EndStep, Program
from workbench.problems.base import Problem, Sampler
from workbench.program import Algorithm, Context, Replicas, lower, take_sum
from workbench.replica.local_training import check_what, model_info, num_steps_of, run_info, trace_note
from workbench.replica.replica import compute_threads
from workbench.runtimes.checkpoint.rank_state import begin_again
from workbench.runtimes.checkpoint.rank_state import resume as resume_rank
from workbench.runtimes.execution.evaluation_schedule import EvaluationSchedule
from workbench.runtimes.simulator import background, communication, compute
from workbench.runtimes.simulator.checkpoints import SimCheckpoints, when_complete
from workbench.runtimes.simulator.comm_schedule import CommSchedule, ScheduleCache
from workbench.runtimes.simulator.failures import check_failures, departures_of, plan_failures
from workbench.runtimes.simulator.pass_times import PassTimes
from workbench.runtimes.simulator.state import PENDING, Handler, SimCluster, SimProcess
from workbench.runtimes.simulator.worker import Shapes, SimWorker, build_workers
from workbench.settings import Settings
from workbench.trace.run import Run
from workbench.units import MIB

YOUNG_OBJECTS = 50_000  # new objects between two garbage collections
MAX_NAMED = 64  # processes that an error names


def _now(cluster: SimCluster, process: SimProcess, _: ops.Now) -> float:
    return process.recorded.now() if process.recorded is not None else cluster.clock.now_s


HANDLERS: dict[type, Handler] = {  # `EndStep` is a simulation's own
    ops.AllGather: communication.all_gather,
    ops.AllReduce: communication.all_reduce,
    ops.Apply: compute.apply,
    ops.Backward: compute.backward,
    ops.Barrier: communication.barrier,
    ops.Broadcast: communication.broadcast,
    ops.Discard: lambda cluster, process, request: process.worker.replica.discard(request.gradient),
    ops.Local: compute.local,
    ops.Now: _now,
    ops.PackParameters: lambda cluster, process, request: process.worker.replica.pack_parameters(
        request.bucket, master=request.master, step=request.step
    ),
    ops.ReadParameters: lambda cluster, process, request: process.worker.replica.read_parameters(),
    ops.Recv: communication.receive,
    ops.ReduceScatter: communication.reduce_scatter,
    ops.Send: communication.send,
    ops.Start: background.start,
    ops.UnpackParameters: lambda cluster, process, request: process.worker.replica.unpack_parameters(request.value),
    ops.Wait: background.wait,
    ops.WaitAny: background.wait_any,
    ops.WriteParameters: lambda cluster, process, request: process.worker.replica.write_parameters(request.value),
    CommSchedule: communication.play,
}


@final
class Simulation:
    """One run on `workers` simulated workers. Afterwards `workers` holds their replicas and `checkpoints` where they stopped.

    Args:
        network, compute: what communication and computing cost, in virtual seconds.
        timing_only: no data and no tensors, only virtual time.
        check_in_flight: verify that no value changes between its request and its use by the network.
        failures: rank -> virtual seconds at which its process ends.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        settings: Settings,
        workers: int,
        *,
        network: AnyNetwork,
        compute: Compute,
        timing_only: bool = False,
        check_in_flight: bool = False,
        failures: Mapping[int, float] | None = None,
    ) -> None:
        check_what(algorithm, problem)
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise ConfigError(f"workers={workers}: a simulated cluster has at least 1")
        algorithm.check(workers)
        self._failures = dict(failures or {})
        check_failures(algorithm, workers, self._failures)
        self.algorithm, self.problem, self.settings = algorithm, problem, settings
        self.num_workers, self.network, self.compute = workers, network, compute
        self.workers = build_workers(algorithm, problem, settings, workers, timing_only)
        self.num_computing = algorithm.roles(workers).num_computing
        self._asynchronous = algorithm.asynchronous
        first = self.workers[0]
        times = PassTimes(compute, first.replica.layout, settings, first.sampler, num_workers=workers, num_computing=self.num_computing)
        handlers = {**HANDLERS, EndStep: self._end_step}
        self.cluster = SimCluster(network, times, workers, handlers, check_in_flight=check_in_flight)
        self.clock, self.fabric = self.cluster.clock, self.cluster.fabric
        self.contexts: list[Context] = []
        self.writer = SimCheckpoints(algorithm, settings.checkpoint_every, self.workers, self.contexts, self.end_of)
        self.stop_after: int | None = None
        self._stopped = False
        self._ended_s = 0.0
        self._shared_schedules: dict[Any, Any] = {}
        self._schedules: dict[int, ScheduleCache] = {}  # rank -> those of its collectives, if there are no values
        self._ending: set[int] = set()  # ranks whose next step is their last
        self._due: dict[int, list[Tensor]] = {}  # step -> parameters that an evaluation averages
        self._milestones = EvaluationSchedule(first.due_steps() if algorithm.requires.servers else [])
        self._parts: dict[int, dict[int, Tensor]] = {}  # step -> parameters of the servers that have completed it, by number
        self._num_evaluated = 0  # steps that were evaluated, or before one that was
        self._updated_s: float | None = None  # the last update of a server
        if not timing_only:
            self.cluster.on_update = self._updated

    def run(self, resume: list[dict[str, Any]] | None = None, stop_after: int | None = None) -> Run:
        """From the first step (or a checkpoint) to the last.

        Args:
            resume: each rank's checkpoint.
            stop_after: stop at the end of this step; `checkpoints` can then be given to another simulation as `resume`.

        Raises:
            Stalled: no process can continue; names what each rank waits for.
            Diverged: a loss is not a finite number.
        """
        self.stop_after = stop_after
        with torch.random.fork_rng(devices=[]), compute_threads(self.settings.threads or 1):
            processes = []
            for worker in self.workers:
                self.contexts.append(self._context_of(worker, resume))
                processes.append(SimProcess(self.cluster, worker, self._program_of(self.contexts[-1]), self._program_ended))
            plan_failures(self.cluster, self._failures)
            self.writer.begin()
            self._run_programs(processes)
            while self._continues_after_sync_point(processes):
                self._run_programs(processes)
            if self._asynchronous and (stop_after is not None or self._ending):
                for worker in self.workers:
                    self.writer.keep(worker, worker.last_end)
            if stop_after is None or self._asynchronous:
                self._evaluate_at_end()
        return Run.from_memory(self._info(), [worker.recorder for worker in self.workers])

    def _continues_after_sync_point(self, processes: list[SimProcess]) -> bool:
        """All programs have ended: if that was for a checkpoint, keep it, and begin them again."""
        if not self._asynchronous or self._ending or not self.writer.at_sync_point():
            return False
        for process, ctx in zip(processes, self.contexts, strict=True):
            ctx.num_steps = self.writer.end_of(process.worker)
            begin_again(ctx, process.worker.last_end)
            process.run_next(self._program_of(ctx))
        return True

    def _run_programs(self, processes: list[SimProcess]) -> None:
        """Run until all programs have ended, or none can continue."""
        for process in processes:
            self.clock.at(self.clock.now_s, process.resume)
        self.clock.run()
        if self.cluster.errors:
            raise self.cluster.errors[0]
        waiting = [item for item in self.cluster.processes if item.pending is not None and not (self._stopped and item.free)]
        if waiting:
            named = "; ".join(f"rank {item.worker.rank}: {item.pending}" for item in waiting[:MAX_NAMED])
            named += f"; and {len(waiting) - MAX_NAMED} more" if len(waiting) > MAX_NAMED else ""
            raise Stalled(f"nobody can move at {self.clock.now_s:.6f} virtual seconds. Pending: {named}")

    def _context_of(self, worker: SimWorker, resume: list[dict[str, Any]] | None) -> Context:
        settings, layout = self.settings, worker.replica.layout
        ctx = Context(worker.rank, self.num_workers, num_steps=worker.num_steps, layout=layout, seed=settings.seed, link=self.network)
        if isinstance(worker.replica, Shapes):
            cache = ScheduleCache(worker.rank, self.num_workers, self._shared_schedules, self.network.local_s, traced=worker.traced)
            self._schedules[worker.rank] = cache
        if resume is not None:
            resume_rank(resume[worker.rank], self.algorithm, worker.trained, ctx)
        worker.last_end = EndStep(ctx.first_step - 1, state=ctx.resumed)
        return ctx

    def _program_of(self, ctx: Context) -> Program:
        """A worker's program; without values, collectives of a fixed schedule are answered from the cache."""
        schedules = self._schedules.get(ctx.rank)
        return lower(ctx, self.algorithm.worker(ctx), take_sum if schedules is None else schedules.take)

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """What each worker needs to continue from where the run was stopped."""
        return self.writer.at_stop

    def end_of(self, worker: SimWorker) -> int:
        """How many steps a worker takes in this run: to an asynchronous one a stop is an early end."""
        if self._asynchronous and self.stop_after is not None:
            return min(worker.num_steps, self.stop_after + 1)
        return worker.num_steps

    def _program_ended(self, value: Any, error: Exception | None) -> None:
        """A worker's program has ended. The run ends with the last one, whatever time-outs follow."""
        self._ended_s = self.clock.now_s

    @property
    def seconds(self) -> float:
        """Virtual seconds that the run took."""
        return self._ended_s or self.clock.now_s

    def _end_step(self, cluster: SimCluster, process: SimProcess, end: EndStep) -> Any:
        """Record a worker's step; stop there, or wait for a checkpoint."""
        worker = process.worker
        if worker.end_step(end, cluster.clock.now_s):
            self._evaluate_in_turn(worker, end.step)
        if self._asynchronous:
            if worker.has_values or cluster.recorded is not None:
                self._look_for_stop(worker, end.step)
        elif end.step == self.stop_after:
            self._stopped = True
            when_complete(end.state, lambda: self.writer.keep(worker, end))  # its time is not the run's
            process.close()
            return PENDING
        return PENDING if self.writer.waits_for_checkpoint(process, end) else None

    def _look_for_stop(self, worker: SimWorker, step: int) -> None:
        """Let an asynchronous worker end early, if it has heard of a stop from its servers. A replay has it say so when it did."""
        ctx, replica = self.contexts[worker.rank], worker.replica
        recorded = self.cluster.answers_of(worker.rank, 0)
        if recorded is not None and step in recorded.controls:
            replica.control_out = 1
        alone = self.algorithm.replicas == Replicas.NEVER and replica.control_out
        if (alone or replica.control_seen) and worker.rank not in self._ending and ctx.num_steps is not None:
            self._ending.add(worker.rank)
            ctx.num_steps = min(ctx.num_steps, step + 2)

    def _updated(self, worker: SimWorker, request: Apply, end_s: float) -> None:
        """A server of this worker makes an update: evaluate the steps that all servers complete with it."""
        self._updated_s = end_s
        master = worker.trained.master
        num_workers = self.num_computing - len(self.fabric.gone)
        for step in self._milestones.count(master.progress, request, num_workers):
            parts = self._parts.setdefault(step, {})
            shards = range(len(master.updates)) if request.gradient.bucket is None else (request.gradient.bucket,)
            for shard in shards:
                parts.update(master.evaluated_shard(shard))
            if len(parts) == len(worker.replica.layout.slots):
                self.workers[0].evaluate(step, end_s, worker.joined(self._parts.pop(step)), self._bytes_sent)

    def _evaluate_at_end(self) -> None:
        """Evaluate the last step, after all programs have ended."""
        first = self.workers[0]
        if not self.algorithm.requires.servers or self._stops_early:
            self._evaluate(first.last_step if self._asynchronous else first.num_steps - 1, self.workers)
            return
        parameters = first.evaluated_parameters()
        if parameters is not None:
            end_s = self.seconds if self._updated_s is None else self._updated_s
            done = {row["step"] for row in first.recorder.rows if "evaluation" in row}
            for step in self._milestones.left(min(self._progress(), default=0.0)):
                if step not in done:  # its gradients were dropped or lost, so no update came after
                    first.evaluate(step, end_s, parameters, self._bytes_sent)
            first.evaluate(first.num_steps - 1, end_s, parameters, self._bytes_sent)

    def _progress(self) -> list[float]:
        """Of each shard: the steps that its server has completed."""
        masters = [worker.trained.master for worker in self.workers if worker.trained.has_master]
        return [max(master.progress[shard] for master in masters) for shard in range(len(self.workers[0].replica.layout.buckets))]

    @property
    def _stops_early(self) -> bool:
        """Whether the run was stopped before its last step."""
        first = self.workers[0]
        cut = self.stop_after is not None and (not self._asynchronous or self.stop_after + 1 < first.num_steps)
        return cut or bool(self._ending)

    def _evaluate_in_turn(self, worker: SimWorker, step: int) -> None:
        """Evaluate a step, unless servers do by their updates.

        At rank 0's parameters; where replicas differ between steps, at their mean, when the last rank ends the step. Where ranks end a
        step with equal parameters at different times, at those of the first that ends it.
        """
        if self.algorithm.requires.servers:
            return
        if not self._asynchronous and self.algorithm.elasticity.shrinks_unasked:
            if step >= self._num_evaluated:
                self._num_evaluated = step + 1
                parameters = worker.evaluated_parameters()
                assert parameters is not None
                self.workers[0].evaluate(step, self.clock.now_s, parameters, self._bytes_sent)
            return
        if self._asynchronous or self.algorithm.replicas != Replicas.AT_END:
            if worker.rank == 0:
                self._evaluate(step, [worker])
            return
        mine = worker.evaluated_parameters()
        assert mine is not None
        self._due.setdefault(step, []).append(mine)
        if len(self._due[step]) == self.num_workers:
            self.workers[0].evaluate(step, self.clock.now_s, torch.stack(self._due.pop(step)).mean(0), self._bytes_sent)

    def _evaluate(self, step: int, workers: list[SimWorker]) -> None:
        """Evaluate at the parameters of the first of these workers."""
        parameters = workers[0].evaluated_parameters()
        if parameters is not None:
            now_s = self.clock.now_s if step < workers[0].num_steps - 1 else self.seconds
            workers[0].evaluate(step, now_s, parameters, self._bytes_sent)

    @property
    def _bytes_sent(self) -> int:
        """By all workers so far: an evaluation is of the whole cluster."""
        return sum(int(worker.bytes_sent) for worker in self.workers)

    def _info(self) -> dict[str, Any]:
        first = self.workers[0]
        info = run_info_of(
            self.algorithm, self.problem, self.settings, self.num_workers, first.replica.layout, self.network, self.compute, first.sampler
        )
        stopped = self._stops_early
        served = self.algorithm.requires.servers
        done = first.num_steps if served and not stopped else first.last_step + 1  # rank 0 may have skipped its last
        status = "stopped" if stopped else "finished"
        held = 0 if isinstance(first.replica, Shapes) else self.num_workers * first.replica.layout.message_bytes
        if held > 64 * MIB:
            info["notes"].append(f"every worker holds its own parameters: {held / MIB:.0f} MiB of versions in all")
        if self._failures:
            info["departures"] = departures_of(self.cluster)
        return {**info, "status": status, "result": {"steps": done, "seconds": self.seconds, "last_step": done - 1}}


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Collect garbage only among objects that are made inside, and seldom: modules are left out, and most new objects stay."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(usual[0], YOUNG_OBJECTS) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.collect()  # a simulation is cycles: after `unfreeze` they would be old objects, which are seldom looked at
        gc.set_threshold(*usual)
        gc.unfreeze()


def run_info_of(
    algorithm: Algorithm,
    problem: Problem,
    settings: Settings,
    num_workers: int,
    layout: Layout,
    network: Any,
    compute: Any,
    sampler: Sampler,
) -> dict[str, Any]:
    """What a simulated run's record says of it, however it was simulated."""
    info = run_info(algorithm, problem, settings, "simulated", num_workers)
    notes = [*info["notes"], *trace_note(settings, num_steps_of(settings, sampler)), f"simulated: {network}", f"simulated: {compute}"]
    if sampler.num_samples < sampler.global_batch:
        share = sampler.num_samples / sampler.global_batch
        notes.append(f"one step takes all {sampler.num_samples} samples: a worker computes {share:.2g} of a full minibatch")
    return {**info, "notes": notes, "model": model_info(layout)}
