"""A simulation without gradients takes the same times and sends the same bytes as one with them, with every algorithm."""

from __future__ import annotations

import pytest

from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK
from tests.laws.variants import all_variants, name_of, runs_on
from workbench.algorithms import OnlineBackupSGD
from workbench.laws.sentences import assert_same_rows
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

KEPT = ("step", "samples", "num_samples", "bytes_sent", "staleness")
HOW = Settings(steps=6, batch_size=3, optimizer=tiny.momentum, seed=1)


@pytest.mark.parametrize("algorithm", all_variants(), ids=name_of)
def test_times_are_those_with_gradients(algorithm: Algorithm) -> None:
    """Unless the algorithm decides by values: backup workers chosen online measure the noise of gradients."""
    num_ranks = 3 if runs_on(algorithm, 3) else 1
    runs = [
        Simulation(
            algorithm,
            tiny.problem(test=None),
            HOW,
            num_ranks,
            network=NETWORK,
            compute=COMPUTE,
            timing_only=timing_only,
        ).run()
        for timing_only in (False, True)
    ]
    if isinstance(algorithm, OnlineBackupSGD):
        assert len(runs[1].updates()) == HOW.steps
        return
    law = f"{name_of(algorithm)}: without gradients, times and bytes are those with gradients"
    for rank, rows in runs[0].metrics.items():
        kept = [[{name: row[name] for name in KEPT} for row in found] for found in (runs[1].metrics[rank], rows)]
        assert_same_rows(law, *kept, f"rank {rank}")
        for row, other in zip(rows, runs[1].metrics[rank], strict=True):
            assert other["seconds"] == pytest.approx(row["seconds"], abs=1e-6), (
                f"{law}: rank {rank}, step {row['step']}"
            )
            assert other["loss"] is None
    assert_same_rows(law, runs[1].updates(), runs[0].updates(), "updates of servers")
    assert_same_rows(law, runs[1].spans.table.tolist(), runs[0].spans.table.tolist(), "spans")
    assert runs[0].info["result"] == runs[1].info["result"]
