"""Ranks under a real Slurm: a controller and two nodes, each on a host of an emulated network."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.slurm_world import SlurmWorld, send_by_value

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.timeout(180)]
send_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmWorld]:
    """One Slurm for all tests of this file."""
    world = SlurmWorld(tmp_path_factory.mktemp("slurm"))
    yield world
    left = world.jobs()
    world.close()
    assert left == []


def train_on_two_nodes(runs: str) -> dict[str, Any]:
    os.environ["WORKBENCH_RUNS"] = runs
    from workbench.algorithms import SynchronousSGD
    from workbench.clusters import Cluster
    from workbench.clusters.slurm_queue import ask
    from workbench.problems import digits_mlp

    words = "slurm:partition=debug,account=physics,time=00:30:00,nodes=2,gpus-per-task=1"
    with Cluster(4, launcher=words, quiet=True) as cluster:
        job = ask("squeue", "-h", "-o", "%i").split()
        seen: dict[str, Any] = {"ids": cluster.client.ids, "ranks": cluster.ranks, "jobs": job}
        seen["shown"] = ask("scontrol", "show", "job", job[0])
        seen["gpus"] = cluster.client[:].apply_sync(lambda: __import__("os").environ["CUDA_VISIBLE_DEVICES"])
        seen["local"] = cluster.client[:].apply_sync(lambda: __import__("workbench.runtimes.transport").runtimes.transport.local_rank())
        run = cluster.train(SynchronousSGD(), digits_mlp(), steps=5).wait(60)
        seen["run"] = (run.status, [len(rows) for rows in run.run.metrics.values()])
    seen["left"] = ask("squeue", "-h", "-o", "%i").split()
    return seen


def test_ranks_on_two_nodes_are_one_world_and_train(world: SlurmWorld, tmp_path: Path) -> None:
    seen = world.call(train_on_two_nodes, str(tmp_path))
    assert seen["ids"] == [0, 1, 2, 3]
    assert [(rank["rank"], rank["size"], rank["host"]) for rank in seen["ranks"]] == [
        (0, 4, "host1"),
        (1, 4, "host1"),
        (2, 4, "host2"),
        (3, 4, "host2"),
    ]
    assert len(seen["jobs"]) == 1 and seen["left"] == []
    for words in ("Partition=debug", "Account=physics", "TimeLimit=00:30:00", "NumNodes=2", "NumTasks=4", "gres:gpu:1"):
        assert words in seen["shown"]
    assert seen["gpus"] == ["0,1"] * 4
    assert seen["local"] == [0, 1, 0, 1]
    assert seen["run"] == ("finished", [5, 5, 5, 5])
