"""One sum on simulated workers: its time is the formula's, and its error the codec's."""

from __future__ import annotations

import pytest
import torch

from workbench import problems
from workbench.algorithms import SynchronousSGD
from workbench.codecs import Linear8
from workbench.collectives import Linear, Once, Ring
from workbench.costs import Network
from workbench.papers.studies.simulated_steps import LateOnce, simulated_steps
from workbench.papers.studies.sums import (
    delay_of_last_s,
    errors_by_workers,
    growth_exponents,
    sum_error,
    sum_run,
    sum_s,
    times_by_size,
)
from workbench.papers.studies.training import compute_cost
from workbench.theory import all_reduce_s

LINK = Network(
    latency_s=1e-4, bandwidth_bytes_per_s=1e9, sum_s_per_byte=1e-10, encode_s_per_byte=3e-10, decode_s_per_byte=1e-10
)


@pytest.mark.parametrize("collective", [Ring(), Ring(codec=Linear8()), Linear()], ids=repr)
def test_a_sum_takes_what_its_formula_says(collective: Ring | Linear) -> None:
    assert sum_s(collective, 400_000, 4, LINK) == pytest.approx(all_reduce_s(collective, 1_600_000, 4, LINK), rel=1e-3)


def test_its_trace_is_kept_where_asked_for() -> None:
    assert len(sum_run(Ring(), 400, 2, LINK, traced=True).spans.table) > len(sum_run(Ring(), 400, 2, LINK).spans.table)


def test_a_codec_leaves_an_error_and_a_plain_sum_only_rounding() -> None:
    values = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    plain, once, hops = (sum_error(way, values) for way in (Ring(), Once(codec=Linear8()), Ring(codec=Linear8())))
    assert plain < 1e-6 < 1e-3 < once < hops < 0.05


def test_times_by_size_are_those_of_each_sum() -> None:
    found = times_by_size({"ring": Ring(), "linear": Linear()}, [0.4, 0.8], 4, LINK)
    assert found["linear"] == {mb: sum_s(Linear(), int(mb * 1e6) // 4, 4, LINK) for mb in (0.4, 0.8)}
    assert found["ring"][0.8] < found["linear"][0.8]


def test_errors_are_of_equal_blocks_and_each_seed() -> None:
    found = errors_by_workers({"hops": Ring(codec=Linear8())}, [2, 4], [0, 1], block=256)
    values = torch.randn(4, 4 * 256, generator=torch.Generator().manual_seed(1))
    assert found["hops"][4][1] == sum_error(Ring(codec=Linear8()), values)
    assert [len(errors) for errors in found["hops"].values()] == [2, 2]


def test_the_delay_of_the_last_is_over_the_mean_of_all() -> None:
    task = problems.wide_mlp(megabytes=0.1)
    compute = compute_cost(0.1, LateOnce(factor=3.0, step=1))
    how = {"workers": 4, "network": LINK, "compute": compute, "steps": 4, "trace_steps": None, "detail": "messages"}
    run = simulated_steps(SynchronousSGD(), task, **how)  # type: ignore[arg-type]
    assert delay_of_last_s(run) == pytest.approx(
        (0.2 - 0.05) / 4
    )  # 0.2 s late in one of four steps, one of four workers


def test_errors_that_grow_with_the_square_root_of_workers_have_the_exponent_one_half() -> None:
    errors = {p: [3 * (p + 1) ** 0.5, (p + 1) ** 2] for p in (2, 4, 8, 16)}
    assert growth_exponents(errors) == pytest.approx([0.5, 2.0])
