"""No call of a `Trainer` waits for ever: every algorithm evaluates, saves and finishes after an odd number of steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.variants import name_of, representatives, variants
from workbench.algorithms import DeAR, SlowMo
from workbench.errors import WorkbenchError
from workbench.program import Algorithm, Replicas
from workbench.runtimes.user_loop.trainer import Trainer, serve

NUM_STEPS = 3
TIMEOUT_S = 20.0


def use_every_call(algorithm: Algorithm, folder: str) -> dict[str, Any]:
    """Train three steps; evaluate after the first and the last, save, and finish."""
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    torch.manual_seed(0)
    model = tiny.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    begin = time.perf_counter()
    if rank not in algorithm.roles(num_ranks).computing:
        serve(model, optimizer, algorithm, timeout_s=TIMEOUT_S)
        return {"seconds": time.perf_counter() - begin}
    x, y = tiny.data(200)

    def weights() -> torch.Tensor:
        return parameters_to_vector(model.parameters()).detach().clone()

    evaluated, unchanged, complete = [], [], []
    with Trainer(model, optimizer, algorithm, timeout_s=TIMEOUT_S) as trainer:
        for step in range(NUM_STEPS):
            part = slice(4 * (num_ranks * step + rank), 4 * (num_ranks * step + rank + 1))
            trainer.step(lambda part=part: nn.functional.cross_entropy(model(x[part]), y[part]))
            if step == 1:
                trainer.save(folder)
                continue
            before = weights()
            with trainer.evaluating():
                evaluated.append(weights())
            unchanged.append(torch.equal(before, weights()))
            complete.append(torch.equal(before, evaluated[-1]))
    return {
        "seconds": time.perf_counter() - begin,
        "evaluated": evaluated,
        "unchanged": all(unchanged),
        "complete": all(complete),
        "end": weights(),
    }


def try_all(algorithms: list[Algorithm], folder: str) -> list[dict[str, Any] | str]:
    """What every algorithm does; the text of its error if it fails."""
    rows: list[dict[str, Any] | str] = []
    for number, algorithm in enumerate(algorithms):
        try:
            rows.append(use_every_call(algorithm, f"{folder}/{number}"))
        except WorkbenchError as error:
            rows.append(f"{type(error).__name__}: {error}")
    return rows


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_algorithm_evaluates_saves_and_finishes(num_ranks: int, tmp_path: Path) -> None:
    """What an evaluation shows is what `finish` leaves; each call takes a fraction of its time-out."""
    algorithms = variants(3) if num_ranks == 3 else list(representatives(num_ranks))
    algorithms.append(SlowMo(every=2, inner=DeAR()))
    found = shared_pool("torch", num_ranks, compiler=True).run(try_all, algorithms, str(tmp_path), timeout_s=380)
    for rank, rows in enumerate(found):
        for algorithm, row, first in zip(algorithms, rows, found[0], strict=True):
            case = f"{name_of(algorithm)} on rank {rank}"
            assert isinstance(row, dict), f"{case}: {row}"
            assert row["seconds"] < TIMEOUT_S / 2, f"{case}: {row['seconds']:.1f} s"
            if "end" not in row:
                continue
            assert row["unchanged"], f"{case}: the block changed the parameters"
            assert row["complete"] or not algorithm.complete_after_step, f"{case}: updates are in flight"
            if not algorithm.requires.servers:
                assert torch.equal(row["evaluated"][-1], row["end"]), case
            if algorithm.replicas != Replicas.NEVER:
                assert isinstance(first, dict)
                assert torch.equal(row["end"], first["end"]), case
