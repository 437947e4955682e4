"""A training with compiled codecs and one without give the same bytes, also if only one of the ranks has them."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.laws.train import make_job, run_job, run_on_ranks
from workbench import problems
from workbench.algorithms import SynchronousSGD
from workbench.codecs import Codec, Linear8, Truncate16, compiled, compiler, kernels
from workbench.collectives import Ring
from workbench.runtimes.rank.main import Job
from workbench.settings import Settings
from workbench.trace.run import Run

NEEDS_LIBRARY = pytest.mark.skipif(
    compiler.library().functions is None, reason=f"no compiled codecs: {compiler.library().message}"
)


def train(job: Job, num_ranks: int, compiled_ranks: tuple[int, ...]) -> int:
    """On a rank: train. Return how often a kernel was asked for."""
    rank = int(os.environ["RANK"])

    def of(values: Tensor) -> ModuleType | None:
        return compiled if rank in compiled_ranks and values.dtype == torch.float32 else None

    with mock.patch.object(kernels, "of", side_effect=of) as asked:
        run_job(job, num_ranks)
    return asked.call_count


@NEEDS_LIBRARY
@pytest.mark.parametrize("codec", [Linear8(group=100), Truncate16(rounding="nearest")], ids=repr)
def test_ranks_with_and_without_compiled_codecs_give_the_same_weights(codec: Codec) -> None:
    found: list[Any] = []
    for compiled_ranks in ((), (1,), (0, 1)):
        algorithm = SynchronousSGD(collective=Ring(codec=codec))
        job = make_job("torch", 2, algorithm, problems.get("digits-mlp"), Settings(steps=6, batch_size=8, timeout_s=60))
        asked = run_on_ranks(lambda job, num_ranks, which=compiled_ranks: train(job, num_ranks, which), job, 2)
        assert min(asked) >= 6 * 3, "in each step, a rank encodes, sums and decodes"
        run = Run.load(job.folder)
        rows = [[(row.get("loss"), row["bytes_sent"]) for row in run.metrics[rank]] for rank in (0, 1)]
        spans = run.spans
        assert len(spans.select(kinds=["decode"]).table) and not len(spans.select(kinds=["sum"]).table), "one pass"
        found.append((rows, (run.folder / "model.safetensors").read_bytes()))
    assert found[0] == found[1] == found[2]
