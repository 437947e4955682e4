"""Collectives as communication hooks of torch's DDP, on gloo ranks."""

from __future__ import annotations

import contextlib
import gc
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from tests.distributed.killing import die
from tests.distributed.pool import RankPool, shared_pool
from tests.laws import tiny
from tests.laws.train import assert_same, relative_error
from tests.waiting import within
from workbench.codecs import QSGD, ErrorFeedback, Linear8, SharedInt8, Sign, TopK, Truncate16
from workbench.collectives import (
    Auto,
    Collective,
    Direct,
    HalvingDoubling,
    Hierarchical,
    Linear,
    Native,
    Once,
    PowerSGD,
    Ring,
    Tree,
)
from workbench.errors import ConfigError
from workbench.ops import Local, Program
from workbench.runtimes.execution.tasks import TaskHandle
from workbench.runtimes.liveness import failure_detector
from workbench.runtimes.transport import torch_distributed
from workbench.runtimes.user_loop.ddp_hook import ddp_hook

SMALL_MB = 0.0003  # cuts the tiny model's six tensors into two buckets, otherwise before and after the first step
STEPS = 8

Hook = tuple[Any, Callable[..., Any]]  # what register_comm_hook takes


def flat(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def wrapped(
    model: nn.Module, hook: Hook | None, bucket_mb: float = SMALL_MB, group: Any = None
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, process_group=group)
    if hook is not None:
        ddp.register_comm_hook(*hook)
    return ddp


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return tiny.mlp().to(dtype)


def in_ddp(
    hook: Hook | None,
    *,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    bucket_mb: float = SMALL_MB,
    group: Any = None,
) -> list[Tensor]:
    """Parameters after each step of DDP with momentum, each rank on samples of its own."""
    model = wrapped(mlp(dtype), hook, bucket_mb, group)
    optimizer = tiny.momentum(model.parameters())
    x, y = tiny.data(40, dtype=dtype)
    mine = slice(dist.get_rank(group), None, dist.get_world_size(group))
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        seen.append(flat(model))
    return seen


def one_gradient(hook: Hook | None, matrix: Tensor, bucket_mb: float = 25.0) -> Callable[[Tensor], Tensor]:
    """A function: this rank's gradient of one parameter -> what DDP makes of it, in one backward after another."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros_like(matrix))
    module.forward = lambda factor: (module.weight * factor).sum()  # type: ignore[method-assign]
    model = wrapped(module, hook, bucket_mb)

    def backward(gradient: Tensor) -> Tensor:
        model.zero_grad()
        model(gradient).backward()
        return module.weight.grad.clone()  # type: ignore[union-attr]

    return backward


def same_on_all(trajectories: list[list[Tensor]]) -> None:
    for other in trajectories[1:]:
        assert_same(other, trajectories[0], 0)


# -- ours in DDP -----------------------------------------------------------------------------------------------

EXACT = [
    Native(),
    Ring(),
    Ring(chunks=3),
    Direct(chunks=2),
    Linear(),
    Tree(),
    HalvingDoubling(),
    Hierarchical(group=2),
    Auto(),
]
LOSSY = [
    *(Ring(codec=codec) for codec in (Truncate16(), Linear8(), QSGD())),
    Tree(codec=Linear8()),
    *(Once(codec=codec) for codec in (Truncate16(rounding="nearest"), Linear8(), QSGD(), SharedInt8())),
    *(Once(codec=ErrorFeedback(codec=codec)) for codec in (TopK(fraction=0.3), Sign(), Linear8())),
    PowerSGD(rank=1),
    PowerSGD(rank=1, alternate=True, start_step=2),
]


def train_with_each(collectives: list[Collective], steps: int) -> list[list[Tensor]]:
    found = []
    for collective in collectives:
        state, hook = ddp_hook(collective=collective)
        found.append(in_ddp((state, hook), steps=steps))
        state.close()  # gloo's threads wake a hundred times a second
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_lossless_collectives_train_as_plain_ddp(num_ranks: int) -> None:
    def run() -> list[list[Tensor]]:
        return [in_ddp(None), *train_with_each(EXACT, STEPS)]

    per_rank = shared_pool("torch", num_ranks, compiler=True).run(run)
    plain = per_rank[0][0]
    assert relative_error(plain[-1], plain[0]) > 0.1, "nothing was trained: equal parameters would say nothing"
    for position, collective in enumerate(EXACT, start=1):
        same_on_all([found[position] for found in per_rank])
        assert_same(per_rank[0][position], plain, 1e-13), collective


def test_replicas_stay_equal_to_the_bit_with_every_codec_and_the_loss_falls() -> None:
    steps = 16
    per_rank = shared_pool("torch", 3, compiler=True).run(train_with_each, LOSSY, steps)
    x, y = tiny.data(40)

    def loss(parameters: Tensor) -> float:
        model = mlp()
        nn.utils.vector_to_parameters(parameters, model.parameters())
        return float(cross_entropy(model(x), y).detach())

    for position, collective in enumerate(LOSSY):
        same_on_all([found[position] for found in per_rank])
        trajectory = per_rank[0][position]
        assert loss(trajectory[-1]) < 0.8 * loss(flat(mlp())), collective


def test_a_model_of_16_bit_parameters_is_summed_as_ddp_does_or_in_float32() -> None:
    def run() -> list[list[Tensor]]:
        hooks = [None, ddp_hook(), ddp_hook(codec=Linear8()), ddp_hook(collective=PowerSGD(rank=1))]
        return [in_ddp(hook, dtype=torch.bfloat16) for hook in hooks]

    first, second = shared_pool("torch", 2, compiler=True).run(run)
    for position in range(4):
        same_on_all([first[position], second[position]])
    assert_same(first[1], first[0], 0)
    assert relative_error(first[2][-1].float(), first[0][-1].float()) < 0.05
    assert relative_error(first[3][-1].float(), first[3][0].float()) > 0.05  # it moves, where bfloat16 has no QR


def test_a_hook_that_nobody_holds_ends_its_thread() -> None:
    """The thread's own last work would hold the hook, and the hook the thread."""

    def lanes() -> int:
        gc.collect()
        return sum(thread.name == "workbench-lane" for thread in threading.enumerate())

    def run() -> tuple[int, int]:
        before = lanes()
        in_ddp(ddp_hook(codec=Linear8()), steps=2)
        return before, within(10, lanes, lambda now: now <= before)

    for before, after in shared_pool("torch", 2, compiler=True).run(run):
        assert after <= before


def test_truncation_once_around_is_torchs_bf16_hook() -> None:
    """Two ranks: halving is exact, each value is rounded once and the sum once, in both."""

    def run() -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
        ours = one_gradient(ddp_hook(collective=Once(codec=Truncate16(rounding="nearest"))), gradient)(gradient)
        theirs = one_gradient((None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)), gradient)(
            gradient
        )
        return gradient, ours, theirs

    (first, ours, theirs), (second, *_) = shared_pool("torch", 2, compiler=True).run(run)
    mean = (first + second) / 2
    half = 2.0**-8  # rounding to 8 significant bits errs by so much of the value at most
    bound = (
        half * (first.abs() + second.abs()) / 2
        + half * (1 + half) * mean.abs()
        + half**2 * (first.abs() + second.abs())
    )
    assert bool(((ours - mean).abs() <= bound).all()) and float((ours - mean).abs().max()) > 0
    assert bool(((ours - theirs).abs() <= 2 * bound).all())
    assert float((ours != theirs).float().mean()) < 0.02  # where the two round a tie otherwise


