"""Hooks where they cannot work, and what they say of themselves; with real ranks: tests/distributed/test_ddp_hooks.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from tests.laws import tiny
from workbench.algorithms import LayerwiseSGD, SynchronousSGD
from workbench.clusters import Cluster
from workbench.codecs import ErrorFeedback, TopK, Truncate16
from workbench.collectives import Native, Once, PowerSGD, Ring
from workbench.errors import ConfigError, LaunchError
from workbench.gradients import build_layout
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.runtimes.user_loop.ddp_hook import ddp_hook
from workbench.runtimes.user_loop.torch_hook import HookBucket, TorchHook


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "method", [SynchronousSGD(collective=TorchHook(hook=allreduce_hook)), LayerwiseSGD(collective=TorchHook(hook=allreduce_hook))]
)
def test_a_torch_hook_is_refused_where_there_is_no_torch_distributed(method: Algorithm) -> None:
    with pytest.raises(ConfigError, match="needs runtime='torch'"):
        simulate(method, tiny.problem(), workers=2, steps=1)


@pytest.mark.usefixtures("group_of_one")
def test_a_torch_hook_is_refused_by_simulated_workers_beside_a_real_group() -> None:
    with pytest.raises(ConfigError, match="'torch', and this one is 'simulated'"):
        simulate(SynchronousSGD(collective=TorchHook(hook=allreduce_hook)), tiny.problem(), workers=1, steps=1)


@pytest.mark.parametrize("initialised", [False, True])
def test_a_torch_hook_does_not_speak_for_another_rank(initialised: bool, request: pytest.FixtureRequest) -> None:
    if initialised:
        request.getfixturevalue("group_of_one")
    program: Any = TorchHook(hook=allreduce_hook).all_reduce(SimpleNamespace(rank=1, num_workers=2), torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="and not rank 1 of 2: run it with runtime='torch'"):
        next(program)


def test_a_cluster_of_mpi_refuses_a_torch_hook_before_it_starts_anything() -> None:
    cluster = object.__new__(Cluster)
    cluster.runtime, cluster._engines = "mpi", SimpleNamespace(num_ranks=1)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="'torch', and this one is 'mpi'"):
        cluster.train(SynchronousSGD(collective=TorchHook(hook=allreduce_hook)), tiny.problem(), steps=1)


@pytest.mark.usefixtures("group_of_one")
def test_a_plain_tensor_is_not_given_to_a_hook() -> None:
    program: Any = TorchHook(hook=allreduce_hook).all_reduce(SimpleNamespace(rank=0, num_workers=1), torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="plain tensor"):
        next(program)


def test_a_torch_hook_says_what_it_is_without_addresses_and_does_not_guess_its_bytes() -> None:
    assert repr(TorchHook(hook=fp16_compress_hook)) == "TorchHook(hook=fp16_compress_hook)"
    assert (
        repr(TorchHook(hook=partial(allreduce_hook), state=SimpleNamespace())) == "TorchHook(hook=allreduce_hook(), state=SimpleNamespace)"
    )
    callable_object = type("Mine", (), {"__call__": lambda self, state, bucket: None})()
    assert repr(TorchHook(hook=callable_object)) == "TorchHook(hook=Mine)"
    layout = build_layout(tiny.mlp().named_parameters())
    assert math.isnan(SynchronousSGD(collective=TorchHook(hook=allreduce_hook)).bytes_per_step(0, 2, layout) or 0.0)
    with pytest.raises(ConfigError, match="lossy"):
        PowerSGD(inner=TorchHook(hook=allreduce_hook))
    with pytest.raises(ConfigError, match="default_hooks"):
        TorchHook(hook="fp16")  # type: ignore[arg-type]


def test_a_hook_sees_each_gradient_in_the_buffer_of_now_and_no_parameters() -> None:
    model = tiny.mlp()
    layout = build_layout(model.named_parameters(), bucket_bytes=200.0)
    piece = layout.buckets[1]
    body = torch.arange(float(piece.tail - piece.start))
    bucket = HookBucket(piece, body, is_last=False)
    assert bucket.index() == 1 and not bucket.is_last() and bucket.buffer() is body
    assert [tuple(view.shape) for view in bucket.gradients()] == [slot.shape for slot in piece.slots]
    assert torch.equal(torch.cat([view.reshape(-1) for view in bucket.gradients()]), body)
    bucket.gradients()[0].fill_(-1.0)
    assert body[0] == -1.0
    bucket.set_buffer(body.half())
    assert {view.dtype for view in bucket.gradients()} == {torch.float16}
    with pytest.raises(ConfigError, match="use it in DDP"):
        bucket.parameters()


def test_a_ddp_hook_wants_a_group() -> None:
    with pytest.raises(LaunchError, match="init_process_group"):
        ddp_hook()


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"collective": Native(), "codec": Truncate16()}, "Ring"),
        ({"codec": ErrorFeedback(codec=TopK(fraction=0.1))}, "Once"),
        ({"codec": "truncate16"}, r"Truncate16\(\)"),
        ({"collective": "ring"}, r"Ring\(\)"),
        ({"collective": TorchHook(hook=allreduce_hook)}, "register_comm_hook itself"),
        ({"collective": Once(codec=Truncate16()), "codec": Truncate16()}, "has a codec already"),
    ],
)
@pytest.mark.usefixtures("group_of_one")
def test_a_ddp_hook_refuses_what_does_not_go_together(options: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        ddp_hook(**options)


@pytest.mark.usefixtures("group_of_one")
def test_a_codec_goes_into_the_hops_of_a_ring_unless_another_collective_is_named() -> None:
    found = [ddp_hook(**options)[0] for options in ({}, {"codec": Truncate16()}, {"collective": Ring(chunks=2), "codec": Truncate16()})]  # type: ignore[arg-type]
    assert [state.collective for state in found] == [Native(), Ring(codec=Truncate16()), Ring(chunks=2, codec=Truncate16())]
    for state in found:
        state.close()
