"""A notebook's engines: started, one world, used for training, and ended without a trace."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import workbench as wb
from tests.forked import forked
from tests.own_algorithm import write_own_algorithm
from tests.waiting import within
from workbench.algorithms import PipeSGD, SynchronousSGD
from workbench.clusters import Cluster
from workbench.clusters.local.mpi_install import OPEN_MPI, find_mpi
from workbench.clusters.supervision.reaper import marked
from workbench.errors import ConfigError, Diverged, LaunchError, WorkbenchError
from workbench.problems.base import Problem

pytestmark = [pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.usefixtures("forked_starts")]

NUM_RANKS = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks that all tests of this file share; their connection files lie in a folder of the test's."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        cluster = Cluster(NUM_RANKS, quiet=True)
    yield cluster
    cluster.stop()
    assert marked(cluster.mark) == []
    assert os.listdir(cache / "workbench" / "clusters") == []


def rank_here() -> int:
    """This rank's number, from its launcher."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])


def plane(loss: Any = torch.nn.functional.mse_loss, num_samples: int = 64) -> Problem:
    """Least squares in three dimensions; `model` and data are made of this file's own code, which the ranks cannot import."""
    x = torch.linspace(-1, 1, 3 * num_samples, dtype=torch.float64).reshape(num_samples, 3).sin()
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64)
    return Problem(
        model=lambda: torch.nn.Linear(3, 1, dtype=torch.float64),
        loss=loss,
        train=(x, y),
        name="plane",
        batch_size=8,
        correct=None,
    )


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Takes 20 ms, so that a run of some steps can be seen running."""
    time.sleep(0.02)
    return torch.nn.functional.mse_loss(output, target)


# ---------------------------------------------------------------- one world


def test_engines_are_ranks_of_one_world(cluster: Cluster) -> None:
    assert [(rank["rank"], rank["size"]) for rank in cluster.ranks] == [(0, NUM_RANKS), (1, NUM_RANKS)]
    assert cluster.client.ids == [0, 1]
    assert len({rank["pid"] for rank in cluster.ranks} | {os.getpid()}) == NUM_RANKS + 1
    assert find_mpi().version in cluster.ranks[0]["library"]
    assert cluster.state == "ready"
    assert str(cluster.ranks[1]["pid"]) in cluster._repr_html_()


def test_engines_share_the_cores_and_leave_the_home_folder_alone(cluster: Cluster) -> None:
    seen = cluster.client[:].apply_sync(
        lambda: (__import__("os").environ["OMP_NUM_THREADS"], __import__("os").environ["IPYTHONDIR"])
    )
    assert [threads for threads, _ in seen] == ["1"] * NUM_RANKS  # what the test session asks for, on any machine
    assert all(cluster.id in folder for _, folder in seen)


def train_with_a_server(dedicated: bool) -> tuple[str, list[list[float]] | None]:
    import torch

    import workbench
    from workbench.runtimes.rank.main import world_here

    rank, num_ranks = world_here()
    algorithm = workbench.AsyncSGD(dedicated=dedicated)
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank not in algorithm.roles(num_ranks).computing:
        workbench.serve(model, optimizer, algorithm)
        return "served", None
    with workbench.Trainer(model, optimizer, algorithm) as trainer:
        for _ in range(3 + rank):
            trainer.step(lambda: model(torch.ones(2, 3)).square().mean())
    return f"{trainer.num_updates} updates", model.weight.tolist()


def test_a_loop_in_a_cell_has_parameter_servers(cluster: Cluster) -> None:
    (said, weights), (also, same) = cluster.client[:].apply_sync(train_with_a_server, False)
    assert said == also == "7 updates"
    assert weights == same
    (said, weights), other = cluster.client[:].apply_sync(train_with_a_server, True)
    assert (said, other) == ("3 updates", ("served", None))


# ---------------------------------------------------------------- training


def test_a_problem_defined_here_trains_there(cluster: Cluster, runs: Path) -> None:
    begin = time.monotonic()
    run = cluster.train(PipeSGD(width=2), plane(slow_loss), steps=30, lr=0.1, seed=3)
    assert time.monotonic() - begin < 2
    assert not run.done
    assert cluster.state == "training"
    assert run.wait(60) is run
    assert (run.done, run.status, cluster.state) == (True, "finished", "ready")
    assert run.folder.parent == runs.resolve()
    record = run.run
    assert [len(record.metrics[rank]) for rank in range(NUM_RANKS)] == [30, 30]
    losses = record.curve("steps", "loss")[1]
    assert losses[-1] < 0.5 * losses[0]
    assert (run.summary()["steps"], run.summary()["staleness_max"]) == (30, 1)
    assert set(run.overlap().step) == set(range(30))
    assert len(run.timeline(steps=slice(10, 12)).data) > 0
    assert len(run.curves(x="steps").data) > 0


def test_an_algorithm_of_the_users_file_trains_there(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    algorithm = wb.algorithms.get(f"{write_own_algorithm(tmp_path)}:WarmStart", warm_steps=4)
    run = cluster.train(algorithm, plane(), steps=3, lr=0.1).wait(60)
    assert (run.status, run.summary()["settings"]) == ("finished", {"warm_steps": 4})


def test_record_can_be_read_while_it_grows_and_stop_ends_all_ranks_at_one_step(cluster: Cluster, runs: Path) -> None:
    run = cluster.train(SynchronousSGD(), plane(slow_loss), steps=100_000)
    assert within(60, lambda: len(run.run.curve()[0]) > 5)
    early = len(run.run.curve()[0])
    assert within(5, lambda: len(run.run.curve()[0]) > early)
    assert "running, step" in repr(run)
    run.stop().wait(20)
    assert run.status == "stopped"
    ends = [rows[-1]["step"] for rows in run.run.metrics.values()]
    assert ends == [ends[0]] * NUM_RANKS


def test_a_second_training_is_refused_while_the_first_runs(cluster: Cluster, runs: Path) -> None:
    run = cluster.train(SynchronousSGD(), plane(slow_loss), steps=100_000)
    with pytest.raises(
        ConfigError, match=r"still trains: SynchronousSGD.*wait\(\) for it, stop\(\) it, or start a second Cluster"
    ):
        cluster.train(SynchronousSGD(), plane(), steps=1)
    assert len(list(runs.iterdir())) == 1
    run.stop().wait(20)


def test_an_interrupt_ends_the_waiting_and_not_the_training(cluster: Cluster, runs: Path) -> None:
    run = cluster.train(SynchronousSGD(), plane(slow_loss), steps=100_000)
    assert within(60, lambda: len(run.run.curve()[0]) > 1)
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt, match="the training continues"):
        run.wait(10)
    before = len(run.run.curve()[0])
    assert within(5, lambda: len(run.run.curve()[0]) > before)
    run.stop().wait(20)


# ---------------------------------------------------------------- failures


def test_one_ranks_error_comes_at_once_and_the_others_come_back(cluster: Cluster, runs: Path) -> None:
    def fails_on_rank_1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if rank_here() == 1 and output.mean().item() != 0.0:
            raise KeyError("the cat ate it")
        return slow_loss(output, target)

    run = cluster.train(SynchronousSGD(), plane(fails_on_rank_1), steps=1000)
    begin = time.monotonic()
    with pytest.raises(
        WorkbenchError,
        match=r"rank 1: problem plane: model and loss cannot take the batch .*KeyError: .*the cat ate it",
    ) as caught:
        run.wait(60)
    assert time.monotonic() - begin < 10
    assert "fails_on_rank_1" in caught.value.__notes__[0]
    assert within(5, lambda: run.done)
    assert run.status == "failed"
    assert "the cat ate it" in run.run.info["error"]
    assert cluster.train(SynchronousSGD(), plane(), steps=2).wait(30).status == "finished"


def test_a_loss_that_is_no_number_keeps_its_kind(cluster: Cluster, runs: Path) -> None:
    def not_a_number(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).mean() * float("nan")

    with pytest.raises(Diverged, match=r"rank [01]: "):
        cluster.train(SynchronousSGD(), plane(not_a_number), steps=10).wait(30)


@pytest.mark.parametrize(
    ("algorithm", "settings", "words"),
    [
        (SynchronousSGD(), {}, "either epochs"),
        (SynchronousSGD(), {"epoch": 3}, "did you mean epochs"),
        (SynchronousSGD, {"steps": 1}, r"call it: SynchronousSGD\(\)"),
    ],
)
def test_bad_input_is_refused_before_a_run_begins(
    cluster: Cluster, runs: Path, algorithm: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster.train(algorithm, plane(), **settings)
    assert not runs.exists()


def test_what_cannot_travel_is_refused_with_the_way_out(cluster: Cluster, runs: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent.*inside model= or train="):
        cluster.train(SynchronousSGD(), plane(lambda output, target: lock and output.mean()), steps=1)
    assert not runs.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"n": 0}, "whole number"), ({"n": 1000}, "at most"), ({"n": 2, "runtime": "nccl"}, "'mpi' or 'torch'")],
)
def test_a_cluster_that_cannot_be_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Cluster(**options)


# ---------------------------------------------------------------- starts that go wrong


def script(path: Path, body: str) -> Path:
    """A launcher that says it is the one mpi4py expects, and then does something else."""
    install = find_mpi()
    banner = (
        f"mpiexec (Open MPI) {install.version}"
        if install.name == OPEN_MPI
        else f"HYDRA build details:\n Version: {install.version}"
    )
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then printf "{banner}\\n"; exit; fi\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_ranks_that_each_believe_to_be_alone_are_explained(tmp_path: Path, no_process_left: None) -> None:
    alone = script(
        tmp_path / "mpiexec", 'while [ "$1" != -m ]; do last="$1"; shift; done; "$last" "$@" & "$last" "$@" & wait'
    )
    with pytest.raises(
        LaunchError,
        match=rf"(?s)2 ranks were started by {alone} .*each has a separate world.*mpi4py loads .*{find_mpi().version}",
    ):
        Cluster(2, mpi=alone, quiet=True)


def test_a_failing_launcher_is_quoted_at_once(tmp_path: Path, no_process_left: None) -> None:
    broken = script(tmp_path / "mpiexec", "echo there are not enough slots available; exit 1")
    begin = time.monotonic()
    with pytest.raises(
        LaunchError, match=r"(?s)ended before its 2 ranks were ready.*there are not enough slots available"
    ):
        Cluster(2, mpi=broken, quiet=True)
    assert time.monotonic() - begin < 15


def test_a_start_has_an_end(tmp_path: Path, no_process_left: None) -> None:
    idle = script(tmp_path / "mpiexec", "echo one moment; sleep 600")
    with pytest.raises(LaunchError, match=r"(?s)0 of 2 ranks were ready after 3 s.*one moment"):
        Cluster(2, mpi=idle, timeout_s=3, quiet=True)


# ---------------------------------------------------------------- ends


def test_a_killed_rank_is_reported_at_once_and_an_exception_in_the_block_leaves_nothing(
    runs: Path, no_process_left: None
) -> None:
    own = Cluster(NUM_RANKS, quiet=True)

    def cell() -> None:
        with own:
            run = own.train(SynchronousSGD(), plane(slow_loss), steps=100_000)
            assert within(60, lambda: len(run.run.curve()[0]) > 1)
            psutil.Process(own.ranks[1]["pid"]).kill()
            begin = time.monotonic()
            with pytest.raises(WorkbenchError, match="process is gone"):
                run.wait(30)
            assert time.monotonic() - begin < 5
            assert within(5, lambda: run.done and own.state == "lost")
            assert run.run.info["status"] == "failed"
            with pytest.raises(LaunchError, match=r"heal\(\) it, or start a new Cluster"):
                own.train(SynchronousSGD(), plane(), steps=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cell()
    assert own.state == "stopped"
    with pytest.raises(LaunchError, match="was stopped"):
        own.train(SynchronousSGD(), plane(), steps=1)


HOLDER = """
    import sys, time
    from pathlib import Path
    from workbench.clusters import Cluster
    cluster = Cluster({num_ranks})
    print(cluster.mark, flush=True)
    {then}