def test_power_sgd_is_torchs_step_by_step_from_the_same_first_factor() -> None:
    """With error feedback and warm start, on gradients of full rank that change: rank 2 of 9."""

    def run() -> list[tuple[Tensor, Tensor, Tensor]]:
        shape, start = (12, 9), 2  # smaller ones torch would not compress
        like = torch.zeros(shape, dtype=torch.float64)
        torch_state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=start)
        theirs = one_gradient((torch_state, powerSGD_hook), like)
        state, hook = ddp_hook(collective=PowerSGD(rank=2, start_step=start))
        ours = one_gradient((state, hook), like)
        generator = torch.Generator().manual_seed(int(np.random.RandomState(0).randint(1_000_000_000)))
        first = torch.randn(1, shape[1], 2, generator=generator, dtype=torch.float64)[0]
        memory = [{"parameters": [[0, *shape]], "values": {"low-rank.q/0": first}}]
        state.load_state_dict({**state.state_dict(), "memory": memory})
        noise = torch.Generator().manual_seed(100 + dist.get_rank())
        found = []
        for _ in range(7):
            gradient = torch.randn(shape, generator=noise, dtype=torch.float64)
            found.append((gradient, ours(gradient), theirs(gradient)))
        return found

    per_rank = shared_pool("torch", 2, compiler=True).run(run)
    for step, ((first, ours, theirs), (second, *_)) in enumerate(zip(*per_rank, strict=True)):
        mean = (first + second) / 2
        assert relative_error(ours, theirs) < 1e-9, step
        assert (relative_error(ours, mean) < 1e-12) == (step < 2), step


