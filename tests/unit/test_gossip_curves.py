"""Trainings that are made once and timed on each network: steps to a target, shards, the fastest way, theory of distances."""

from __future__ import annotations

import math

import numpy as np
import pytest

import workbench as wb
from workbench import costs
from workbench.errors import ConfigError
from workbench.papers.studies.gossip_curves import (
    GUESSING,
    Curve,
    Task,
    distance_of_difference,
    distance_of_noise,
    fastest,
    own_classes,
)
from workbench.topologies import Complete, Graph, OnePeerExponential, Ring, Torus

TASK = Task(problem=wb.problems.digits_softmax(), samples=32, steps=12, evaluate_every=4)


def test_a_target_that_is_never_reached_takes_forever() -> None:
    curve = Curve(steps=(4, 8), losses=(3.0, 1.0), distances=(0.5, 0.0), lr=0.1)
    assert curve.steps_to(2.0) == 6.0 and curve.steps_to(3.5) == 4.0 and curve.steps_to(0.9) == math.inf
    diverged = Curve(steps=(), losses=(), distances=(), lr=9.0)
    assert diverged.last_loss == GUESSING and diverged.steps_to(1.0) == math.inf
    with pytest.raises(ConfigError):
        diverged.settled_distance  # noqa: B018


def test_losses_by_step_do_not_depend_on_the_network() -> None:
    near, far = (
        TASK.curve(wb.DPSGD(), 0, workers=4, lr=0.1, network=network, compute=costs.Compute(forward_s=1, backward_s=2))
        for network in ("free", "wan-100m")
    )
    assert near == far and near.steps == (4, 8, 12) and near.distances[0] > 0 == near.distances[-1]


def test_on_skewed_data_replicas_are_further_apart() -> None:
    shuffled, skewed = (TASK.curve(wb.DPSGD(), 0, workers=8, lr=0.1, skewed=kind) for kind in (False, True))
    assert skewed.settled_distance > 1.5 * shuffled.settled_distance


def test_a_training_that_diverges_counts_as_guessing() -> None:
    assert TASK.curve(wb.DPSGD(), 0, workers=4, lr=1e30).last_loss == GUESSING


def test_workers_share_the_samples_of_a_step_equally() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        TASK.curve(wb.DPSGD(), 0, workers=5, lr=0.1)


def test_each_sample_is_in_one_shard_and_neighbours_have_other_classes_by_chance() -> None:
    labels = np.array([int(label) for _, label in TASK.problem.train_data()])
    shards = own_classes(TASK.problem, 16, seed=0)
    assert sorted(sample for shard in shards for sample in shard) == list(range(len(labels)))
    assert all(len(set(labels[shard])) <= 2 for shard in shards)
    assert shards != own_classes(TASK.problem, 16, seed=1)
    first = [int(labels[shard[0]]) for shard in shards]
    assert first != sorted(first)


def test_the_fastest_way_depends_on_the_latency() -> None:
    ways = {
        "ring": wb.SynchronousSGD(collective=wb.collectives.Ring()),
        "halving": wb.SynchronousSGD(collective=wb.collectives.HalvingDoubling()),
    }
    network = costs.Network(latency_s=1.0, bandwidth_bytes_per_s=1e9)
    found = fastest(
        ways, TASK.problem, workers=8, network=network, compute=costs.Compute(forward_s=1, backward_s=2), steps=4
    )
    assert found.name == "halving" and found.step_s == pytest.approx(3 + 2 * 3, rel=1e-3)


@pytest.mark.parametrize("graph", [Ring(), Torus(), OnePeerExponential(), Complete()])
def test_distances_of_theory_are_those_of_its_recursion(graph: Graph) -> None:
    """x[t+1] = W x[t] - g, with g that stays or is new in each step."""
    random, p, width = np.random.default_rng(0), 8, 4000
    constant = random.standard_normal((p, width))
    for fresh, expected in ((True, distance_of_noise(graph, p)), (False, distance_of_difference(graph, p))):
        x = np.zeros((p, width))
        for step in range(96):  # whole periods
            x = graph.mixing(p, step) @ x - (random.standard_normal((p, width)) if fresh else constant)
        measured = math.sqrt(float(((x - x.mean(0)) ** 2).mean()))
        assert measured == pytest.approx(expected, rel=0.03)
