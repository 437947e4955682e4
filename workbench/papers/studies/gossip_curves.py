"""Trainings by gossip and by sums: curves by step, which no network changes, and the seconds of a step on each network.

A synchronous algorithm makes the same updates on every network. So each training is made once, and its steps are
counted. A simulation without values gives the seconds of a step on each network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch

from workbench.analysis.summary import crossing
from workbench.costs import AnyNetwork, Compute
from workbench.errors import ConfigError, Diverged
from workbench.papers.studies.simulated_steps import simulated_step_s
from workbench.papers.studies.training import train
from workbench.problems.base import Problem
from workbench.problems.shards import sharded, shards_by_label
from workbench.program import Algorithm
from workbench.rng import generator
from workbench.topologies import Graph

GUESSING = math.log(10)  # loss of guessing one of ten classes
SETTLED = 0.5  # share of a training after which the distance of replicas is averaged
NEGLIGIBLE = 1e-8  # of a product of mixing matrices


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The evaluations of one training.

    Attributes:
        steps: number of steps taken at each evaluation, ascending; empty if the training diverged.
        losses: test loss of the mean of the replicas.
        distances: root mean square distance of the replicas from their mean; 0 if they are equal.
        lr: learning rate.

    >>> curve = Curve(steps=(10, 20, 30), losses=(2.0, 1.0, 0.8), distances=(0.2, 0.4, 0.0), lr=0.1)
    >>> curve.steps_to(1.5), curve.steps_to(0.5), curve.last_loss
    (15.0, inf, 0.8)
    >>> curve.settled_distance
    0.4
    """

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    distances: tuple[float, ...]
    lr: float

    def steps_to(self, target: float) -> float:
        """Return the steps until the loss is at most the target, interpolated; infinite if it never is."""
        met = crossing(self.steps, self.losses, target)
        return math.inf if met is None else float(met.steps)

    @property
    def last_loss(self) -> float:
        """The last test loss; that of guessing for a training that diverged or is worse."""
        return min(GUESSING, self.losses[-1]) if self.losses else GUESSING

    @property
    def settled_distance(self) -> float:
        """Mean distance over the second half of the training, without the last evaluation, at which replicas are equal.

        Raises:
            ConfigError: there are too few evaluations.
        """
        chosen = self.distances[math.ceil(SETTLED * (len(self.distances) - 1)) : -1]
        if not chosen:
            raise ConfigError(
                f"{len(self.distances)} evaluations: give 2 or more, and a training that does not diverge"
            )
        return float(np.mean(chosen))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What all algorithms train.

    Attributes:
        problem: of ten classes.
        samples: samples of all workers in a step.
        steps: of a training.
        evaluate_every: steps between evaluations.
    """

    problem: Problem
    samples: int
    steps: int
    evaluate_every: int

    def curve(
        self, algorithm: Algorithm, seed: int, *, workers: int, lr: float, skewed: bool = False, **costs: Any
    ) -> Curve:
        """Train by plain SGD on simulated workers.

        Args:
            algorithm: the algorithm.
            seed: of weights and data order, and of which worker has which classes.
            workers: a divisor of `samples`.
            lr: learning rate.
            skewed: whether each worker draws from its own classes; otherwise all draw from all samples.
            costs: network and compute; communication is free by default, and a step takes a second.
        """
        batch_size, rest = divmod(self.samples, workers)
        if rest or not batch_size:
            raise ConfigError(f"{self.samples} samples of {workers} workers: give a multiple of the number of workers")
        problem = self.problem
        if skewed:
            shards = own_classes(problem, workers, seed)
            problem = sharded(problem, shards, batch_size=batch_size, steps=self.steps, seed=seed)
        settings: dict[str, Any] = {
            "compute": Compute(forward_s=1 / 3, backward_s=2 / 3),
            "steps": self.steps,
            "batch_size": batch_size,
            "evaluate_every": self.evaluate_every,
            "optimizer": partial(torch.optim.SGD, lr=lr),
            "seed": seed,
            "trace_steps": 0,
            **costs,
        }
        try:
            rows = train(algorithm, problem, workers=workers, **settings).evaluations()
        except Diverged:
            return Curve(steps=(), losses=(), distances=(), lr=lr)
        return Curve(
            steps=tuple(row["step"] + 1 for row in rows),
            losses=tuple(row["test_loss"] for row in rows),
            distances=tuple(row.get("consensus_distance") or 0.0 for row in rows),
            lr=lr,
        )


def own_classes(problem: Problem, workers: int, seed: int) -> list[list[int]]:
    """Return a shard of one class or a few for each worker.

    Which worker has which is random. Otherwise neighbours on a ring would have the same classes.
    """
    labels = [int(label) for _, label in problem.train_data()]  # type: ignore[attr-defined]  # it is map-style
    shards = shards_by_label(labels, workers)
    return [shards[place] for place in generator(seed, "own-classes", workers).permutation(workers)]


# -- seconds of a step -------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest of several implementations of one update.

    Attributes:
        name: which one.
        step_s: its seconds of a step.
    """

    name: str
    step_s: float