def test_power_sgd_of_a_sum_of_low_rank_is_exact_as_torchs() -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        gradient = torch.outer(*(torch.randn(size, generator=generator, dtype=torch.float64) for size in (12, 9)))
        torch_state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        hooks = [ddp_hook(collective=PowerSGD(rank=2)), (torch_state, powerSGD_hook)]
        ours, theirs = (one_gradient(hook, gradient) for hook in hooks)
        return gradient, ours(gradient), [theirs(gradient) for _ in range(3)][-1]

    (first, ours, theirs), (second, *_) = shared_pool("torch", 2, compiler=True).run(run)
    mean = (first + second) / 2
    assert torch.linalg.matrix_rank(mean) == 2
    assert relative_error(ours, mean) < 1e-12
    assert relative_error(theirs, mean) < 1e-9


def test_power_sgd_sees_the_matrix_of_a_parameter_however_it_lies() -> None:
    """Of rank 1, and transposed in memory: read as it lies, its rank would be another."""

    def run() -> tuple[Tensor, Tensor]:
        gradient = torch.outer(
            torch.linspace(1, 2, 12, dtype=torch.float64), torch.linspace(-1, 3, 9, dtype=torch.float64).square()
        )
        lies_otherwise = torch.zeros(9, 12, dtype=torch.float64).T
        return gradient, one_gradient(ddp_hook(collective=PowerSGD(rank=1)), lies_otherwise)(gradient)

    gradient, found = shared_pool("torch", 2, compiler=True).run(run)[0]
    assert relative_error(found, gradient) < 1e-12


def test_noise_is_new_at_each_step_and_the_seeds_own() -> None:
    def run() -> list[list[Tensor]]:
        gradient = torch.linspace(-1, 1, 60, dtype=torch.float64)
        backwards = [one_gradient(ddp_hook(codec=QSGD(levels=3), seed=seed), gradient) for seed in (0, 0, 1)]
        return [[backward(gradient) for _ in range(2)] for backward in backwards]

    first, again, other = shared_pool("torch", 2, compiler=True).run(run)[0]
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])


def test_a_part_of_the_ranks_may_be_a_group_of_its_own() -> None:
    def run() -> list[list[Tensor]] | None:
        group = dist.new_group([0, 2], timeout=timedelta(seconds=30))
        if dist.get_rank() == 1:
            return None
        hooks = [
            ddp_hook(collective=collective, process_group=group)
            for collective in (Native(), Ring(), Hierarchical(group=2))
        ]
        return [in_ddp(hook, group=group) for hook in [None, *hooks]]

    first, nothing, third = shared_pool("torch", 3, compiler=True).run(run)
    assert nothing is None
    for position in range(4):
        same_on_all([first[position], third[position]])
        assert_same(first[position], first[0], 1e-13)