"""


@pytest.mark.parametrize(
    ("num_ranks", "then", "sign"),
    [
        (2, "time.sleep(600)", signal.SIGKILL),
        (1, "time.sleep(600)", signal.SIGTERM),
        (1, "raise SystemExit(3)", None),
        (1, "del cluster; time.sleep(600)", None),
    ],
    ids=["killed", "terminated", "left", "forgotten"],
)
def test_nothing_outlives_the_process_that_started_it(
    tmp_path: Path, no_process_left: None, num_ranks: int, then: str, sign: signal.Signals | None
) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    code = textwrap.dedent(HOLDER.format(num_ranks=num_ranks, then=then))
    # No handler sees a kill: all processes are new interpreters, as a user's
    begin = [sys.executable, "-c", code] if sign == signal.SIGKILL else forked("-c", code)
    holder = subprocess.Popen(begin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert holder.stdout is not None
    assert f"{num_ranks} rank" in holder.stdout.readline()
    mark = holder.stdout.readline().strip()
    try:
        if sign is not None:
            commands = [" ".join(process.cmdline()) for process in marked(mark)]
            for part in (
                " --mpi",
                "ipyparallel.controller",
                "prterun" if find_mpi().name == OPEN_MPI else "mpiexec",
            ):
                assert any(part in command for command in commands), f"{part} was not seen to run"
            holder.send_signal(sign)
        assert within(15, lambda: marked(mark) == [] and os.listdir(tmp_path / "workbench" / "clusters") == [])
        assert not (tmp_path / ".ipython").exists()
    finally:
        if "forgotten" in os.environ.get("PYTEST_CURRENT_TEST", ""):
            assert holder.poll() is None, "it was to be forgotten, not ended"
        holder.kill()
        _, said = holder.communicate()
    assert [
        line for line in said.splitlines() if not re.match(r"waiting \d+ s for \d ranks? to start", line)
    ] == []  # on a busy machine


def test_a_fork_does_not_end_its_parents_cluster(cluster: Cluster) -> None:
    child = os.fork()
    if child == 0:
        cluster.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert cluster.client[:].apply_sync(lambda: 1) == [1] * NUM_RANKS


def test_mpich_of_another_folder_serves_as_well(mpich: dict[str, str], runs: Path, no_process_left: None) -> None:
    folder = Path(mpich["MPI4PY_LIBMPI"]).parents[1]
    with Cluster(NUM_RANKS, mpi=folder, quiet=True) as own:
        assert "MPICH" in own.ranks[0]["library"]
        assert str(folder) in json.dumps(own.client[0].apply_sync(lambda: __import__("os").environ["MPI4PY_LIBMPI"]))
        assert own.train(SynchronousSGD(), plane(), steps=3).wait(60).status == "finished"


def test_an_own_model_with_a_metric_and_a_logger_trains(cluster: Cluster, runs: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [
        torch.utils.data.TensorDataset(
            torch.randn(size, 3, generator=generator), torch.randint(0, 4, (size,), generator=generator)
        )
        for size in (64, 16)
    ]

    def top_2(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.topk(2).indices == targets[:, None]).any(1).float().mean()

    mine = wb.Problem(
        model=lambda: torch.nn.Linear(3, 4),
        loss=torch.nn.functional.cross_entropy,
        train=torch.utils.data.DataLoader(data[0], shuffle=True, num_workers=1),
        test=data[1],
        metrics={"top_2": top_2},
    )
    run = cluster.train(wb.PipeSGD(width=2), mine, steps=50, callbacks=[wb.callbacks.TensorBoard()]).wait()
    model = run.model()
    inputs, targets = data[1].tensors
    expected = float(top_2(model(inputs), targets))
    assert run.run.evaluations()[-1]["top_2"] == pytest.approx(expected, abs=1e-6)
    assert list((run.folder / "tensorboard").glob("events.out.tfevents.*"))
    assert list(run.to_pandas("evaluations")["top_2"])[-1] == pytest.approx(expected, abs=1e-6)