def fastest(
    ways: Mapping[str, Algorithm],
    problem: Problem,
    *,
    workers: int,
    network: AnyNetwork,
    compute: Compute,
    steps: int,
    filled: int = 1,
) -> Fastest:
    """Return the algorithm with the shortest step on a network.

    Args:
        ways: name -> algorithm, all with the same update.
        problem: its network gives the sizes of messages.
        workers, network, compute: as in `wb.simulate`; without stragglers.
        steps: simulated steps.
        filled: first steps, which are left out.
    """
    how: dict[str, Any] = {"workers": workers, "network": network, "compute": compute, "steps": steps}
    found = {name: simulated_step_s(algorithm, problem, filled=filled, **how) for name, algorithm in ways.items()}
    name = min(found, key=found.__getitem__)
    return Fastest(name=name, step_s=found[name])


# -- theory of the distance --------------------------------------------------------------------------------------------


def distance_of_noise(graph: Graph, num_ranks: int) -> float:
    """Return the distance of replicas from their mean under gradients that are independent in each step, over lr * sigma.

    D-PSGD is x[t+1] = W x[t] - lr g[t]. With g of variance sigma^2, independent over ranks and steps, the mean square
    distance tends to (lr sigma)^2 / p * sum_s |W^s - J|_F^2, with J the mean over ranks. Derived here.

    >>> from workbench.topologies import Complete, Ring
    >>> round(distance_of_noise(Complete(), 16), 3), round(distance_of_noise(Ring(), 16), 3)
    (0.968, 1.552)
    """
    squares = sum(float((product**2).sum()) for product in _centred_products(graph, num_ranks))
    return math.sqrt(squares / num_ranks)


def distance_of_difference(graph: Graph, num_ranks: int) -> float:
    """Return the same under gradients that differ between ranks by as much in every step, over lr * zeta.

    With g of variance zeta^2, independent over ranks and constant in time, it tends to
    (lr zeta)^2 / p * |sum_s (W^s - J)|_F^2. Where the loss is curved, replicas that are far apart are drawn together, so
    this is an upper bound. Derived here.

    >>> from workbench.topologies import Complete, Ring
    >>> round(distance_of_difference(Complete(), 16), 3), round(distance_of_difference(Ring(), 16), 2)
    (0.968, 7.29)
    """
    total = np.zeros((num_ranks, num_ranks))
    for product in _centred_products(graph, num_ranks):
        total += product
    return math.sqrt(float((total**2).sum()) / num_ranks)


def _centred_products(graph: Graph, num_ranks: int) -> Sequence[np.ndarray[Any, np.dtype[np.float64]]]:
    """Return W^s - J for s = 0, 1, ... until it is negligible; products over steps of a graph that changes."""
    product = np.eye(num_ranks) - 1 / num_ranks
    found = [product]
    step = 0
    while float(np.abs(product).max()) > NEGLIGIBLE:
        product = graph.mixing(num_ranks, step) @ product
        found.append(product)
        step += 1
    return found
