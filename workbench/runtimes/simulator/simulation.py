"""A simulated cluster in one process: virtual time from a cost model, real gradients or none at all.

The same programs as on real ranks. Work of the foreground and of what it starts is timed; a minibatch's
gradients are really computed (unless timing only), and sums are taken in rank order, so a run is a pure function of its inputs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from workbench.costs import AnyNetwork, Compute
from workbench.errors import ConfigError, Stalled
from workbench.gradients import Layout
from workbench.ops import Apply, EndStep, Program
from workbench.problems.base import Problem, Sampler
from workbench.program import Algorithm, Context, Replicas, lower, take_sum
from workbench.replica.local_training import check_what, model_info, num_steps_of, run_info, trace_note
from workbench.replica.replica import compute_threads
from workbench.runtimes.checkpoint.rank_state import begin_again
from workbench.runtimes.checkpoint.rank_state import resume as go_on
from workbench.runtimes.execution.evaluation_schedule import EvaluationSchedule
from workbench.runtimes.simulator.checkpoints import SimCheckpoints
from workbench.runtimes.simulator.comm_schedule import ScheduleCache
from workbench.runtimes.simulator.fabric import Clock, Fabric
from workbench.runtimes.simulator.failures import Departures
from workbench.runtimes.simulator.process import SimProcess
from workbench.runtimes.simulator.recorded_answers import RecordedAnswers
from workbench.runtimes.simulator.worker import Shapes, SimWorker, build_workers, ready_shares
from workbench.settings import Settings
from workbench.trace.run import Run
from workbench.units import MIB

KEPT_STEPS = 256  # of which the workers' slowness is kept; who lags further behind draws it anew
YOUNG_OBJECTS = 50_000  # more than so many since the last time are looked through for garbage
MOST_NAMED = 64  # of those who wait for ever


@final
class Simulation:
    """One run on `workers` simulated workers. Afterwards `workers` holds their replicas and `checkpoints` where they stopped.

    Args:
        network, compute: what things cost in virtual seconds.
        timing_only: no data, no tensors: what time does, and nothing else.
        stop_after: stop at the end of this step; `checkpoints` can then be given to another simulation as `resume`.
        check_in_flight: verify that no value changes between its request and its use by the network.
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
    ) -> None:
        check_what(algorithm, problem)
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise ConfigError(f"workers={workers}: a simulated cluster has at least 1")
        self.algorithm, self.problem, self.settings = algorithm, problem, settings
        algorithm.check(workers)
        self.num_workers = workers
        self.clock = Clock()
        self.fabric = Fabric(self.clock, network, workers)
        self.network, self.compute = network, compute
        self.check_in_flight = check_in_flight
        self.workers = build_workers(algorithm, problem, settings, workers, timing_only)
        layout = self.workers[0].replica.layout
        shares = [(piece.index, share) for piece, share in zip(layout.buckets, ready_shares(compute, layout, settings), strict=True)]
        self.early = tuple(item for item in shares if item[1] < 1)  # buckets, and after what part of backward they are final
        self.late = tuple(bucket for bucket, share in shares if share >= 1)  # those that are final at its end
        self.forward_parts = compute.forward_parts(layout)
        self.checkpoints: list[dict[str, Any]] = []
        self.writer = SimCheckpoints(self)
        self.stop_after: int | None = None
        self.threads: dict[SimProcess, None] = {}  # that have not ended, in order of beginning
        self.contexts: list[Context] = []
        self.stopped = self.alone = False
        self.scripts: dict[int, list[dict[str, Any]]] | None = None  # rank -> recorded events, for a replay
        self._scripts: dict[tuple[int, int], RecordedAnswers] = {}
        self._ended_s = 0.0
        self.departures: Departures | None = None
        self.timed = compute.timed  # what work takes depends on when it begins
        self._tapes: dict[Any, Any] = {}
        self._schedules: dict[int, ScheduleCache] = {}  # rank -> those of its collectives, where there are no values
        self.factors: dict[int, list[float]] = {}  # step -> of each worker
        self.ending: set[int] = set()  # ranks whose next step is their last
        self._due: dict[int, list[Tensor]] = {}  # step -> parameters that an evaluation averages
        self._milestones = EvaluationSchedule(self.workers[0].due_steps() if algorithm.has_servers else [])
        self._parts: dict[int, dict[int, Tensor]] = {}  # step -> parameters of the servers that have come to it, by number
        self._num_evaluated = 0  # steps that were evaluated, or before one that was
        self._updated_s: float | None = None  # the last update of a server

    def lose(self, rank: int, at_s: float) -> None:
        """That worker's process is to end at this virtual time (`ConfigError` where the method cannot go on without it)."""
        self.departures = self.departures or Departures(self)
        self.departures.plan(rank, at_s)

    def run(self, resume: list[dict[str, Any]] | None = None, stop_after: int | None = None) -> Run:
        """From the first step (or a checkpoint) to the last.

        Raises:
            Stalled: nobody can move; names what each rank waits for.
            Diverged: a loss is not a finite number.
        """
        self.stop_after = stop_after
        self.alone = self.algorithm.asynchronous and self.scripts is None  # without values, nobody can be asked to stop
        self.checkpoints = [{} for _ in self.workers]
        with torch.random.fork_rng(devices=[]), compute_threads(self.settings.threads or 1):
            threads = []
            for worker in self.workers:
                self.contexts.append(self._context_of(worker, resume))
                threads.append(SimProcess(self, worker, self.program_of(self.algorithm, self.contexts[-1]), self._program_ended))
            if self.departures is not None:
                self.departures.begin()
            self.writer.begin()
            self._run_programs(threads)
            while self._continues_after_sync_point(threads):
                self._run_programs(threads)
            if self.algorithm.asynchronous and (stop_after is not None or self.ending):
                for worker in self.workers:
                    self.writer.keep(worker, worker.last_end)
            if stop_after is None or self.algorithm.asynchronous:
                self._evaluate_at_end()
        return Run.from_memory(self._info(), [worker.recorder for worker in self.workers])

    def _continues_after_sync_point(self, threads: list[SimProcess]) -> bool:
        """All programs have ended: if that was for a checkpoint, keep it, and let them begin again."""
        if not self.algorithm.asynchronous or self.ending or not self.writer.at_rest():
            return False
        for thread, ctx in zip(threads, self.contexts, strict=True):
            ctx.num_steps = self.writer.end_of(thread.worker)
            begin_again(ctx, thread.worker.last_end)
            thread.take_up(self.program_of(self.algorithm, ctx))
        return True

    def _run_programs(self, threads: list[SimProcess]) -> None:
        """Until all have ended, or nobody can move."""
        for thread in threads:
            self.threads[thread] = None
            self.clock.at(self.clock.now_s, thread.begin)
        self.clock.run()
        waiting = [thread for thread in self.threads if thread.pending is not None and not (self.stopped and thread.free)]
        if waiting:
            named = "; ".join(f"rank {thread.worker.rank}: {thread.pending}" for thread in waiting[:MOST_NAMED])
            named += f"; and {len(waiting) - MOST_NAMED} more" if len(waiting) > MOST_NAMED else ""
            raise Stalled(f"nobody can move at {self.clock.now_s:.6f} virtual seconds. Pending: {named}")

    def _context_of(self, worker: SimWorker, resume: list[dict[str, Any]] | None) -> Context:
        settings, layout = self.settings, worker.replica.layout
        ctx = Context(worker.rank, self.num_workers, num_steps=worker.num_steps, layout=layout, seed=settings.seed, link=self.network)
        if isinstance(worker.replica, Shapes):
            self._schedules[worker.rank] = ScheduleCache(
                worker.rank, self.num_workers, self._tapes, self.network.local_s, traced=worker.traced
            )
        if resume is not None:
            go_on(resume[worker.rank], self.algorithm, worker.trained, ctx)
        worker.last_end = EndStep(ctx.first_step - 1, state=ctx.resumed or ())
        return ctx

    def program_of(self, algorithm: Algorithm, ctx: Context) -> Program:
        """A worker's program; without values, collectives of a fixed schedule are answered from the cache."""
        schedules = self._schedules.get(ctx.rank)
        return lower(ctx, algorithm.worker(ctx), take_sum if schedules is None else schedules.take)

    def end_of(self, worker: SimWorker) -> int:
        """Steps of a worker in this run: where ranks are at steps of their own, a stop is an early end."""
        if self.algorithm.asynchronous and self.stop_after is not None:
            return min(worker.num_steps, self.stop_after + 1)
        return worker.num_steps

    def _program_ended(self, value: Any) -> None:
        """A worker's program is over: time-outs that nobody waits for any more do not count."""
        self._ended_s = self.clock.now_s

    @property
    def seconds(self) -> float:
        """Virtual seconds that the run took."""
        return self._ended_s or self.clock.now_s

    def slowness(self, step: int, rank: int) -> float:
        """By what this worker's minibatch of the step takes longer than a full one usually does."""
        known = self.factors.get(step)
        if known is None:
            if len(self.factors) > KEPT_STEPS:
                del self.factors[next(iter(self.factors))]
            factors = self.compute.factors(self.settings.seed, step, self.num_workers)
            computing = self.algorithm.num_computing(self.num_workers)
            factors[:computing] *= self.compute.part(self.workers[0].sampler.shares(step))
            known = self.factors[step] = factors.tolist()
        return known[rank]

    def finish_s(self, rank: int, seconds: float, begin_s: float) -> float:
        """When this worker ends work of so many seconds that it begins at `begin_s`."""
        return self.compute.finish_s(self.settings.seed, rank, begin_s, seconds) if self.timed else begin_s + seconds

    def script_of(self, rank: int, task: int) -> RecordedAnswers | None:
        """The recorded answers of a program; None where nothing is replayed."""
        if self.scripts is None or task < 0:
            return None
        if (rank, task) not in self._scripts:
            self._scripts[rank, task] = RecordedAnswers(self.scripts.get(rank, []), rank, task)
        return self._scripts[rank, task]

    def end_step(self, worker: SimWorker, end: EndStep) -> bool:
        """Book a worker's step; True if it stops here."""
        if worker.end_step(end, self.clock.now_s):
            self._evaluate_in_turn(worker, end.step)
        if self.algorithm.asynchronous:
            self.look_for_stop(worker, end.step)
            return False
        stop = end.step == self.stop_after
        self.stopped = self.stopped or stop
        return stop

    def look_for_stop(self, worker: SimWorker, step: int | None = None) -> None:
        """Where ranks are at steps of their own, a stop is an early end: by the word that servers pass on (`step`: of the worker
        that has come to its end), which in a replay is said when it was said then."""
        ctx, replica = self.contexts[worker.rank], worker.replica
        if step is None:
            ctx.stopping = ctx.stopping or bool(replica.master.control_seen)
            return
        script = self.script_of(worker.rank, 0)
        if script is not None and step in script.controls:
            replica.control_out = 1
        alone = self.algorithm.replicas == Replicas.NEVER and replica.control_out
        if (alone or replica.control_seen) and worker.rank not in self.ending and ctx.num_steps is not None:
            self.ending.add(worker.rank)
            ctx.num_steps = min(ctx.num_steps, step + 2)

    def updated(self, worker: SimWorker, request: Apply, end_s: float) -> None:
        """A server of this worker has made an update: evaluate the steps that all servers have now completed."""
        self._updated_s = end_s
        left = {rank for rank, _ in self.departures.gone} if self.departures is not None else set()
        num_workers = self.algorithm.num_computing(self.num_workers) - len(left)
        master = worker.trained.master
        for step in self._milestones.count(master.progress, request, self.algorithm, num_workers):
            parts = self._parts.setdefault(step, {})
            shards = range(len(master.updates)) if request.gradient.bucket is None else (request.gradient.bucket,)
            for shard in shards:
                parts.update(master.evaluated_shard(shard))
            if len(parts) == len(worker.replica.layout.slots):
                self.workers[0].evaluate(step, end_s, worker.joined(self._parts.pop(step)), self._bytes_sent)

    def _evaluate_at_end(self) -> None:
        """After all programs have ended."""
        first = self.workers[0]
        if not self.algorithm.has_servers or self._stops_early:
            self._evaluate(first.last_step if self.algorithm.asynchronous else first.num_steps - 1, self.workers)
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
        """Of each shard, by its server."""
        masters = [worker.trained.master for worker in self.workers if worker.trained.has_master]
        return [max(master.progress[shard] for master in masters) for shard in range(len(self.workers[0].replica.layout.buckets))]

    @property
    def _stops_early(self) -> bool:
        """Whether the run was stopped before its last step."""
        first = self.workers[0]
        cut = self.stop_after is not None and (not self.algorithm.asynchronous or self.stop_after + 1 < first.num_steps)
        return cut or bool(self.ending)

    def _evaluate_in_turn(self, worker: SimWorker, step: int) -> None:
        """At rank 0's parameters; where replicas differ between steps, at their mean, once all have come to the step.

        Where all ranks end a step with equal parameters but not at one time, at those of the first that ends it. Servers have
        evaluations by their updates.
        """
        if self.algorithm.has_servers:
            return
        if not self.algorithm.asynchronous and self.algorithm.elasticity.shrinks_unasked:
            if step >= self._num_evaluated:
                self._num_evaluated = step + 1
                parameters = worker.evaluated_parameters()
                assert parameters is not None
                self.workers[0].evaluate(step, self.clock.now_s, parameters, self._bytes_sent)
            return
        if self.algorithm.asynchronous or self.algorithm.replicas != Replicas.AT_END:
            if worker.rank == 0:
                self._evaluate(step, [worker])
            return
        mine = worker.evaluated_parameters()
        assert mine is not None
        self._due.setdefault(step, []).append(mine)
        if len(self._due[step]) == self.num_workers:
            self.workers[0].evaluate(step, self.clock.now_s, torch.stack(self._due.pop(step)).mean(0), self._bytes_sent)

    def _evaluate(self, step: int, workers: list[SimWorker]) -> None:
        """The first worker of these looks at the test data, at its own parameters."""
        parameters = workers[0].evaluated_parameters()
        if parameters is not None:
            now_s = self.clock.now_s if step < workers[0].num_steps - 1 else self.seconds
            workers[0].evaluate(step, now_s, parameters, self._bytes_sent)

    @property
    def _bytes_sent(self) -> int:
        """By all workers until now: an evaluation is of the whole cluster, whoever does it."""
        return sum(int(worker.bytes_sent) for worker in self.workers)

    def _info(self) -> dict[str, Any]:
        first = self.workers[0]
        info = run_info_of(
            self.algorithm, self.problem, self.settings, self.num_workers, first.replica.layout, self.network, self.compute, first.sampler
        )
        stopped = self._stops_early
        done = first.num_steps if self.algorithm.has_servers and not stopped else first.last_step + 1  # rank 0 may have skipped its last
        status = "stopped" if stopped else "finished"
        held = 0 if isinstance(first.replica, Shapes) else self.num_workers * first.replica.layout.message_bytes
        if held > 64 * MIB:
            info["notes"].append(f"every worker holds parameters of its own: {held / MIB:.0f} MiB of versions in all")
        if self.departures is not None:
            info["departures"] = self.departures.record()
        return {**info, "status": status, "result": {"steps": done, "seconds": self.seconds, "last_step": done - 1}}


@contextmanager
def without_what_is_there() -> Iterator[None]:
    """Garbage is looked for among what is made from here on: the modules that are loaded would be gone through each time. And seldom:
    nearly all that lives for a while is the record, which stays."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(usual[0], YOUNG_OBJECTS) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.collect()  # a simulation nobody holds any more is cycles: unfrozen, they would be among the old that is hardly ever looked at
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
    """What a simulated run's record says of it, whichever way it was simulated."""
    info = run_info(algorithm, problem, settings, "simulated", num_workers)
    notes = [*info["notes"], *trace_note(settings, num_steps_of(settings, sampler)), f"simulated: {network}", f"simulated: {compute}"]
    if sampler.num_samples < sampler.global_batch:
        share = sampler.num_samples / sampler.global_batch
        notes.append(f"one step takes all {sampler.num_samples} samples: a worker computes {share:.2g} of a full minibatch")
    return {**info, "notes": notes, "model": model_info(layout)}