# -- what a hook remembers -------------------------------------------------------------------------------------


def constant(rank: int) -> list[Tensor]:
    """Each parameter's gradient at a rank: always the same."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in (7, 20, 12, 31, 5)]


class Products(nn.Module):
    """A sum of products of parameters, which begin at 0, with constants."""

    def __init__(self, constants: list[Tensor]) -> None:
        super().__init__()
        self.constants = constants
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros_like(value)) for value in constants])

    def forward(self) -> Tensor:
        return torch.stack(
            [(weight * constant).sum() for weight, constant in zip(self.weights, self.constants, strict=True)]
        ).sum()


def test_error_feedback_loses_the_first_step_to_the_new_buckets_and_nothing_after() -> None:
    """Sum of what was applied from the second step on + what is left over = as often the gradient."""
    steps = 6

    def run() -> tuple[list[Tensor], list[dict[str, Any]]]:
        mine = constant(dist.get_rank())
        module = Products(mine)
        state, hook = ddp_hook(collective=Once(codec=ErrorFeedback(codec=TopK(fraction=0.2))))
        model = wrapped(module, (state, hook), bucket_mb=250 / 2**20)
        applied, states = [torch.zeros_like(value) for value in mine], []
        for step in range(steps):
            model.zero_grad()
            model().backward()
            states.append(state.state_dict())
            for total, param in zip(applied, module.parameters(), strict=True):
                total.add_(param.grad if step > 0 else 0 * param.grad)
        return applied, states

    per_rank = shared_pool("torch", 2, compiler=True).run(run)
    states = [states for _, states in per_rank]
    parts = [[[number for number, _ in kept["parameters"]] for kept in state["memory"]] for state in states[0]]
    assert parts[0] != parts[1], "the buckets were not cut anew: this test would see nothing"
    assert parts[1] == parts[-1] and len(parts[1]) > 1
    assert sorted(number for part in parts[-1] for number in part) == [0, 1, 2, 3, 4], (
        "memory of buckets that are no more"
    )
    shapes = {kept[0]: kept[1] for item in states[0][-1]["memory"] for kept in item["parameters"]}
    left = {number: torch.zeros(size, dtype=torch.float64) for number, size in shapes.items()}
    for state in states:
        for item in state[-1]["memory"]:
            residual = item["values"]["once.residual/bucket-0"]
            for (number, size), part in zip(
                item["parameters"], residual.split([size for _, size in item["parameters"]]), strict=True
            ):
                assert part.numel() == size
                left[number] += part
    by_size = {size: left[number] for number, size in shapes.items()}
    for total, first, second in zip(per_rank[0][0], constant(0), constant(1), strict=True):
        expected = (steps - 1) * (first + second) / 2
        assert relative_error(total + by_size[len(total)], expected) < 1e-13
        assert relative_error(total, expected) > 1e-3


@pytest.mark.parametrize(
    "collective", [Once(codec=ErrorFeedback(codec=TopK(fraction=0.2))), PowerSGD(rank=1), Ring(codec=QSGD())], ids=repr
)
def test_a_run_goes_on_from_its_saved_state(collective: Collective) -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        noise = torch.Generator().manual_seed(dist.get_rank())
        gradients = [torch.randn(6, 5, generator=noise, dtype=torch.float64) for _ in range(6)]
        straight = one_gradient(ddp_hook(collective=collective), gradients[0])
        expected = [straight(gradient) for gradient in gradients]
        state, hook = ddp_hook(collective=collective)
        before = one_gradient((state, hook), gradients[0])
        found = [before(gradient) for gradient in gradients[:3]]
        saved = state.state_dict()
        before(gradients[0])  # what was saved is a copy
        again, hook = ddp_hook(collective=collective)
        again.load_state_dict(saved)
        after = one_gradient((again, hook), gradients[0])
        return expected, found + [after(gradient) for gradient in gradients[3:]]

    for expected, found in shared_pool("torch", 2, compiler=True).run(run):
        assert_same(found, expected, 0)


REMEMBERING = [
    *(Once(codec=ErrorFeedback(codec=codec)) for codec in (TopK(fraction=0.3), Sign(), Linear8())),
    PowerSGD(rank=1),
    PowerSGD(rank=1, alternate=True, start_step=2),
    Ring(codec=QSGD()),
    Native(),
]


def stopped_and_resumed(collective: Collective, stops_after: int | None) -> Tensor:
    """Parameters after the last step of DDP; model, optimizer, DDP and hook are made again after some steps, from what was saved."""

    def begin(saved: list[dict[str, Any]] | None) -> tuple[Any, ...]:
        state, hook = ddp_hook(collective=collective)
        module = mlp()
        optimizer = tiny.momentum(module.parameters())
        if saved is not None:
            for one, its in zip((module, optimizer, state), saved, strict=True):
                one.load_state_dict(its)
        return wrapped(module, (state, hook)), optimizer, state

    model, optimizer, state = begin(None)
    x, y = tiny.data(40)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for step in range(STEPS):
        if step == stops_after:
            held = io.BytesIO()
            torch.save([model.module.state_dict(), optimizer.state_dict(), state.state_dict()], held)
            state.close()
            held.seek(0)
            model, optimizer, state = begin(torch.load(held, weights_only=True))
        optimizer.zero_grad()
        cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    state.close()
    return flat(model)


def test_a_run_of_several_buckets_resumes_bit_identically() -> None:
    """A new DDP's first buckets are others than those whose residuals were saved."""

    def run() -> list[list[Tensor]]:
        return [[stopped_and_resumed(one, stop) for stop in (None, 4, STEPS - 1)] for one in REMEMBERING]

    for per_rank in shared_pool("torch", 2, compiler=True).run(run):
        for collective, (whole, *resumed) in zip(REMEMBERING, per_rank, strict=True):
            for found in resumed:
                assert torch.equal(found, whole), f"{collective}: {relative_error(found, whole):.1e} off"


