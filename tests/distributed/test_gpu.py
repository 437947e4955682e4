"""GPU ranks: NCCL, CUDA tensors under an MPI that does not take them, and codecs' kernels. The staging itself is tested without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.distributed.pool import shared_pool
from tests.unit.kernel_cases import CODECS, KINDS, check, values_of
from workbench.codecs import Codec, gpu
from workbench.runtimes.transport.base import local_rank

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


def train(runtime: str, *algorithm: str) -> dict[str, Any]:
    words = [
        *(algorithm or ("pipe-sgd",)),
        "--runtime",
        runtime,
        "--workers",
        "1",
        "--steps",
        "30",
        "--seed",
        "3",
        "--json",
    ]
    command = [sys.executable, "-m", "workbench", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@ON_GPU
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("runtime", ["torch", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_a_gpu_rank_trains_and_says_what_it_did(runtime: str) -> None:
    from workbench.trace.run import Run

    run = Run.load(train(runtime)["folder"])
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
        ("adaptive-delay-sgd",),
        ("partial-all-reduce",),
        ("async-sgd",),
        ("diloco",),
    ],
    ids=lambda words: "-".join(words).replace("--set-", ""),
)
def test_losses_on_a_gpu_are_those_of_a_cpu(algorithm: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the rounding of other kernels: a tail read too early would make updates of another size."""
    from workbench.trace.run import Run

    losses = []
    for visible in (None, ""):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        losses.append(
            [
                row["loss"]
                for row in Run.load(train("torch", *algorithm)["folder"]).metrics[0]
                if row.get("loss") is not None
            ]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-3), "losses a step on the GPU, and on the CPU"


@ON_GPU
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_kernels_give_the_bits_of_a_processor_and_allocate_nothing(codec: Codec) -> None:
    """How fast they are is told by `workbench bench codecs`."""
    pytest.importorskip("triton", reason="no Triton: codecs take torch's operations on the GPU")
    device = torch.device("cuda")
    for kind in KINDS:
        for numel, offset in ((0, 0), (1, 0), (4099, 0), (100_003, 3), (1 << 20, 0)):
            check(codec, kind, numel, device, offset)
    values = values_of("plain", 1 << 20, 0).to(device)
    assert gpu.kernels(values) is not None, "torch's operations gave these bits"
    wire, out, total = codec.encode(values), torch.empty_like(values), values.clone()
    again, before = torch.empty_like(wire), torch.cuda.memory_stats()["allocation.all.allocated"]
    codec.encode_into(values, wire)
    codec.decode_into(wire, out)
    codec.add(wire, total)
    codec.encode_sum(wire, total, again)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
