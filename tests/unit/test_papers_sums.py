"""One sum on simulated workers: its time is the formula's, and its error what the codec makes."""

from __future__ import annotations

import pytest
import torch

from workbench.codecs import Linear8
from workbench.collectives import Linear, Once, Ring
from workbench.costs import Network
from workbench.papers.sums import sum_error, sum_run, sum_s
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
