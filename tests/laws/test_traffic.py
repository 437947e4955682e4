"""What is sent: the bytes recorded are those of the collective's closed form, for every bucket of every step."""

from __future__ import annotations

import pytest

from tests.laws import tiny
from tests.laws.train import train
from tests.laws.variants import name_of, variants
from workbench.algorithms import LayerwiseSGD, PipeSGD
from workbench.gradients import USED, Layout, build_layout, trainable
from workbench.program import Algorithm
from workbench.settings import Settings

STEPS = 6
WORLDS = [("simulated", 2), ("simulated", 3), ("simulated", 4), ("torch", 3)]
WORLDS += [pytest.param("mpi", 2, marks=pytest.mark.mpi), pytest.param("mpi", 3, marks=pytest.mark.mpi)]


def layout_of(algorithm: Algorithm) -> Layout:
    return build_layout(trainable(tiny.mlp()), algorithm.bucket_bytes)


def closed_form(algorithm: Algorithm, rank: int, num_ranks: int) -> float:
    """Bytes that a rank sends in one step of a method that sums each bucket once."""
    layout = layout_of(algorithm)
    sizes = [piece.stop - piece.start for piece in layout.buckets]
    return sum(algorithm.collective.bytes_sent(rank, num_ranks, size, layout.itemsize) for size in sizes)


@pytest.mark.parametrize(("runtime", "num_ranks"), WORLDS)
@pytest.mark.parametrize("algorithm", [variant for variant in variants() if hasattr(variant, "collective")], ids=name_of)
def test_bytes_are_those_of_the_closed_form(algorithm: Algorithm, runtime: str, num_ranks: int) -> None:
    trained = train(runtime, num_ranks, algorithm, tiny.problem(), Settings(steps=STEPS, timeout_s=30))
    sent = trained.run.spans.select(kinds=["send", "all_reduce", "broadcast"]).table
    for rank in range(num_ranks):
        expected = STEPS * closed_form(algorithm, rank, num_ranks)
        mine = sent[sent["rank"] == rank]
        assert abs(mine["bytes"].sum() - expected) <= len(mine), "each span's bytes are whole numbers"
        rows = trained.run.metrics[rank]
        if "evaluation" in rows[-1]:  # made when everything in flight has come down
            assert abs(rows[-1]["bytes_sent"] - expected) <= 1
        assert [row["bytes_sent"] for row in rows] == sorted(row["bytes_sent"] for row in rows)


@pytest.mark.parametrize(("runtime", "num_ranks"), WORLDS)
def test_every_bucket_is_sent_once_a_step(runtime: str, num_ranks: int) -> None:
    for algorithm in (LayerwiseSGD(bucket_bytes=200.0), PipeSGD(width=3)):
        trained = train(runtime, num_ranks, algorithm, tiny.problem(), Settings(steps=STEPS, timeout_s=30))
        table = trained.run.spans.select(kinds=["all_reduce"]).table
        layout = layout_of(algorithm)
        buckets = range(len(layout.buckets)) if algorithm.bucket_bytes else [-1]
        for rank in range(num_ranks):
            mine = table[table["rank"] == rank]
            assert sorted(zip(mine["step"], mine["bucket"], strict=True)) == [(step, bucket) for step in range(STEPS) for bucket in buckets]
            for span in mine:
                size = layout.message_bytes if span["bucket"] < 0 else layout.bucket_bytes(span["bucket"])
                assert span["bytes"] == int(2 * (num_ranks - 1) / num_ranks * size)


def test_one_worker_sends_nothing() -> None:
    for algorithm in variants():
        trained = train("simulated", 1, algorithm, tiny.problem(), Settings(steps=STEPS))
        assert trained.run.metrics[0][-1]["bytes_sent"] == 0


def test_a_message_is_the_parameters_and_a_short_tail() -> None:
    """What the method costs beyond its gradient: two words a bucket and one a parameter."""
    for bucket_bytes in (None, 200.0, 0):
        layout = build_layout(trainable(tiny.mlp()), bucket_bytes)
        numbers = sum(param.numel() for param in tiny.mlp().parameters())
        assert layout.message_bytes == 8 * (numbers + len(layout.slots) + USED * len(layout.buckets))
