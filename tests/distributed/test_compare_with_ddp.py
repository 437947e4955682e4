"""Our algorithms and torch DDP on real ranks: equal parameters, and a group that is destroyed at the end."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import workbench as wb
from tests.distributed.pool import shared_pool
from workbench.calibration.probe import probe_here
from workbench.papers.studies.compare_with_ddp import DDP, HOOKED, compare_with_ddp

OURS = {
    "synchronous": wb.SynchronousSGD(),
    "layer-wise": wb.LayerwiseSGD(bucket_bytes=4096),
    "AGD 1": wb.DelayedSGD(delay=1),
}


def on_rank(store: str) -> dict[str, object]:
    was = dist.is_initialized()
    found = compare_with_ddp(
        wb.problems.get("digits-mlp"), OURS, store=store, bucket_bytes=4096, rounds=2, block=2, batch_size=8
    )
    return {**found, "left": dist.is_initialized() == was}


@pytest.mark.parametrize("runtime", ["torch", "mpi"])
def test_same_parameters_and_times_of_all(runtime: str, tmp_path: Path) -> None:
    first, second = shared_pool(runtime, 2, compiler=True).run(partial(on_rank, str(tmp_path / "store")))  # type: ignore[arg-type]
    assert first["left"]
    assert first["seconds"] == second["seconds"]
    assert set(first["seconds"]) == {DDP, HOOKED, *OURS}
    assert first["moved"] > 1e-3, "nothing was trained: equal parameters would say nothing"
    assert max(first["off"][name] for name in (HOOKED, "synchronous", "layer-wise")) < 1e-5
    assert first["off"]["AGD 1"] > 1e-4, "a late gradient is another one"


def test_probe_in_a_world_that_is_there() -> None:
    first, second = shared_pool("torch", 2, compiler=True).run(probe_here)
    assert first.num_workers == 2
    assert [size for size, _ in first.sums] == [size for size, _ in second.sums]
    assert min(seconds for _, seconds in first.sums) > 0