def test_a_state_of_another_model_is_refused_in_the_first_step() -> None:
    def run() -> str:
        state, hook = ddp_hook(collective=PowerSGD())
        in_ddp((state, hook), steps=3)
        again, hook = ddp_hook(collective=PowerSGD())
        again.load_state_dict(state.state_dict())
        with pytest.raises(ConfigError) as caught:
            one_gradient((again, hook), torch.zeros(6, 5))(torch.ones(6, 5))
        return str(caught.value)

    assert "saved with another model" in shared_pool("torch", 2, compiler=True).run(run)[0]


def test_a_state_of_another_rank_is_refused() -> None:
    def run() -> str:
        state, _ = ddp_hook(collective=PowerSGD())
        with pytest.raises(ConfigError) as caught:
            state.load_state_dict({**state.state_dict(), "rank": 1 - dist.get_rank()})
        return str(caught.value)

    assert "saved with rank 1, and not 0" in shared_pool("torch", 2, compiler=True).run(run)[0]


# -- failures --------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Failing(Collective):
    """A ring that fails on rank 1 in its second sum, once it has talked."""

    def all_reduce(self, ctx: Any, value: Any) -> Program:
        count = ctx.memory.setdefault("count", torch.zeros(()))
        yield from Ring().all_reduce(ctx, value)
        count += 1
        if ctx.rank == 1 and count == 2:
            yield Local("sum", 0, lambda: 1 / 0)
        return value

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        raise NotImplementedError


