"""A simulated cluster in one process: virtual time from a cost model, real gradients or none at all.

The same programs as on real ranks. Work of the foreground and of one background lane a worker is timed; a minibatch's
gradients are really computed (unless timing only), and sums are taken in rank order, so a run is a pure function of its inputs.
"""

from __future__ import annotations

from typing import Any, final

import torch

from workbench import costs
from workbench.costs import Compute, Network, measure_compute
from workbench.errors import ConfigError, Stalled
from workbench.naming import call_checked
from workbench.problems.base import Problem
from workbench.program import Algorithm, Context
from workbench.replica import compute_threads
from workbench.runtimes.checkpoint import resume as go_on
from workbench.runtimes.sim_thread import FOREGROUND, SimThread
from workbench.runtimes.sim_worker import build_workers
from workbench.runtimes.virtual import Clock, Fabric
from workbench.runtimes.worker import check_what, model_info, run_info
from workbench.settings import Settings
from workbench.trace.run import Run


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
        network: Network,
        compute: Compute,
        timing_only: bool = False,
        check_in_flight: bool = False,
    ) -> None:
        check_what(algorithm, problem)
        if not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"workers={workers}: a simulated cluster has at least 1")
        self.algorithm, self.problem, self.settings = algorithm, problem, settings
        self.num_workers = workers
        self.clock = Clock()
        self.fabric = Fabric(self.clock, network, workers)
        self.network, self.compute = network, compute
        self.check_in_flight = check_in_flight
        self.workers = build_workers(algorithm, problem, settings, workers, timing_only)
        self.checkpoints: list[dict[str, Any]] = []
        self.stop_after: int | None = None
        self.threads: list[SimThread] = []

    def run(self, resume: list[dict[str, Any]] | None = None, stop_after: int | None = None) -> Run:
        """From the first step (or a checkpoint) to the last.

        Raises:
            Stalled: nobody can move; names what each rank waits for.
            Diverged: a loss is not a finite number.
        """
        self.stop_after = stop_after
        self.checkpoints = [{} for _ in self.workers]
        with torch.random.fork_rng(devices=[]), compute_threads(self.settings.threads or 1):
            for worker in self.workers:
                ctx = Context(worker.rank, self.num_workers, num_steps=worker.num_steps)
                if resume is not None:
                    go_on(resume[worker.rank], self.algorithm, worker.trained, ctx)
                thread = SimThread(self, worker, self.algorithm.worker(ctx), FOREGROUND, 0, lambda value: None)
                self.threads.append(thread)
                self.clock.at(0.0, thread.begin)
            self.clock.run()
            waiting = [thread for thread in self.threads if thread.pending is not None]
            if waiting:
                named = "; ".join(f"rank {thread.worker.rank}: {thread.pending}" for thread in waiting[:16])
                raise Stalled(f"nobody can move at {self.clock.now_s:.6f} virtual seconds. Pending: {named}")
            if stop_after is None:
                self._evaluate_at_end()
        return Run.from_memory(self._info(), [worker.recorder for worker in self.workers])

    def _evaluate_at_end(self) -> None:
        first = self.workers[0]
        first.evaluate(first.num_steps - 1, self.clock.now_s)

    def _info(self) -> dict[str, Any]:
        info = run_info(self.algorithm, self.problem, self.settings, "simulated", self.num_workers)
        done = self.workers[0].last_step + 1
        costs = [f"simulated: {self.network}", f"simulated: {self.compute}"]
        status = "stopped" if self.stop_after is not None else "finished"
        result = {"steps": done, "seconds": self.clock.now_s, "last_step": done - 1}
        return {
            **info,
            "notes": [*info["notes"], *costs],
            "model": model_info(self.workers[0].replica.layout),
            "status": status,
            "result": result,
        }


def simulate(
    algorithm: Algorithm,
    problem: Problem,
    *,
    workers: int,
    network: Network | str = costs.ethernet_10g,
    compute: Compute | None = None,
    timing_only: bool = False,
    **settings: Any,
) -> Run:
    """Train on a simulated cluster and return the run.

    Args:
        algorithm, problem: the same objects that real ranks are given.
        workers: how many.
        network: `workbench.costs.ethernet_10g`, or its name there, "ethernet-10g".
        compute: of one worker; None: measured here and now (`workbench.costs.measure_compute`), and noted with the run.
        timing_only: compute no gradients: what time does, and nothing else.
        settings: those of `workbench.settings.Settings`.
    """
    check_what(algorithm, problem)
    network = costs.get(network) if isinstance(network, str) else network
    chosen: Settings = call_checked("simulate", Settings, settings)
    compute = compute or measure_compute(problem, chosen.batch_size, optimizer=chosen.optimizer, threads=chosen.threads or 1)
    return Simulation(algorithm, problem, chosen, workers, network=network, compute=compute, timing_only=timing_only).run()
