"""A simulated cluster in one process: virtual time from a cost model, and real gradients or none (timing only).

The programs are those of real ranks. Their requests take virtual time. Gradients of minibatches are computed (unless
timing only), and sums are taken in rank order. So a run is a pure function of its inputs.

`runtimes/control/generations.py` decides what happens at a step's end and at the programs' end, as for real ranks. A
simulated run has no commands, and no process joins it. Only a replay can be stopped by a command; its record has the
step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

from workbench import ops
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.costs import AnyNetwork, Compute
from workbench.errors import Stalled
from workbench.ops import EndStep, Program
from workbench.problems.base import Problem
from workbench.program import Algorithm, Context, Replicas, lower, take_sum
from workbench.replica.local_training import check_algorithm_and_problem, model_info, run_info
from workbench.replica.replica import compute_threads
from workbench.runtimes.checkpoint.rank_state import continue_from_state
from workbench.runtimes.checkpoint.rank_state import resume as resume_rank
from workbench.runtimes.control.generations import (
    Agree,
    Agreed,
    BeginGeneration,
    Checkpoint,
    Continue,
    Evaluate,
    Finish,
    Generation,
    Instruction,
    KeepForEvaluation,
    ProgramEnded,
    StepEnded,
    Stop,
    decide,
    first_sync_point,
)
from workbench.runtimes.simulator import background, communication, compute
from workbench.runtimes.simulator.checkpoints import SimCheckpoints, is_complete, when_complete
from workbench.runtimes.simulator.comm_schedule import InstructionTable, ScheduleCache
from workbench.runtimes.simulator.evaluations import SimEvaluations
from workbench.runtimes.simulator.failures import check_failures, departures_of, plan_failures
from workbench.runtimes.simulator.pass_times import PassTimes
from workbench.runtimes.simulator.recorded_answers import RecordedAnswers
from workbench.runtimes.simulator.state import PENDING, Handler, Handlers, SimCluster, SimProcess
from workbench.runtimes.simulator.worker import (
    MetaReplica,
    SimWorker,
    build_workers,
    check_num_workers,
    simulation_notes,
)
from workbench.settings import Settings
from workbench.trace.run import Run
from workbench.units import MIB

GC_THRESHOLD = 50_000  # new objects between two garbage collections
MAX_NAMED = 64  # an error names at most this many processes


def _now(cluster: SimCluster, process: SimProcess, _: ops.Now) -> float:
    return process.recorded.now() if process.recorded is not None else cluster.clock.now_s


HANDLERS: dict[type, Handler] = {  # `EndStep` has its handler in `Simulation`
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
        request.bucket, server_copy=request.server_copy, step=request.step
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
}


def _nothing(cluster: SimCluster, process: SimProcess, request: Any) -> None:
    """Do nothing: no value is kept."""


TIMING_ONLY: dict[type, Handler] = dict.fromkeys((ops.Discard, ops.UnpackParameters, ops.WriteParameters), _nothing)


@final
class Simulation:
    """One run on `workers` simulated workers.

    Afterwards `workers` has their replicas, and `checkpoints` the checkpoints.

    Args:
        network, compute: cost of communication and of computing, in virtual seconds.
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
        check_algorithm_and_problem(algorithm, problem)
        check_num_workers(workers)
        algorithm.check(workers)
        self._failures = dict(failures or {})
        check_failures(algorithm, workers, self._failures)
        self.algorithm, self.problem, self.settings = algorithm, problem, settings
        self.num_workers, self.network, self.compute = workers, network, compute
        self.workers = build_workers(algorithm, problem, settings, workers, timing_only)
        self._asynchronous = algorithm.asynchronous
        first, num_computing = self.workers[0], algorithm.roles(workers).num_computing
        times = PassTimes(
            compute,
            first.replica.layout,
            settings,
            first.sampler,
            num_workers=workers,
            num_computing=num_computing,
            served=algorithm.requires.servers,
        )
        handlers = Handlers({**HANDLERS, **(TIMING_ONLY if timing_only else {}), EndStep: self._end_step})
        self.cluster = SimCluster(network, times, workers, handlers, check_in_flight=check_in_flight)
        self.clock, self.fabric = self.cluster.clock, self.cluster.fabric
        self.contexts: list[Context] = []
        self.checkpoints = SimCheckpoints(algorithm, self.workers, self.contexts)
        self._evaluations = SimEvaluations(algorithm, self.workers, self.cluster)
        self._generations: list[Generation] = []  # of each worker
        self._outcome: Stop | Finish | None = None  # how the run ended
        self._stop_heard = False  # a worker of a replayed run has read a stop
        self._ended_s = 0.0
        self._instructions = InstructionTable()
        self._schedules: dict[int, ScheduleCache] = {}  # rank -> schedules of its collectives, if timing only
        if not timing_only:
            self.cluster.on_update = self._evaluations.after_update

    def run(self, resume: list[dict[str, Any]] | None = None, stop_after: int | None = None) -> Run:
        """Run from the first step (or a checkpoint) to the last.

        Args:
            resume: each rank's checkpoint.
            stop_after: stop at the end of this step; `checkpoints.at_stop` can then be given to another simulation as
                `resume`.

        Raises:
            Stalled: no process can continue; names what each rank waits for.
            Diverged: a loss is not a finite number.
        """
        with torch.random.fork_rng(devices=[]), compute_threads(self.settings.threads or 1):
            processes = []
            for worker in self.workers:
                self.contexts.append(self._context_of(worker, resume))
                processes.append(SimProcess(self.cluster, worker, self._program_of(self.contexts[-1]), self._note_end))
            plan_failures(self.cluster, self._failures)
            self._begin_run(stop_after)
            while self._outcome is None:
                self._run_programs(processes)
                if self._outcome is None:
                    self._end_generation(processes)
            if self._asynchronous and (self._stopped or stop_after is not None):  # a stop after the last step too
                for worker in self.workers:
                    self.checkpoints.keep(worker, worker.last_end, None)
            if self._asynchronous or not self._stopped:
                self._evaluations.after_run(self.seconds, stopped=self._stopped)
        weights = self._evaluations.weights(stopped=self._stopped)
        return Run.from_memory(self._info(), [worker.recorder for worker in self.workers], weights)

    @property
    def _stopped(self) -> bool:
        return isinstance(self._outcome, Stop)

    def _run_programs(self, processes: list[SimProcess]) -> None:
        """Run until all programs have ended, or none can continue."""
        for process in processes:
            self.clock.at(self.clock.now_s, process.resume)
        self.clock.run()
        if self.cluster.errors:
            raise self.cluster.errors[0]
        waiting = [
            item for item in self.cluster.processes if item.pending is not None and not (self._stopped and item.free)
        ]
        if waiting:
            named = "; ".join(f"rank {item.worker.rank}: {item.pending}" for item in waiting[:MAX_NAMED])
            named += f"; and {len(waiting) - MAX_NAMED} more" if len(waiting) > MAX_NAMED else ""
            raise Stalled(f"no process can continue at {self.clock.now_s:.6f} virtual seconds. Pending: {named}")

    def _context_of(self, worker: SimWorker, resume: list[dict[str, Any]] | None) -> Context:
        settings, layout = self.settings, worker.replica.layout
        ctx = Context(
            worker.rank,
            self.num_workers,
            num_steps=worker.num_steps,
            layout=layout,
            seed=settings.seed,
            link=self.network,
        )
        if isinstance(worker.replica, MetaReplica):
            cache = ScheduleCache(
                worker.rank, self.num_workers, self._instructions, self.network.local_s, traced=worker.traced
            )
            self._schedules[worker.rank] = cache
        if resume is not None:
            resume_rank(resume[worker.rank], self.algorithm, worker.trained, ctx)
        worker.last_end = EndStep(ctx.first_step - 1, state=ctx.resumed)
        return ctx

    def _program_of(self, ctx: Context) -> Program:
        """A worker's program. If timing only, collectives with a fixed schedule are taken from the cache."""
        program = self.algorithm.worker(ctx)
        if self.algorithm.requires.servers and not isinstance(self.algorithm, CollectiveAlgorithm):
            return program  # it names no collective, and `lower` would take a tenth of the run
        schedules = self._schedules.get(ctx.rank)
        return lower(ctx, program, take_sum if schedules is None else schedules.take)

    def _note_end(self, value: Any, error: Exception | None) -> None:
        """Record the end of a worker's program. The run ends with the last one, even if time-outs are still pending."""
        self._ended_s = self.clock.now_s

    @property
    def seconds(self) -> float:
        """Virtual seconds that the run took."""
        return self._ended_s or self.clock.now_s

    # -- generations -------------------------------------------------------------------------------------------

    def _begin_run(self, stop_after: int | None) -> None:
        """Set each worker's first generation."""
        num_steps = self.workers[0].num_steps
        whole = Generation(
            algorithm=self.algorithm,
            num_ranks=self.num_workers,
            first_step=0,
            end_step=num_steps,
            num_steps=num_steps,
            sync_point=num_steps,
            stop_after=stop_after,
            checkpoint_every=self.settings.checkpoint_every,
        )
        sync_point = first_sync_point(whole, max(ctx.first_step for ctx in self.contexts))
        fresh = whole.following(EndStep(-1), sync_point=sync_point)
        for worker, ctx in zip(self.workers, self.contexts, strict=True):
            end = worker.last_end
            self._generations.append(fresh if end.step < 0 else whole.following(end, sync_point=sync_point))
            ctx.num_steps = self._generations[-1].end_step

    def _end_step(self, cluster: SimCluster, process: SimProcess, end: EndStep) -> Any:
        """Record a worker's step, and carry out what is decided."""
        worker = process.worker
        evaluates = worker.end_step(end, cluster.clock.now_s)
        announced = process.recorded is not None and self._must_end_early(worker, process.recorded, end.step)
        if not (evaluates or announced) and self._generations[worker.rank].continues_after(end.step):
            return None
        return self._follow(process, StepEnded(end=end, announced=announced, evaluates=evaluates))

    def _must_end_early(self, worker: SimWorker, recorded: RecordedAnswers, step: int) -> bool:
        """Return True if a worker of a replayed asynchronous run must end early.

        The record has the steps at which it announced a stop.
        """
        if not self._asynchronous:
            return False
        replica = worker.replica
        if step in recorded.controls:
            replica.control_out = 1
        alone = self.algorithm.replicas == Replicas.NEVER and replica.control_out
        heard = bool(alone or replica.control_seen)
        self._stop_heard = self._stop_heard or heard
        return heard

    def _end_generation(self, processes: list[SimProcess]) -> None:
        """Carry out what is decided when all programs have ended."""
        left = any(
            generation.has_steps_left(worker.rank, worker.last_end.step + 1)
            for worker, generation in zip(self.workers, self._generations, strict=True)
        )
        agreed: dict[str, Any] = {"num_commands": int(self._stop_heard), "stop": self._stop_heard, "any_left": left}
        meet = decide(self._generations[0], ProgramEnded(end=self.workers[0].last_end)) == (Agree(),)
        for process in processes:
            end = process.worker.last_end
            self._follow(
                process, Agreed(end=end, algorithm=self.algorithm, **agreed) if meet else ProgramEnded(end=end)
            )

    def _follow(self, process: SimProcess, boundary: StepEnded | ProgramEnded | Agreed) -> Any:
        """Carry out what `decide` returns; return the answer to an `EndStep`."""
        instructions = decide(self._generations[process.worker.rank], boundary)
        answers = [self._carry_out(process, boundary.end, instruction) for instruction in instructions]
        return PENDING if PENDING in answers else None

    def _carry_out(self, process: SimProcess, end: EndStep, instruction: Instruction) -> Any:
        """Carry out one instruction; return `PENDING` if the program waits or is closed."""
        worker = process.worker
        match instruction:
            case Evaluate(step):
                self._evaluations.after_step(worker, step)
            case KeepForEvaluation(step):
                self._evaluations.of_rank0(worker, step)
            case Checkpoint(place):
                return self._checkpoint(process, end, place)
            case Continue(generation):
                self._generations[worker.rank] = generation
                self.contexts[worker.rank].num_steps = generation.end_step
            case BeginGeneration(generation):
                self._begin_generation(process, generation)
            case Stop():
                self._outcome = instruction
                process.close()
                return PENDING
            case Finish():
                self._outcome = instruction
            case _:
                raise AssertionError(instruction)
        return None

    def _checkpoint(self, process: SimProcess, end: EndStep, place: int | None) -> Any:
        """Keep a checkpoint when the sums of the step's state are complete.

        The program waits for it, unless it stops.
        """
        when_complete(end.state, lambda: self.checkpoints.keep(process.worker, end, place))
        if place is None or is_complete(end.state):
            return None
        when_complete(end.state, process.resume)
        return PENDING

    def _begin_generation(self, process: SimProcess, generation: Generation) -> None:
        ctx = self.contexts[process.worker.rank]
        self._generations[ctx.rank] = generation
        ctx.num_steps = generation.end_step
        continue_from_state(ctx, process.worker.last_end)
        process.run_next(self._program_of(ctx))

    def _info(self) -> dict[str, Any]:
        """Return the entries of the run's record."""
        first, stopped = self.workers[0], self._stopped
        layout = first.replica.layout
        info = run_info(self.algorithm, self.problem, self.settings, "simulated", self.num_workers)
        info["notes"] += simulation_notes(
            self.settings, first.sampler, self.network, self.compute, timing_only=not first.has_values
        )
        held = self.num_workers * layout.message_bytes if first.has_values else 0
        if held > 64 * MIB:
            info["notes"].append(f"every worker has its own parameters: {held / MIB:.0f} MiB in all")
        info["model"] = model_info(layout)
        if self._failures:
            info["departures"] = departures_of(self.cluster)
        # With servers, rank 0 may have skipped its last step.
        done = first.num_steps if self.algorithm.requires.servers and not stopped else first.last_step + 1
        info["status"] = "stopped" if stopped else "finished"
        info["result"] = {"steps": done, "seconds": self.seconds, "last_step": done - 1}
        return info


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Collect garbage rarely, and only among objects that are made inside the block.

    Modules are not searched. Most new objects live long, so a collection frees little.
    """
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(usual[0], GC_THRESHOLD) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.collect()  # a simulation has cycles; after `unfreeze` they would be old objects, which are rarely collected
        gc.set_threshold(*usual)
        gc.unfreeze()
