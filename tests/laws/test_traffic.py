"""Traffic: the recorded bytes are those of the collective's closed form, for every bucket of every step."""

from __future__ import annotations

import pytest

from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK, train
from tests.laws.variants import name_of, representatives, variants
from workbench.algorithms import SPARTA, LayerwiseSGD, PipeSGD
from workbench.algorithms.gossip import GossipAlgorithm
from workbench.collectives import native_bytes
from workbench.gradients import USED, Layout, build_layout, trainable
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

STEPS = 6
WORLDS = [("simulated", 2), ("simulated", 3), ("simulated", 4), ("torch", 3)]
WORLDS += [pytest.param("mpi", 2, marks=pytest.mark.mpi), pytest.param("mpi", 3, marks=pytest.mark.mpi)]


SENT = ["send", "all_reduce", "broadcast", "reduce_scatter", "all_gather"]


def layout_of(algorithm: Algorithm) -> Layout:
    buckets = algorithm.requires.buckets
    return build_layout(trainable(tiny.mlp()), buckets.max_bytes, buckets.count)


def has_closed_form(algorithm: Algorithm, num_ranks: int) -> bool:
    return algorithm.bytes_per_step(0, num_ranks, layout_of(algorithm)) is not None


def of_the_last_mean(algorithm: Algorithm, rank: int, num_ranks: int) -> float:
    """The bytes that a rank sends when a run with different replicas ends: one sum of the parameters, after all steps."""
    if isinstance(algorithm, SPARTA) and algorithm.fraction < 1:
        return algorithm.collective.bytes_of(rank, num_ranks, layout_of(algorithm))
    if isinstance(algorithm, GossipAlgorithm):
        return native_bytes(num_ranks, layout_of(algorithm).message_bytes)
    return 0.0


def cases() -> list[tuple[str, int, Algorithm]]:
    """Every setting on simulated workers, one of each algorithm on real ranks."""
    found = []
    for world in WORLDS:
        runtime, num_ranks = getattr(world, "values", world)
        for algorithm in variants(num_ranks) if runtime == "simulated" else representatives(num_ranks):
            if has_closed_form(algorithm, num_ranks):
                name = f"{name_of(algorithm)}-{runtime}-{num_ranks}"
                found.append(pytest.param(algorithm, runtime, num_ranks, id=name, marks=getattr(world, "marks", ())))
    return found


@pytest.mark.parametrize(("algorithm", "runtime", "num_ranks"), cases())
def test_bytes_are_those_of_the_closed_form(algorithm: Algorithm, runtime: str, num_ranks: int) -> None:
    trained = train(runtime, num_ranks, algorithm, tiny.problem(), Settings(steps=STEPS, timeout_s=30))
    sent = trained.run.spans.select(kinds=SENT).table
    for rank in range(num_ranks):
        per_step = algorithm.bytes_per_step(rank, num_ranks, layout_of(algorithm))
        assert per_step is not None
        expected = STEPS * per_step + of_the_last_mean(algorithm, rank, num_ranks)
        mine = sent[sent["rank"] == rank]
        assert abs(mine["bytes"].sum() - expected) <= len(mine), "each span's bytes are whole numbers"
        rows = trained.run.metrics[rank]
        if rows and "evaluation" in rows[-1]:  # made when everything in flight has come down
            ranks = range(num_ranks) if runtime == "simulated" else [rank]  # simulated, rank 0 evaluates for all
            known = [algorithm.bytes_per_step(each, num_ranks, layout_of(algorithm)) or 0.0 for each in ranks]
            last = sum(of_the_last_mean(algorithm, each, num_ranks) for each in ranks)
            assert abs(rows[-1]["bytes_sent"] - STEPS * sum(known) - last) <= num_ranks
        # Evaluations may be made, and their rows written, at the end
        counts = [row["bytes_sent"] for row in trained.rows(rank)]
        assert counts == sorted(counts)


@pytest.mark.parametrize("algorithm", [item for item in variants() if not has_closed_form(item, 3)], ids=name_of)
def test_spans_and_metrics_count_the_same_bytes(algorithm: Algorithm) -> None:
    """Where there is no closed form, the two records at least agree, and something is sent."""
    simulation = Simulation(algorithm, tiny.problem(), Settings(steps=STEPS), 3, network=NETWORK, compute=COMPUTE)
    sent = simulation.run().spans.select(kinds=SENT).table
    for worker in simulation.workers:
        mine = sent[sent["rank"] == worker.rank]
        assert abs(mine["bytes"].sum() - worker.bytes_sent) <= len(mine), "each span's bytes are whole numbers"
    assert sent["bytes"].sum() > 0


@pytest.mark.parametrize(("runtime", "num_ranks"), WORLDS)
def test_every_bucket_is_sent_once_a_step(runtime: str, num_ranks: int) -> None:
    for algorithm in (LayerwiseSGD(bucket_bytes=200.0), PipeSGD(width=3)):
        trained = train(runtime, num_ranks, algorithm, tiny.problem(), Settings(steps=STEPS, timeout_s=30))
        table = trained.run.spans.select(kinds=["all_reduce"]).table
        layout = layout_of(algorithm)
        buckets = range(len(layout.buckets)) if algorithm.requires.buckets.max_bytes else [-1]
        for rank in range(num_ranks):
            mine = table[table["rank"] == rank]
            assert sorted(zip(mine["step"], mine["bucket"], strict=True)) == [
                (step, bucket) for step in range(STEPS) for bucket in buckets
            ]
            for span in mine:
                size = layout.message_bytes if span["bucket"] < 0 else layout.bucket_bytes(span["bucket"])
                assert span["bytes"] == int(2 * (num_ranks - 1) / num_ranks * size)


def test_one_worker_sends_nothing() -> None:
    for algorithm in variants(1):
        trained = train("simulated", 1, algorithm, tiny.problem(), Settings(steps=STEPS))
        assert trained.run.metrics[0][-1]["bytes_sent"] == 0


def test_a_message_is_the_parameters_and_a_short_tail() -> None:
    """The message is longer than its gradient by two numbers a bucket and one a parameter."""
    for bucket_bytes in (None, 200.0, 0):
        layout = build_layout(trainable(tiny.mlp()), bucket_bytes)
        numbers = sum(param.numel() for param in tiny.mlp().parameters())
        assert layout.message_bytes == 8 * (numbers + len(layout.slots) + USED * len(layout.buckets))
