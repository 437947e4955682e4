"""Evaluations of a simulated run: at which parameters the model is evaluated, and when.

An evaluation takes no virtual time and is written into rank 0's record, so asynchronous workers are evaluated at once.
Workers end a step at different virtual times. So if replicas differ, their mean is taken when the last worker ends the
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from workbench.ops import Apply
from workbench.program import Algorithm, Replicas
from workbench.replica.local_training import distance_from_mean
from workbench.runtimes.execution.evaluation_schedule import EvaluationSchedule
from workbench.runtimes.simulator.state import SimCluster
from workbench.runtimes.simulator.worker import SimWorker
from workbench.trace.weights import State


@final
class SimEvaluations:
    """The evaluations of a simulation."""

    def __init__(self, algorithm: Algorithm, workers: list[SimWorker], cluster: SimCluster) -> None:
        self._algorithm, self._workers = algorithm, workers
        self._clock, self._fabric = cluster.clock, cluster.fabric
        self._replicas: dict[int, list[Tensor]] = {}  # step -> parameters of the workers that have ended it
        self._num_evaluated = 0  # steps up to the last evaluated one
        self._schedule = EvaluationSchedule(workers[0].due_steps() if algorithm.requires.servers else [])
        # step -> shard -> parameters, of the servers that have completed it.
        self._shards: dict[int, dict[int, Tensor]] = {}
        self._updated_s: float | None = None  # time of the last update of a server

    def after_step(self, worker: SimWorker, step: int) -> None:
        """Evaluate a step that a synchronous worker has ended.

        Usually rank 0's parameters are evaluated. If replicas differ between steps, their mean is evaluated. If ranks
        end a step with equal parameters at different times, those of the first rank that ends it are evaluated.
        """
        if self._algorithm.elasticity.shrinks_unasked:
            if step >= self._num_evaluated:
                self._num_evaluated = step + 1
                self._evaluate(step, self._clock.now_s, worker.evaluated_parameters())
        elif self._algorithm.replicas == Replicas.AT_END:
            mine = worker.evaluated_parameters()
            assert mine is not None
            replicas = self._replicas.setdefault(step, [])
            replicas.append(mine)
            if len(replicas) == len(self._workers):
                self._evaluate_mean(step, self._clock.now_s, self._replicas.pop(step))
        else:
            self.of_rank0(worker, step)

    def of_rank0(self, worker: SimWorker, step: int) -> None:
        """Evaluate rank 0's parameters after a step."""
        if worker.rank == 0:
            self._evaluate(step, self._clock.now_s, worker.evaluated_parameters())

    def after_update(self, worker: SimWorker, request: Apply, end_s: float) -> None:
        """Evaluate the steps that all servers complete with this update of one of them."""
        self._updated_s = end_s
        server_copy = worker.trained.server_copy
        num_workers = self._algorithm.roles(len(self._workers)).num_computing - len(self._fabric.gone)
        for step in self._schedule.count(server_copy.progress, request, num_workers):
            shards = self._shards.setdefault(step, {})
            bucket = request.gradient.bucket
            for shard in range(len(server_copy.updates)) if bucket is None else (bucket,):
                shards.update(server_copy.evaluated_shard(shard))
            if len(shards) == len(worker.replica.layout.slots):
                self._evaluate(step, end_s, worker.join_shards(self._shards.pop(step)))

    def after_run(self, seconds: float, *, stopped: bool) -> None:
        """Evaluate the last step, after all programs have ended.

        Parameters of replicas that differed are equal now; their moving averages are not.
        """
        first, algorithm = self._workers[0], self._algorithm
        parameters = first.evaluated_parameters()
        if parameters is None:
            return
        if algorithm.requires.servers and not stopped:
            self._after_run_of_servers(seconds, parameters)
            return
        last = first.last_step if algorithm.asynchronous else first.num_steps - 1
        differed = algorithm.replicas == Replicas.AT_END and not algorithm.elasticity.shrinks_unasked
        evaluated = [worker.evaluated_parameters() for worker in self._workers] if differed else []
        replicas = [values for values in evaluated if values is not None]
        if first.trained.average is None:
            self._evaluate(last, seconds, parameters, self._distance(replicas, parameters))
        elif replicas and not algorithm.asynchronous:
            self._evaluate_mean(last, seconds, replicas)
        else:  # rank 0's average, if workers are evaluated at different times
            self._evaluate(last, seconds, parameters)

    def weights(self, *, stopped: bool) -> dict[str, State] | None:
        """Return the weights that an evaluation at the end uses, by file; None if only the timing is simulated.

        Replicas of ranks in step that differ are averaged. At the end of a run their parameters are equal, but not their
        moving averages.
        """
        first, algorithm = self._workers[0], self._algorithm
        if not first.has_values or algorithm.asynchronous or algorithm.replicas != Replicas.AT_END:
            return first.weights()
        replicas, average = [worker.trained for worker in self._workers], None
        parameters = _mean([replica.read_parameters() for replica in replicas]) if stopped else None
        if first.trained.average is not None:
            average = _mean([value for worker in self._workers if (value := worker.evaluated_parameters()) is not None])
        return first.weights(parameters, average)

    def _after_run_of_servers(self, seconds: float, parameters: Tensor) -> None:
        """Evaluate the last step, and the steps that no update of a server has completed."""
        first = self._workers[0]
        end_s = seconds if self._updated_s is None else self._updated_s
        done = {row["step"] for row in first.recorder.rows if "evaluation" in row}
        for step in self._schedule.left(min(self._progress(), default=0.0)):
            if step not in done:  # its gradients were dropped or lost, so no update followed
                self._evaluate(step, end_s, parameters)
        self._evaluate(first.num_steps - 1, end_s, parameters)

    def _progress(self) -> list[float]:
        """The steps that its server has completed, for each shard."""
        copies = [worker.trained.server_copy for worker in self._workers if worker.trained.has_server_copy]
        return [
            max(server_copy.progress[shard] for server_copy in copies)
            for shard in range(len(self._workers[0].replica.layout.buckets))
        ]

    def _evaluate_mean(self, step: int, now_s: float, replicas: list[Tensor]) -> None:
        """Evaluate at the mean of replicas that differ, and record how far they are from it."""
        mean = _mean(replicas)
        self._evaluate(step, now_s, mean, self._distance(replicas, mean))

    @staticmethod
    def _distance(replicas: Sequence[Tensor], mean: Tensor) -> dict[str, Any]:
        return distance_from_mean(replicas, mean) if len(replicas) > 1 else {}

    def _evaluate(
        self, step: int, now_s: float, parameters: Tensor | None, distance: Mapping[str, Any] | None = None
    ) -> None:
        """Evaluate at these parameters; None in a timing-only simulation."""
        if parameters is not None:
            bytes_sent = sum(int(worker.bytes_sent) for worker in self._workers)
            self._workers[0].evaluate(step, now_s, parameters, bytes_sent, distance or {})


def _mean(replicas: Sequence[Tensor]) -> Tensor:
    return torch.stack([*replicas]).mean(0)
