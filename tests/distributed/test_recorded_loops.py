"""`record` and `workbench record` on ranks: plain loops of torch's DDP, and loops that communicate themselves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.pool import fork_server, shared_pool
from tests.forked import forked
from workbench.errors import PeerFailed
from workbench.runtimes.user_loop.record import record
from workbench.trace import Run, list_runs

STEPS, WIDTH, BUCKET_MB = 5, 256, 0.5

Change = Callable[[DistributedDataParallel], object]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def inputs(step: int) -> Tensor:
    """A batch of this rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(256, WIDTH, generator=generator)


def in_ddp(recording: AbstractContextManager[Any], change: Change = int, accumulate: int = 1, **ddp: Any) -> Tensor:
    """Parameters after some steps of DDP."""
    model = DistributedDataParallel(network(), **{"bucket_cap_mb": BUCKET_MB, **ddp})
    if change is not int:
        change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recording:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(accumulate):
                with nullcontext() if part == accumulate - 1 else model.no_sync():
                    model(inputs(step + part)).square().mean().backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def power_sgd(model: DistributedDataParallel) -> None:
    # Its callbacks wait on gloo's two threads: with two buckets they may wait for each other, with and without a record
    model.register_comm_hook(PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook)


def both(folder: Path, change: Change = int, **how: Any) -> tuple[bool, str]:
    """Train without a record and with one. Return whether the parameters are equal, and the run's folder."""
    plain = in_ddp(nullcontext(), change, **how)
    recording = record(folder)
    return torch.equal(in_ddp(recording, change, **how), plain), str(recording.folder)


