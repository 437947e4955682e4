"""Iterations of synchronous SGD with delayed workers: when gradients arrive without traffic, at servers, and at a ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.algorithms import BackupSGD, SynchronousSGD
from workbench.analysis.arrivals import arrivals
from workbench.collectives import Ring
from workbench.costs import Compute, Independent, Network
from workbench.papers.studies.training import train
from workbench.problems.base import Problem
from workbench.theory import parameter_server_s
from workbench.trace.run import Run

NUMEL = 10_000  # approximate number of parameters of the small model
Seconds = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Workers whose gradients are summed by parameter servers or by a ring. Values do not matter, so none is computed.

    A small model stands for one of `model_bytes`, on a network that is slower in proportion.

    Attributes:
        workers: p, all of which compute.
        compute_s: mean seconds of forward and backward.
        network: between machines.
        model_bytes: bytes of the large model's gradient.
        servers: the numbers of servers to compare; parameters are cut so that all servers have equally many.
    """

    workers: int
    compute_s: float
    network: Network
    model_bytes: float
    servers: Sequence[int]

    @property
    def task(self) -> Problem:
        """The small model, of equal parts. Its values are never computed."""
        parts = math.lcm(*self.servers)
        loss = torch.nn.functional.cross_entropy
        return Problem(model=partial(_equal_parts, parts), loss=loss, train=range(10**9), name="equal parts")

    @property
    def scaled(self) -> Network:
        """The network, slower by the ratio of the two models' sizes."""
        slower = self.model_bytes / self._num_bytes
        return replace(
            self.network,
            bandwidth_bytes_per_s=self.network.bandwidth_bytes_per_s / slower,
            sum_s_per_byte=self.network.sum_s_per_byte * slower,
            name=f"{self.network.name}, scaled",
        )

    @property
    def _num_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.task.model().parameters())

    def without_traffic(self, distribution: Independent, seed: int, steps: int) -> Seconds:
        """Return (steps, p) seconds until the k-th gradient arrives if messages cost nothing, k ascending."""
        drawn = np.array([distribution.factors(seed, step, self.workers) for step in range(steps)])
        return np.asarray(np.sort(drawn, axis=1) * self.compute_s / distribution.mean)

    def at_servers(self, distribution: Independent, seed: int, steps: int, servers: int) -> Seconds:
        """Return (steps, p) seconds until one of the servers has the k-th gradient, k ascending."""
        return arrivals(self._with_servers(distribution, seed, steps, servers))

    def server_step_s(self, distribution: Independent | None, seed: int, steps: int, servers: int) -> float:
        """Return the mean seconds of a step with servers, without the first; None: without delays."""
        run = self._with_servers(distribution, seed, steps, servers, trace_steps=0)
        return _step_s([row["seconds"] for row in run.updates() if row["bucket"] == 0])

    def ring_step_s(self, distribution: Independent | None, seed: int, steps: int) -> float:
        """Return the mean seconds of a step with a ring, which starts when the last worker arrives."""
        algorithm = SynchronousSGD(collective=Ring())
        run = self._run(algorithm, distribution, seed, steps, workers=self.workers, detail="formula", trace_steps=0)
        return _step_s([row["seconds"] for row in run.steps()])

    def predicted_step_s(self, servers: int) -> float:
        """Return the seconds of a step without delays by the formula of parameter servers."""
        num_bytes = self._num_bytes + 8 * servers  # a flag and a count with each message
        traffic_s = parameter_server_s(num_bytes, self.workers, self.scaled, servers, staggered=True)
        return self.compute_s + float(traffic_s)

    def _with_servers(self, distribution: Independent | None, seed: int, steps: int, servers: int, **how: Any) -> Run:
        algorithm = BackupSGD(backups=0, shards=servers, dedicated=True)
        return self._run(algorithm, distribution, seed, steps, workers=self.workers + servers, **how)

    def _run(self, algorithm: Any, distribution: Independent | None, seed: int, steps: int, **how: Any) -> Run:
        unit_s = self.compute_s / (distribution.mean if distribution else 1.0)
        # All compute is forward, so that the gradient is sent whole, when it is complete
        compute = Compute(forward_s=unit_s, backward_s=0.0, stragglers=(distribution,) if distribution else ())
        common: dict[str, Any] = {"timing_only": True, "steps": steps, "batch_size": 1, "seed": seed}
        return train(algorithm, self.task, network=self.scaled, compute=compute, **common, **how)


def measured_seconds(run: Run) -> Seconds:
    """Return (ranks, steps) seconds of forward and backward of real ranks, without the first tenth of the steps."""
    steps = len(run.steps())
    rows = run.spans.table[run.spans.is_kind(["forward", "backward"])]
    found = np.zeros((run.num_ranks, steps))
    np.add.at(found, (rows["rank"], rows["step"]), rows["end_s"] - rows["start_s"])
    return found[:, steps // 10 :]


def _step_s(ends: Sequence[float]) -> float:
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def _equal_parts(parts: int) -> torch.nn.Module:
    model = torch.nn.Module()
    model.parts = torch.nn.ParameterList([torch.zeros(max(1, NUMEL // parts)) for _ in range(parts)])
    return model
