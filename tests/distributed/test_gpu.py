"""Ranks on a GPU (`make gpu`): NCCL, CUDA tensors under an MPI that does not take them, a user's own loop, and codecs' kernels.

The staging itself is tested without a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.pool import shared_pool
from tests.unit.kernel_cases import CODECS, KINDS, check, values_of
from workbench import problems
from workbench.algorithms import DeAR, LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.codecs import Codec, Linear8, Truncate16, kernels
from workbench.costs import measure_compute
from workbench.program import Algorithm
from workbench.runtimes.transport.base import local_rank
from workbench.runtimes.user_loop.ddp_hook import ddp_hook
from workbench.runtimes.user_loop.trainer import Trainer
from workbench.trace import from_profiler
from workbench.trace.run import Run

COMMAND = (sys.executable, "-m", "workbench", "train")
ON_GPU = pytest.mark.gpu


@pytest.mark.mpi
def test_staged_tensors_are_summed_broadcast_and_exchanged() -> None:
    def stage() -> list[list[float]]:
        from workbench.runtimes.transport.base import Deadline
        from workbench.runtimes.transport.mpi import MpiTransport

        transport = MpiTransport(device=torch.device("cpu"))
        transport._staged = True  # as with CUDA tensors and a library that takes host memory only
        deadline = Deadline("the test", transport.peer_failure, 20)
        summed, shared, received = (
            torch.full((3,), transport.rank + 1.0),
            torch.full((2,), float(transport.rank)),
            torch.zeros(2),
        )
        hosts = []
        to_host = transport._to_host
        transport._to_host = lambda flat: hosts.append(to_host(flat)) or hosts[-1]  # type: ignore[method-assign, func-returns-value]
        transport.all_reduce(summed, deadline)
        transport.broadcast(shared, 1, deadline)
        peer = 1 - transport.rank
        sending = transport.start_send(peer, torch.full((2,), 10.0 + transport.rank), 5)
        transport.start_recv(peer, received, 5).wait(deadline)
        sending.wait(deadline)
        transport.close()
        assert all(host.data_ptr() not in {summed.data_ptr(), shared.data_ptr()} for host in hosts)
        return [summed.tolist(), shared.tolist(), received.tolist()]

    first, second = shared_pool("mpi", 2).run(stage)
    assert first == [[3.0, 3.0, 3.0], [1.0, 1.0], [11.0, 11.0]]
    assert second == [[3.0, 3.0, 3.0], [1.0, 1.0], [10.0, 10.0]]


@pytest.mark.parametrize("name", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"])
def test_the_local_rank_is_the_launchers(name: str) -> None:
    assert local_rank({name: "3"}) == 3
    assert local_rank({}) is None


def train(runtime: str, *words: str, workers: int = 1, steps: int = 30) -> Run:
    """Train by the command, on this machine's GPU if it has one, and load the run."""
    command = [*COMMAND, *words, "--runtime", runtime, "--workers", str(workers), "--steps", str(steps), "--seed", "3"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    return Run.load(json.loads(done.stdout)["folder"])


def losses_of(run: Run) -> list[float]:
    return [row["loss"] for row in run.metrics[0] if row.get("loss") is not None]


def model_of(run: Run) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = load_file(run.folder / "model.safetensors")
    return model


@ON_GPU
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("runtime", ["torch", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_a_gpu_rank_trains_and_says_what_it_did(runtime: str) -> None:
    run = train(runtime, "pipe-sgd")
    assert run.headers[0]["device"] == "cuda:0"
    assert any("asked for the work" in note for note in run.info["notes"])
    if runtime == "torch":
        assert "nccl" in run.info["library"]


@ON_GPU
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    "algorithm",
    [
        ("synchronous-sgd",),
        ("layerwise-sgd", "--set", "bucket_bytes=0"),
        ("pipe-sgd", "--set", "width=3", "--set", "lanes=2", "--set", "collective=Ring(codec=Truncate16())"),
        ("pipe-sgd", "--set", "collective=PowerSGD()"),
        ("dear",),
        ("adaptive-delay-sgd", "--set", "collective=Ring()"),
        ("partial-all-reduce",),
        ("async-sgd",),
        ("diloco",),
    ],
    ids=lambda words: "-".join(words).replace("--set-", ""),
)
def test_losses_on_a_gpu_are_those_of_a_cpu(algorithm: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the rounding of other kernels: a tail read too early would make updates of another size."""
    on_gpu = losses_of(train("torch", *algorithm))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_cpu = losses_of(train("torch", *algorithm))
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3), "losses a step on the GPU, and on the CPU"


@ON_GPU
@pytest.mark.mpi
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    "algorithm",
    [
        ("synchronous-sgd",),
        ("layerwise-sgd", "--set", "bucket_bytes=0"),
        ("pipe-sgd", "--set", "collective=Ring(codec=Linear8())"),
        ("pipe-sgd", "--set", "width=3", "--set", "collective=PowerSGD()"),
        ("dear",),
        ("local-sgd", "--set", "every=4"),
        ("streaming-diloco",),
    ],
    ids=lambda words: "-".join(words).replace("--set-", ""),
)
def test_ranks_that_share_a_gpu_give_the_losses_of_ranks_on_a_cpu(
    algorithm: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses two ranks on one GPU. MPI does not: its messages are copied through the host's memory."""
    shared = train("mpi", *algorithm, workers=2)
    assert [header["device"] for header in shared.headers.values()] == ["cuda:0", "cuda:0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    alone = train("mpi", *algorithm, workers=2)
    assert [header["device"] for header in alone.headers.values()] == ["cpu", "cpu"]
    assert losses_of(shared) == pytest.approx(losses_of(alone), rel=1e-3)


@ON_GPU
@pytest.mark.usefixtures("runs")
def test_more_ranks_than_gpus_compute_on_the_cpu_and_say_so() -> None:
    run = train("torch", "synchronous-sgd", workers=torch.cuda.device_count() + 1)
    assert {header["device"] for header in run.headers.values()} == {"cpu"}
    assert any("NCCL needs a GPU for each rank" in note for note in run.info["notes"])


@ON_GPU
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("algorithm", ["pipe-sgd", "async-sgd"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_on_a_gpu_is_near_single_precision(precision: str, algorithm: str) -> None:
    single, mixed = (losses_of(train("torch", algorithm, "--precision", word)) for word in ("fp32", precision))
    assert mixed != single
    assert mixed == pytest.approx(single, rel=0.05)


@ON_GPU
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("algorithm", ["pipe-sgd", "dear", "diloco"])
def test_a_run_on_a_gpu_that_was_resumed_is_unbroken(algorithm: str) -> None:
    first = train("torch", algorithm, "--checkpoint-every", "10", steps=20)
    resumed = train("torch", algorithm, "--checkpoint-every", "10", "--resume", first.folder.name)
    unbroken = train("torch", algorithm, "--checkpoint-every", "10")
    assert losses_of(resumed) == losses_of(unbroken)[-len(losses_of(resumed)) :]
    assert all(torch.equal(model_of(resumed)[name], values) for name, values in model_of(unbroken).items())


@pytest.fixture
def nccl() -> Iterator[torch.device]:
    """A group of one rank on NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


def small_model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


def batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(32, 64, generator=draw).to(device),
            torch.randint(0, 10, (32,), generator=draw).to(device),
        )
        for _ in range(12)
    ]


def plain_loop(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@ON_GPU
@pytest.mark.parametrize(
    "algorithm", [SynchronousSGD(), LayerwiseSGD(bucket_bytes=0), PipeSGD(width=1), DeAR()], ids=repr
)
def test_a_trainer_on_nccl_gives_the_weights_of_a_plain_loop(algorithm: Algorithm, nccl: torch.device) -> None:
    data = batches(nccl)
    expected = plain_loop(small_model(nccl), data)
    model = small_model(nccl)
    with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), algorithm) as trainer:
        for x, y in data:
            trainer.step(lambda x=x, y=y: cross_entropy(model(x), y))  # type: ignore[misc]
    for found, param in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), param)


@ON_GPU
def test_a_delayed_trainer_on_nccl_evaluates_saves_and_loads(nccl: torch.device, tmp_path: Path) -> None:
    data = batches(nccl)

    def begun() -> tuple[nn.Module, Trainer]:
        model = small_model(nccl)
        return model, Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), PipeSGD(width=3))

    model, trainer = begun()
    for number, (x, y) in enumerate(data):
        if number == 6:
            trainer.save(tmp_path)
            with trainer.evaluating():
                complete = [param.detach().clone() for param in model.parameters()]
            assert not torch.equal(complete[0], next(model.parameters())), "two updates are in flight"
        trainer.step(lambda x=x, y=y: cross_entropy(model(x), y))  # type: ignore[misc]
    trainer.finish()
    again, trainer = begun()
    assert trainer.load(tmp_path)[0] == 6
    for x, y in data[6:]:
        trainer.step(lambda x=x, y=y: cross_entropy(again(x), y))  # type: ignore[misc]
    trainer.finish()
    assert all(map(torch.equal, again.parameters(), model.parameters()))


@ON_GPU
@pytest.mark.parametrize("codec", [None, Truncate16(), Linear8()], ids=repr)
def test_a_hook_of_ddp_on_nccl_trains_as_ddp_does(codec: Codec | None, nccl: torch.device) -> None:
    """One rank's mean is its own gradient, which a codec rounds."""
    data = batches(nccl)
    expected = plain_loop(DistributedDataParallel(small_model(nccl)), data)
    model = DistributedDataParallel(small_model(nccl), bucket_cap_mb=0.01)
    model.register_comm_hook(*ddp_hook(codec=codec))
    for found, param in zip(plain_loop(model, data), expected, strict=True):
        if codec is None:
            torch.testing.assert_close(found, param)
        else:
            torch.testing.assert_close(found, param, rtol=0.05, atol=0.01)


@ON_GPU
def test_a_profile_of_a_gpu_has_the_times_of_its_kernels(nccl: torch.device, tmp_path: Path) -> None:
    from torch.profiler import profile

    model = DistributedDataParallel(small_model(nccl))
    plain_loop(model, batches(nccl)[:2])  # kernels are loaded when they are first used
    with profile(acc_events=True) as recorded:
        plain_loop(model, batches(nccl)[:2])
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(tmp_path / "rank0.json"))
    spans = from_profiler(tmp_path / "rank0.json").spans
    assert {"forward", "backward", "apply"} <= set(spans.kind_names)


@ON_GPU
def test_compute_is_measured_by_the_gpus_own_clock() -> None:
    on_gpu = measure_compute(problems.get("digits-mlp"), device="cuda", steps=5)
    assert 0 < on_gpu.forward_s < 0.1 and 0 < on_gpu.backward_s < 0.1 and 0 < on_gpu.update_s < 0.1


@ON_GPU
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_kernels_give_the_bits_of_a_processor_and_allocate_nothing(codec: Codec) -> None:
    """`workbench bench codecs` measures their speed."""
    pytest.importorskip("triton", reason="no Triton: codecs take torch's operations on the GPU")
    device = torch.device("cuda")
    for kind in KINDS:
        for numel, offset in ((0, 0), (1, 0), (4099, 0), (100_003, 3), (1 << 20, 0)):
            check(codec, kind, numel, device, offset)
    values = values_of("plain", 1 << 20, 0).to(device)
    assert kernels.of(values) is not None, "torch's operations gave these bits"
    wire, out, total = codec.encode(values), torch.empty_like(values), values.clone()
    again, before = torch.empty_like(wire), torch.cuda.memory_stats()["allocation.all.allocated"]
    codec.encode_into(values, wire)
    codec.decode_into(wire, out)
    codec.add(wire, total)
    codec.encode_sum(wire, total, again)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