def run_of(results: list[Any]) -> Run:
    """The run of all ranks, which were bit-identical to those without a record."""
    assert [equal for equal, _ in results] == [True] * len(results)
    (folder,) = {folder for _, folder in results}
    run = Run.load(folder)
    assert run.info["status"] == "finished"
    assert sorted(run.metrics) == list(range(len(results)))
    return run


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("how", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_ddp_is_recorded_and_its_weights_are_bit_identical(
    tmp_path: Path, num_ranks: int, how: dict[str, bool]
) -> None:
    """Also on three ranks, where a division by the number of ranks rounds."""
    run = run_of(shared_pool("torch", num_ranks, compiler=True).run(lambda: both(tmp_path / "run", **how)))
    assert run.label == "torch DDP"
    assert run.info["runtime"] == "torch.distributed gloo"
    assert run.info["model"]["parameters"] == 6 * WIDTH * (WIDTH + 1)
    spans = run.spans
    for rank in range(num_ranks):
        mine = spans.of_rank(rank)
        for step in range(1, STEPS):  # DDP makes other buckets after the first step
            one = mine.select(steps=slice(step, step + 1))
            sums, backward = (one.select(kinds=[kind]).table for kind in ("all_reduce", "backward"))
            assert sums["bucket"].tolist() == list(range(len(sums)))
            assert len(sums) > 2
            begin_s, end_s = backward["start_s"].min(), backward["end_s"].max()
            assert (sums["start_s"] > begin_s).all()
            assert (sums["end_s"] < end_s + 1e-3).all(), "DDP waits for them"
            first = sums[0]
            computing = backward[0]
            assert first["start_s"] < computing["end_s"], "the first bucket is sent while backward computes"
            share = 2 * (num_ranks - 1) / num_ranks
            assert sums["bytes"].sum() == pytest.approx(share * 4 * 6 * WIDTH * (WIDTH + 1), abs=len(sums))
    found = run.overlap(slice(1, None))
    assert found.fraction is not None and found.fraction > 0
    assert np.allclose(found.window_s, found.compute_s + found.exposed_s + found.idle_s)
    assert set(run.critical_path().kind_names) >= {"forward", "backward"}
    run.timeline()


def test_a_recorded_step_has_these_spans(tmp_path: Path) -> None:
    """All but waits, which depend on the time, and divide backward."""
    run = run_of(shared_pool("torch", 2, compiler=True).run(lambda: both(tmp_path / "run", accumulate=2)))
    all_bytes = 4 * 6 * WIDTH * (WIDTH + 1)
    for rank in range(2):
        spans = run.spans.of_rank(rank)
        for step in range(STEPS):
            mine = spans.select(steps=slice(step, step + 1))
            sums = mine.select(kinds=["all_reduce"]).table
            assert sums["bucket"].tolist() == list(range(1 if step == 0 else 3)), "DDP makes smaller buckets later"
            assert sums["bytes"].sum() == all_bytes
            assert set(sums["peer"].tolist()) == {-1}
            kinds = [kind for kind in mine.kind_names.tolist() if kind in ("forward", "apply")]
            assert kinds == ["forward", "forward", "apply"]
            assert run.metrics[rank][step]["bytes_sent"] == spans.select(steps=slice(step + 1)).table["bytes"].sum()


def test_all_ranks_of_a_machine_are_on_one_clock(tmp_path: Path) -> None:
    """The same all-reduce ends at about the same time on both ranks, though their recordings began 0.2 s apart."""

    def late() -> tuple[bool, str]:
        time.sleep(0.2 * dist.get_rank())
        return both(tmp_path / "run")

    spans = run_of(shared_pool("torch", 2, compiler=True).run(late)).spans.select(kinds=["all_reduce"])
    one, other = (spans.of_rank(rank).table for rank in range(2))
    latest_start = np.maximum(one["start_s"], other["start_s"])
    assert (np.minimum(one["end_s"], other["end_s"]) > latest_start - 1e-4).all(), "no sum ends before all have begun"


def test_ranks_of_other_clocks_compare_them(tmp_path: Path) -> None:
    """The origins of the recordings are 0.2 s apart. Without the comparison of clocks, no sum would have met."""

    def elsewhere() -> tuple[bool, str]:
        from workbench.runtimes.transport import base as module

        clock, module.name_of_clock = module.name_of_clock, lambda: ""
        try:
            time.sleep(0.2 * dist.get_rank())
            return both(tmp_path / "run")
        finally:
            module.name_of_clock = clock

    run = run_of(shared_pool("torch", 2, compiler=True).run(elsewhere))
    assert len((tmp_path / "run" / "trace-00001.jsonl").read_text().split('"clock"')) == 3, (
        "at the begin and at the end"
    )
    one, other = (run.spans.of_rank(rank).select(kinds=["all_reduce"]).table for rank in range(2))
    assert (np.minimum(one["end_s"], other["end_s"]) > np.maximum(one["start_s"], other["start_s"]) - 5e-3).all()


def test_a_rank_that_waits_for_another_does_not_compute_meanwhile(tmp_path: Path) -> None:
    late_s = 1.0  # on a busy machine rank 0 itself may be late by some tenths

    def late() -> str:
        model = DistributedDataParallel(network(), bucket_cap_mb=BUCKET_MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(tmp_path / "run") as recording:
            for step in range(4):
                optimizer.zero_grad()
                loss = model(inputs(step)).square().mean()
                if step == 2 and dist.get_rank() == 1:
                    time.sleep(late_s)
                loss.backward()
                optimizer.step()
        return str(recording.folder)

    run = Run.load(shared_pool("torch", 2, compiler=True).run(late)[0])
    one = run.spans.of_rank(0).select(steps=slice(2, 3))
    waits = one.select(kinds=["wait"]).table
    assert (waits["end_s"] - waits["start_s"]).max() > 0.5 * late_s
    wakes_s = run.spans.of_rank(1).select(steps=slice(2, 3), kinds=["backward"]).table["start_s"].min()
    assert waits["end_s"].max() > wakes_s
    exposed_s = run.overlap(slice(2, 3)).of_rank(0).exposed_s
    assert 0.5 * late_s < exposed_s[0]
    assert run.critical_path(slice(2, 3)).per_rank()[1] > 0.5, "the late rank determines the step"


def test_sums_of_communication_hooks_are_recorded(tmp_path: Path) -> None:
    run = run_of(
        shared_pool("torch", 2, compiler=True).run(lambda: both(tmp_path / "run", power_sgd, bucket_cap_mb=25))
    )
    sums = run.spans.of_rank(0).select(kinds=["all_reduce"])
    whole, compressed = (sums.select(steps=slice(step, step + 1)).table["bytes"].sum() for step in (1, STEPS - 1))
    assert 0 < compressed < 0.1 * whole


def test_accumulation_without_sync_communicates_once_a_step(tmp_path: Path) -> None:
    run = run_of(shared_pool("torch", 2, compiler=True).run(lambda: both(tmp_path / "run", accumulate=3)))
    one = run.spans.of_rank(0).select(steps=slice(2, 3))
    backward, sums = (one.select(kinds=[kind]).table for kind in ("backward", "all_reduce"))
    assert len(one.select(kinds=["forward"]).table) == 3
    assert (sums["start_s"] > backward["start_s"][2]).all()
    assert len(run.metrics[0]) == STEPS


def own_loop(recording: AbstractContextManager[Any]) -> Tensor:
    """A loop that sums gradients itself: half of them one by one, the others in the background."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    with recording:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(inputs(step)).square().mean().backward()
            works = []
            for number, param in enumerate(parameters):
                assert param.grad is not None
                param.grad /= dist.get_world_size()
                work = dist.all_reduce(param.grad, async_op=number % 2 == 0)
                works += [work] if work is not None else []
            for work in works:
                work.wait()
            optimizer.step()
            with torch.inference_mode():
                dist.broadcast(torch.ones(4), 0)
    return nn.utils.parameters_to_vector(parameters).detach()


def test_a_loop_that_sums_gradients_itself(tmp_path: Path) -> None:
    def run() -> tuple[bool, str]:
        plain, recording = own_loop(nullcontext()), record(tmp_path / "run")
        return torch.equal(own_loop(recording), plain), str(recording.folder)

    found = run_of(shared_pool("torch", 2, compiler=True).run(run))
    one = found.spans.of_rank(1).select(steps=slice(2, 3))
    sums, backward = (one.select(kinds=[kind]).table for kind in ("all_reduce", "backward"))
    assert sums["bucket"].tolist() == list(range(12))
    assert sums["start_s"].min() >= backward["end_s"].max() - 1e-6
    assert one.select(kinds=["broadcast"]).table["bytes"].tolist() == [0], "rank 0 sends it"
    assert len(one.select(kinds=["wait"]).table) > 0
    overlap = found.overlap(slice(1, STEPS))
    assert (overlap.exposed_s > 0).all()
    assert overlap.fraction == pytest.approx(0, abs=0.05), "nothing is computed meanwhile"


def test_messages_are_paired(tmp_path: Path) -> None:
    def gossip() -> tuple[bool, str]:
        weight = nn.Parameter(torch.ones(1000))
        optimizer, other = torch.optim.SGD([weight], lr=0.1), 1 - dist.get_rank()
        with record(tmp_path / "run") as recording:
            for _ in range(3):
                weight.square().sum().backward()
                optimizer.step()
                received = torch.empty(1000)
                works = [dist.isend(weight.detach().clone(), other), dist.irecv(received, other)]
                for work in works:
                    assert work is not None
                    work.wait()
        return True, str(recording.folder)

    run = run_of(shared_pool("torch", 2, compiler=True).run(gossip))
    sent, received = run.messages
    assert len(sent) == len(received) == 6
    assert (run.spans.table["bytes"][sent] == 4000).all()
    assert (run.spans.table["rank"][sent] == run.spans.table["peer"][received]).all()


def test_the_failure_of_one_rank_is_in_the_record(tmp_path: Path) -> None:
    def fail() -> str:
        recording = record(tmp_path / "run", timeout_s=60)
        try:
            model = DistributedDataParallel(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with recording:
                for step in range(2):
                    optimizer.zero_grad()
                    model(inputs(step)).mean().backward()
                    optimizer.step()
                if dist.get_rank() == 1:
                    raise ZeroDivisionError("on rank 1")
        except (ZeroDivisionError, PeerFailed):
            pass
        return str(recording.folder)

    folder = shared_pool("torch", 2, compiler=True).run(fail)[0]
    run = Run.load(folder)
    assert run.info["status"] == "failed"
    assert "rank 1 failed at step 2: ZeroDivisionError: on rank 1" in run.failure_summary
    assert [len(rows) for rows in run.metrics.values()] == [2, 2]


@pytest.mark.mpi
def test_a_loop_of_mpi4py_names_its_communication(tmp_path: Path) -> None:
    def run() -> str:
        from mpi4py import MPI

        weight = nn.Parameter(torch.ones(500))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with record(tmp_path / "run") as recording:
            for _ in range(3):
                optimizer.zero_grad()
                (weight.square().sum() * (1 + recording.rank)).backward()
                assert weight.grad is not None
                mine = weight.grad.numpy()
                with recording.span("all_reduce", num_bytes=mine.nbytes):
                    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, mine)
                optimizer.step()
        return str(recording.folder)

    found = Run.load(shared_pool("mpi", 2).run(run)[0])
    assert (found.info["status"], sorted(found.metrics)) == ("finished", [0, 1])
    for rank in range(2):
        sums = found.spans.of_rank(rank).select(kinds=["all_reduce"]).table
        assert sums["bytes"].tolist() == [2000] * 3
        assert sums["step"].tolist() == [0, 1, 2]


# -- the command -----------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def main():
    if "RANK" not in os.environ:  # under mpiexec
        os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
        os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    for x, y in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if len(sys.argv) > 1 and optimizer.state_dict()["param_groups"][0].setdefault("steps", 0) == 0:
            if dist.get_rank() == 1 and y.min() > 0:
                raise ZeroDivisionError("in the script")
    if dist.get_rank() == 0:
        print("weights", nn.utils.parameters_to_vector(model.parameters()).double().sum().item().hex())
    del model, optimizer
    time.sleep(0.2)  # torch's gloo threads may abort a process that ends at once after a sum
    dist.destroy_process_group()

main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SCRIPT)
    return tmp_path / "mine.py"


def command(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*arguments], capture_output=True, text=True, timeout=100, env={**os.environ, **(env or {})})


RECORD = ("-m", "workbench", "record", "--name", "baseline", "--")
RUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TORCHRUN = (sys.executable, *RUN)


def weights(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("weights ")]
    return line


def test_a_script_under_torchrun_is_recorded_without_a_change(runs: Path, script: Path) -> None:
    done = command(*forked(*RECORD, *TORCHRUN, str(script)))
    python = fork_server(compiler=True).python
    plain = command(python, *RUN, "--no-python", python, "-m", "mine", env={"PYTHONPATH": str(script.parent)})
    assert weights(done) == weights(plain)
    (stored,) = list_runs()
    run = Run.load(stored.folder)
    assert (run.label, run.info["status"], run.info["problem"]["name"]) == ("baseline", "finished", "mine")
    assert [len(run.metrics[rank]) for rank in (0, 1)] == [8, 8]
    assert {"load", "forward", "backward", "all_reduce", "apply"} <= set(run.spans.kind_names.tolist())
    assert "Exposed communication is " in done.stdout
    assert str(run.folder) in done.stdout
    for words in ("forward", "backward", "apply", "other"):
        assert words in done.stdout


@pytest.mark.mpi
def test_gloo_ranks_under_mpiexec_are_one_run(runs: Path, script: Path) -> None:
    from workbench.clusters.local.mpi_install import find_mpi, mpiexec_command

    argv, env = mpiexec_command(find_mpi(), 2, [sys.executable, str(script)])
    done = command(*forked(*RECORD, *argv), env={**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    assert weights(done)
    (stored,) = list_runs()
    run = Run.load(stored.folder)
    assert [len(run.metrics[rank]) for rank in (0, 1)] == [8, 8]
    assert run.info["status"] == "finished"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_script_that_fails_leaves_its_record_and_its_status(runs: Path, script: Path) -> None:
    done = command(*forked(*RECORD, *TORCHRUN, str(script), "fails"))
    assert done.returncode == 1
    assert "ZeroDivisionError: in the script" in done.stderr
    (stored,) = list_runs()
    run = Run.load(stored.folder)
    assert "ZeroDivisionError: in the script" in run.failure_summary
    assert run.metrics[1]


def test_processes_that_do_not_train_write_nothing(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the sitecustomize of the environment')")
    done = command(sys.executable, *RECORD, sys.executable, "-c", "print('done')", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    *lines, said = done.stdout.splitlines()  # of the command itself and of the process that it starts, in either order
    assert sorted(lines) == ["done", *["the sitecustomize of the environment"] * 2]
    assert "nothing was recorded" in said
    assert len(list_runs()) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a command after --"),
        (("--steps", "0", "--", "true"), "--steps 0: give the number of steps"),
        (("--", "no-such-program"), "no-such-program cannot be started"),
    ],
)
def test_bad_calls_of_the_command(runs: Path, arguments: tuple[str, ...], message: str) -> None:
    done = command(*forked("-m", "workbench", "record", *arguments))
    assert done.returncode == 2
    assert message in done.stderr