def words_of(backward: Callable[[Tensor], Tensor], gradient: Tensor) -> str:
    try:
        backward(gradient)
    except (ArithmeticError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_failure_ends_backward_on_all_ranks_and_names_the_rank() -> None:
    def run() -> list[str]:
        gradient = torch.ones(10, dtype=torch.float64)
        backward = one_gradient(ddp_hook(collective=Failing(), timeout_s=20), gradient)
        return [words_of(backward, gradient) for _ in range(3)]

    first, second = shared_pool("torch", 2, compiler=True).run(run)
    assert first[0] == second[0] == "nothing was raised"
    assert "ZeroDivisionError: division by zero" in second[1]
    assert second[2] == "ZeroDivisionError: division by zero"  # at once, and not after waiting for anybody
    assert first[1] == "nothing was raised"  # it had its sum
    assert "rank 1 failed at step 1: ZeroDivisionError" in first[2]


def test_a_rank_that_is_killed_is_named() -> None:
    """In the third step: at the second DDP itself sends its new buckets to all ranks, and its own wait is not ours."""

    def run() -> list[str]:
        gradient = torch.ones(10, dtype=torch.float64)
        backward = one_gradient(ddp_hook(collective=Ring(), timeout_s=20), gradient)
        before = [words_of(backward, gradient) for _ in range(2)]
        if dist.get_rank() == 1:
            die()
        return [*before, words_of(backward, gradient)]

    with contextlib.closing(RankPool("torch", 3, compiler=True)) as pool:
        found = pool.outcomes([(run, ())] * 3, may_die=True)
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].trace
        assert found[rank].value[:2] == ["nothing was raised"] * 2
        assert "PeerFailed: rank 1's process is gone" in found[rank].value[2]


def test_a_rank_that_has_ended_is_named_with_the_fix() -> None:
    """As if it had fewer batches. Nobody failed, and gloo reports only a lost connection."""

    def run() -> str:
        gradient = torch.ones(10, dtype=torch.float64)
        state, hook = ddp_hook(collective=Ring(), timeout_s=20)
        backward = one_gradient((state, hook), gradient)
        for _ in range(2):
            assert words_of(backward, gradient) == "nothing was raised"
        if dist.get_rank() == 1:
            torch_distributed.CLOSE_S = 0.0  # nobody comes
            state.close()
            die()
        failure_detector.DIAGNOSIS_S = 0.5  # there is nothing to find
        return words_of(backward, gradient)

    with contextlib.closing(RankPool("torch", 2, compiler=True)) as pool:
        found = pool.outcomes([(run, ())] * 2, may_die=True)
    assert found[0].error is None, found[0].trace
    assert "PeerFailed: the connection to rank 1 was lost at step 2, and no error was reported" in found[0].value
    assert "give every rank the same number" in found[0].value


def test_a_failure_is_kept_if_the_store_went_away_with_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 holds the store. After the end of its process nothing can be announced, and backward must still end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state, _ = ddp_hook(collective=Ring())

        class Gone:
            def set(self, *_: object) -> None:
                raise dist.DistNetworkError("Broken pipe")

        monkeypatch.setattr(state._transport, "_store", Gone())
        handle, future = TaskHandle(), Future[Tensor]()
        handle.error = ZeroDivisionError("division by zero")
        state._end(handle, future, torch.zeros(1), 0)
        with pytest.raises(ZeroDivisionError):
            future.wait()
        monkeypatch.undo()
        state.close()
    finally:
        dist.destroy_process_group()


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_was_said() -> None:
    def run() -> str:
        gradient = torch.ones(10, dtype=torch.float64)
        backward = one_gradient(ddp_hook(collective=Ring(), timeout_s=1.0), gradient)
        return words_of(backward, gradient) if dist.get_rank() == 0 else ""

    assert "Stalled: waited 1 s" in shared_pool("torch", 2, compiler=True).run(run)[0]


def test_what_cannot_be_averaged_is_refused_with_the_fix() -> None:
    def run() -> str:
        model = wrapped(tiny.SparseEmbedding(), ddp_hook())
        with pytest.raises(Exception, match="sparse=False") as caught:
            model(torch.zeros(2, 5, dtype=torch.int64)).sum().backward()
        return str(caught.value)

    shared_pool("torch", 2, compiler=True).run(run)
