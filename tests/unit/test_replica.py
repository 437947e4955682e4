"""The replica alone: numbers computed by hand, and the guarantees for a runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from workbench.errors import ConfigError
from workbench.gradients import CONTROL, USED, Gradient, whole
from workbench.replica.backward import SMALL_BYTES, Hooks, LossScale, MicroBatch
from workbench.replica.replica import Replica
from workbench.replica.server_copy import ServerCopy

sgd = partial(torch.optim.SGD, lr=0.1)


class Products(nn.Module):
    """loss = mean over x of a x_0 + b x_1 (+ c x_2 where wanted): the gradients are the means of the columns."""

    def __init__(self, uses_c: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(())) for _ in range(3))
        self.uses_c = uses_c

    def forward(self, x: Tensor) -> Tensor:
        loss = self.a * x[:, 0] + self.b * x[:, 1]
        return (loss + self.c * x[:, 2] if self.uses_c else loss).mean()


X = torch.tensor([[1.0, 10.0, 100.0], [3.0, 30.0, 300.0]])


def micro(model: nn.Module, x: Tensor = X, share: float = 1.0) -> MicroBatch:
    return MicroBatch(lambda: model(x), share, len(x))


def values(gradient: Gradient) -> dict[str, float]:
    return {slot.name: float(gradient.view(slot)) for slot in gradient.layout.slots}


def parameters(model: nn.Module) -> dict[str, float]:
    return {name: param.item() for name, param in model.named_parameters()}


# -- backward --------------------------------------------------------------------------------------------------


def test_a_gradient_is_this_ranks_share_of_the_mean() -> None:
    model = Products(uses_c=True)
    gradient, loss = Replica(model, sgd(model.parameters())).backward(7, [micro(model, share=0.25)], Hooks())
    assert values(gradient) == {"a": 0.5, "b": 5.0, "c": 50.0}
    assert float(loss) == 222.0
    assert (gradient.step, gradient.version, gradient.bucket) == (7, 0, None)
    assert gradient.tail().tolist() == [0.25, 0.0, 1.0, 1.0, 1.0]


def test_micro_batches_add_up_to_their_batch() -> None:
    model = Products(uses_c=True)
    replica = Replica(model, sgd(model.parameters()), bucket_bytes=0)
    phases: list[str] = []
    micro_batches = [micro(model, X[:1], 0.5), micro(model, X[1:], 0.5)]
    gradient, loss = replica.backward(0, micro_batches, Hooks(phases.append))
    assert values(gradient) == {"a": 2.0, "b": 20.0, "c": 200.0}
    assert float(loss) == 222.0
    assert phases == ["forward", "backward", "forward", "backward", ""]


def test_a_loss_is_the_mean_over_samples_not_over_micro_batches() -> None:
    model = Products()
    replica = Replica(model, sgd(model.parameters()))
    _, loss = replica.backward(0, [micro(model, X[:1], 1 / 3), micro(model, X[[1, 1]], 2 / 3)], Hooks())
    assert float(loss) == pytest.approx((11 + 33 + 33) / 3)


def test_without_samples_the_gradient_is_nothing_and_counts_nothing() -> None:
    model = Products(uses_c=True)
    replica = Replica(model, sgd(model.parameters()), bucket_bytes=0)
    replica.pool.take().fill_(5.0)  # a buffer's content is what was there before
    replica.pool.give_back(replica.pool._all[0])
    handed: list[Gradient] = []
    phases: list[str] = []
    gradient, loss = replica.backward(0, [], Hooks(phases.append, handed.append))
    assert gradient.flat.abs().sum() == 0
    assert loss is None
    assert [bucket.bucket for bucket in handed] == [0, 1, 2]
    assert phases == ["backward", ""]


class OutOfOrder(nn.Module):
    """Registered in another order than it is used in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(4, 2), nn.Linear(3, 5), nn.Linear(5, 4)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).tanh()).square().mean()


@pytest.mark.parametrize("bucket_bytes", [0, 60, None])
@pytest.mark.parametrize("num_micro", [1, 3])
def test_buckets_are_handed_over_once_in_order_and_final(bucket_bytes: float | None, num_micro: int) -> None:
    model = OutOfOrder()
    replica = Replica(model, sgd(model.parameters()), bucket_bytes=bucket_bytes)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    handed: list[tuple[Gradient, Tensor]] = []
    micro_batches = [micro(model, part, len(part) / 6) for part in x.tensor_split(num_micro)]
    gradient, _ = replica.backward(
        0, micro_batches, Hooks(bucket=lambda bucket: handed.append((bucket, bucket.flat.clone())))
    )
    assert [bucket.bucket for bucket, _ in handed] == list(range(len(replica.layout.buckets)))
    for bucket, then in handed:
        assert torch.equal(bucket.flat, then), "written after it was handed over"
        assert bucket.owner is gradient
        assert bucket.flat.data_ptr() == gradient.flat[replica.layout.buckets[bucket.bucket or 0].start :].data_ptr(), (
            "no copy"
        )
    assert whole([bucket for bucket, _ in handed]) is gradient
    expected = torch.autograd.grad(model(x), [param for name, param in model.named_parameters() if "idle" not in name])
    found = [gradient.view(slot) for slot in replica.layout.slots if "idle" not in slot.name]
    torch.testing.assert_close(found, list(expected))
    used = {
        slot.name: count
        for piece in replica.layout.buckets
        for slot, count in zip(piece.slots, gradient.tail(piece.index)[USED:], strict=True)
    }
    assert {name for name, count in used.items() if count == 0} == {"idle.weight", "idle.bias"}


def test_a_bucket_starts_inside_backward() -> None:
    """The last layer's bucket is handed over before the first layer's gradients are known."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    replica = Replica(model, sgd(model.parameters()), bucket_bytes=0)
    order: list[str] = []
    model[0].weight.register_hook(lambda grad: order.append("gradient of 0.weight"))
    micro_batch = MicroBatch(lambda: model(torch.ones(2, 3)).square().mean(), 1.0, 2)
    replica.backward(
        0,
        [micro_batch],
        Hooks(bucket=lambda bucket: order.append(bucket.layout.buckets[bucket.bucket or 0].slots[0].name)),
    )
    assert order.index("1.weight") < order.index("gradient of 0.weight")


def test_the_users_own_gradients_are_left_alone() -> None:
    model = Products(uses_c=True)
    replica = Replica(model, sgd(model.parameters()))
    model.a.grad = torch.tensor(5.0)
    gradient, _ = replica.backward(0, [micro(model)], Hooks())
    assert float(model.a.grad) == 5.0
    assert model.b.grad is None
    before = gradient.flat.clone()
    model(X).backward()  # a backward outside of ours
    assert float(model.a.grad) == 7.0
    assert torch.equal(gradient.flat, before)
    replica.close()


def test_an_exception_in_forward_leaves_nothing_behind() -> None:
    model = Products()
    replica = Replica(model, sgd(model.parameters()))
    model.a.grad = torch.tensor(5.0)

    def fails() -> Tensor:
        raise KeyError("label")

    with pytest.raises(KeyError):
        replica.backward(0, [micro(model, share=0.5), MicroBatch(fails, 0.5, 1)], Hooks())
    assert float(model.a.grad) == 5.0
    gradient, _ = replica.backward(0, [micro(model)], Hooks())
    assert values(gradient) == {"a": 2.0, "b": 20.0, "c": 0.0}


def test_a_closed_replica_lets_the_module_go() -> None:
    model = Products()
    replica = Replica(model, sgd(model.parameters()))
    replica.close()
    with pytest.raises(ConfigError, match=r"grad was set during the backward pass"):  # no hook takes it
        replica.backward(0, [micro(model)], Hooks())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model: model(X) * torch.ones(2), r"shape \(2,\)"),
        (lambda model: model(X).detach(), "does not depend"),
        (lambda model: 3.0, "got float"),
    ],
)
def test_a_loss_that_is_no_scalar_with_a_graph(loss: Callable[[nn.Module], Any], words: str) -> None:
    model = Products()
    with pytest.raises(ConfigError, match=words):
        Replica(model, sgd(model.parameters())).backward(0, [MicroBatch(lambda: loss(model), 1.0, 2)], Hooks())


# -- small parameters, whose gradients arrive without a call ---------------------------------------------------


class Mixed(nn.Module):
    """Two small parameters, a large one, small ones again; `late` is registered last and used first, `idle` never."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = {"a": 5, "b": 3, "large": SMALL_BYTES // 4 + 1, "c": 4, "idle": 2, "d": 6, "late": 7}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size, generator=generator)))

    def forward(self, x: Tensor) -> Tensor:
        for name in ("late", "a", "b", "large", "c", "d"):
            x = (x * getattr(self, name).square().sum()).tanh()
        return x.mean()


def handed_over(
    steps: int, *, called: bool, bucket_bytes: float | None, loss: Callable[[Mixed], Tensor]
) -> tuple[list[Tensor], list[int]]:
    """Buckets as they were when a runtime got them, and parameters, of some steps; how many parameters call in the end."""
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    replica = Replica(model, optimizer, bucket_bytes=bucket_bytes)
    seen: list[Tensor] = []
    for step in range(steps):
        hooks = Hooks(bucket=lambda bucket: seen.append(bucket.flat.clone()), tick=(lambda: None) if called else None)
        gradient, _ = replica.backward(step, [MicroBatch(lambda: loss(model), 0.3, 5)], hooks)
        seen.append(gradient.flat.clone())
        replica.apply(gradient)
        seen.append(replica.read_parameters())
    assert all(param.grad is None for param in model.parameters())
    return seen, calling(replica)


def calling(replica: Replica) -> list[int]:
    """Parameters whose gradients arrive with a call."""
    return sorted({slot.index for slot in replica.layout.slots} - replica._in_place.all)


def cleared(model: Mixed) -> Tensor:
    """A closure as in many loops: it forgets gradients first."""
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    return model(torch.linspace(0.1, 1.0, 5))


@pytest.mark.parametrize("bucket_bytes", [None, 40.0, 100.0, 0.0])
def test_small_gradients_are_those_of_a_call_for_each(bucket_bytes: float | None) -> None:
    (found, calling), (expected, _) = (
        handed_over(3, called=called, bucket_bytes=bucket_bytes, loss=cleared) for called in (False, True)
    )
    assert len(found) == len(expected) and all(
        torch.equal(one, other) for one, other in zip(found, expected, strict=True)
    )
    if bucket_bytes is None:
        assert calling == [0, 2, 4, 6], "the bucket's first, the large one, the idle one, and the late one"


@pytest.mark.parametrize("bucket", [None, lambda bucket: None])
def test_a_thousand_small_parameters_are_one_call(bucket: Callable[[Gradient], None] | None) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(1000)])
    replica = Replica(model, sgd(model.parameters()))

    def loss() -> Tensor:
        return reduce(torch.add, model, torch.zeros(8)).square().sum()

    for step in range(2):
        gradient, _ = replica.backward(step, [MicroBatch(loss, 1.0, 1)], Hooks(bucket=bucket))
        assert float(gradient.tail()[USED:].sum()) == 1000
        replica.apply(gradient)
    assert len(calling(replica)) == 1


def test_a_bucket_whose_small_gradients_come_late_is_handed_over_when_they_are_there() -> None:
    """From the second step on within backward: before the gradient of `first`, which comes last."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(4)) for name in ("a_first", "b_early", "c_late")})
    replica = Replica(model, sgd(model.parameters()), bucket_bytes=40.0)
    assert [[slot.name for slot in piece.slots] for piece in replica.layout.buckets] == [
        ["c_late", "b_early"],
        ["a_first"],
    ]
    order: list[Any] = []

    def loss() -> Tensor:
        x = torch.ones(4) * model["a_first"]
        x.register_hook(lambda grad: order.append("first"))
        return (x * model["c_late"] * model["b_early"]).sum()

    def got(bucket: Gradient) -> None:
        order.append((bucket.bucket, bucket.tail()[USED:].tolist()))

    late_first = ["first", (0, [1.0, 1.0]), (1, [1.0])]
    model["b_early"].register_hook(lambda grad: order.append("early"))
    model["c_late"].register_hook(lambda grad: order.append("late"))
    for step in range(2):
        order.clear()
        replica.backward(step, [MicroBatch(loss, 1.0, 4)], Hooks(bucket=got))
        assert order[:2] == ["early", "late"], "the one that is watched comes first"
        if step == 0:
            assert order[2:] == late_first
    assert order[2:] == [late_first[1], "first", late_first[2]]


@pytest.mark.parametrize("behind", [False, True], ids=["before its bucket is handed over", "behind"])
@pytest.mark.parametrize("by_bucket", [False, True])
def test_a_small_gradient_that_comes_twice_is_refused(behind: bool, by_bucket: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(4))})
    replica = Replica(model, sgd(model.parameters()))
    parts = [lambda x: x + model["b"], lambda x: x * model["a"] + model["b"]]

    def loss() -> Tensor:
        x = torch.ones(4, requires_grad=True)
        for part in parts if behind else parts[::-1]:
            x = checkpoint(part, x, use_reentrant=True)
        return x.sum()

    handed: list[Gradient] = []
    with pytest.raises(ConfigError, match=r"b arrived twice.*use_reentrant=False"):
        replica.backward(0, [MicroBatch(loss, 1.0, 1)], Hooks(bucket=handed.append if by_bucket else None))
    assert len(handed) == (behind and by_bucket)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("name", ["a", "large"])
def test_a_gradient_that_is_set_after_the_parameters_own_hooks_is_refused(name: str) -> None:
    """By a hook of autograd's node, which DDP would ignore or not, depending on the order."""
    model = Mixed()
    replica = Replica(model, sgd(model.parameters()))
    param = model.get_parameter(name)

    def replace(inputs: object, outputs: object) -> None:
        param.grad = torch.ones_like(param)

    get_gradient_edge(param).node.register_hook(replace)
    with pytest.raises(ConfigError, match=rf"{name}.grad was set during the backward pass by other code"):
        replica.backward(0, [MicroBatch(lambda: model(torch.linspace(0.1, 1.0, 5)), 1.0, 5)], Hooks())


@pytest.mark.parametrize("num_micro", [1, 3])
def test_a_closure_that_clears_gradients_does_not_clear_those_of_earlier_micro_batches(num_micro: int) -> None:
    """Also with a user's hook, for which gradients stay in `.grad` until the backward pass ends."""
    seen: list[float] = []
    gradients = []
    for hooked in (False, True):
        model = Mixed()
        replica = Replica(model, sgd(model.parameters()))
        if hooked:
            model.get_parameter("c").register_post_accumulate_grad_hook(
                lambda param: seen.append(float(param.grad.sum()))
            )
        micro_batches = [MicroBatch(partial(cleared, model), 1 / num_micro, 5)] * num_micro
        gradients.append(replica.backward(0, micro_batches, Hooks())[0].flat)
        assert all(param.grad is None for param in model.parameters())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)
    assert seen == pytest.approx([seen[-1] * (number + 1) / num_micro for number in range(num_micro)])


@pytest.mark.parametrize("name", ["a", "large"])
def test_a_backward_of_the_loss_closures_own_is_refused(name: str) -> None:
    model = Mixed()
    replica = Replica(model, sgd(model.parameters()))

    def loss() -> Tensor:
        getattr(model, name).square().sum().backward()
        return model(torch.ones(3))

    with pytest.raises(ConfigError, match=f"{name} got a gradient before the loss was known: return the sum"):
        replica.backward(0, [MicroBatch(loss, 1.0, 1)], Hooks())


# -- updates ---------------------------------------------------------------------------------------------------


def summed(replica: Replica, model: nn.Module, ranks: int = 1, **more: Any) -> Gradient:
    """The sum over that many ranks with the same minibatch."""
    gradient, _ = replica.backward(0, [micro(model, share=1.0 / ranks, **more)], Hooks())
    gradient.flat.mul_(ranks)
    return gradient


def test_an_update_in_the_head() -> None:
    model = Products(uses_c=True)
    replica = Replica(model, sgd(model.parameters()))
    assert replica.apply(summed(replica, model, ranks=4)) == 0
    assert parameters(model) == pytest.approx({"a": 1 - 0.2, "b": 1 - 2.0, "c": 1 - 20.0})
    assert replica.updates == [1]
    assert all(param.grad is None for param in model.parameters())
    assert replica.lr == 0.1


def test_a_short_batch_is_divided_by_what_was_there() -> None:
    """Two of four samples: the shares add up to a half, the mean is over the two."""
    model = Products()
    replica = Replica(model, sgd(model.parameters()))
    gradient, _ = replica.backward(0, [micro(model, share=0.5)], Hooks())
    assert values(gradient)["b"] == 10.0
    replica.apply(gradient)
    assert parameters(model)["b"] == pytest.approx(1 - 0.1 * 20.0)


def test_a_scaled_update_leaves_the_rate_as_it_was() -> None:
    model = Products()
    replica = Replica(model, sgd(model.parameters()))
    replica.apply(summed(replica, model), lr_scale=0.5)
    assert parameters(model)["b"] == pytest.approx(1 - 0.05 * 20.0, abs=1e-6)
    assert replica.lr == 0.1


def test_what_no_rank_used_does_not_move_and_what_one_used_does() -> None:
    model = Products()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5))
    replica.apply(summed(replica, model))
    assert parameters(model)["c"] == 1.0
    gradient = summed(replica, model)
    slot = replica.layout.slots[2]
    used = replica.layout.buckets[0].tail + USED + [item.name for item in replica.layout.buckets[0].slots].index("c")
    gradient.flat[used] = 1.0  # another rank used it: its share came with the sum
    gradient.view(slot).fill_(4.0)
    replica.apply(gradient)
    assert parameters(model)["c"] == pytest.approx(1 - 0.1 * (4.0 + 0.5))


@pytest.mark.parametrize(
    "optimizer",
    [
        sgd,
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.01),
        partial(torch.optim.AdamW, lr=0.01, foreach=False),
        partial(torch.optim.RMSprop, lr=0.01),
    ],
    ids=["sgd", "nesterov", "adam", "adamw", "rmsprop"],
)
def test_bucket_by_bucket_in_any_order_is_the_whole(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """With two groups of different rates, whose parameters are spread over the buckets."""

    def trained(by_bucket: bool) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        weights, biases = (
            [param for name, param in model.named_parameters() if kind in name] for kind in ("weight", "bias")
        )
        groups = [{"params": weights}, {"params": biases, "lr": 0.002}]
        replica = Replica(model, optimizer(groups), bucket_bytes=0 if by_bucket else None, applies_buckets=by_bucket)
        for step in range(4):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            gradient, _ = replica.backward(step, [MicroBatch(lambda x=x: model(x).square().mean(), 1.0, 5)], Hooks())
            if by_bucket:
                for index in (2, 0, 3, 1):
                    assert replica.apply(gradient.bucket_view(index)) == 0
            else:
                assert replica.apply(gradient) == 0
        assert [len(group["params"]) for group in groups] == [2, 2], "the groups are whole again"
        return [param.detach() for param in model.parameters()], replica.updates

    (by_bucket, updates), (at_once, _) = trained(True), trained(False)
    assert all(torch.equal(one, other) for one, other in zip(by_bucket, at_once, strict=True))
    assert updates == [4, 4, 4, 4]


def test_a_schedule_advances_once_an_update_not_once_a_bucket() -> None:
    model = Products(uses_c=True)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
    replica = Replica(model, sgd(model.parameters()), bucket_bytes=0, schedule=schedule, applies_buckets=True)
    rates = []
    for _ in range(4):
        gradient = summed(replica, model)
        for index in range(3):
            replica.apply(gradient.bucket_view(index))
        rates.append(replica.lr)
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001])


def test_staleness_counts_updates_since_the_gradient_was_taken() -> None:
    model = Products()
    replica = Replica(model, sgd(model.parameters()))
    taken = [summed(replica, model) for _ in range(3)]
    assert replica.pool.num_allocated == 3
    assert [replica.apply(gradient) for gradient in taken] == [0, 1, 2]
    assert summed(replica, model).version == 3
    assert replica.pool.num_allocated == 3, "a buffer is used again"


def test_clipping_bounds_the_mean_gradient() -> None:
    model = Products()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_norm=0.5)
    replica.apply(summed(replica, model, ranks=3))
    moved = torch.tensor([1 - value for value in parameters(model).values()])
    assert float(moved.norm()) == pytest.approx(0.5)
    assert float(moved[1] / moved[0]) == pytest.approx(10.0)


def test_a_word_of_control_arrives_with_the_first_bucket() -> None:
    model = Products()
    replica = Replica(model, sgd(model.parameters()), bucket_bytes=0, applies_buckets=True)
    replica.control_out = 1
    gradient, _ = replica.backward(0, [micro(model)], Hooks())
    assert float(gradient.tail(0)[CONTROL]) == 1.0
    replica.apply(gradient.bucket_view(1))
    assert replica.control_seen == 0
    replica.apply(gradient.bucket_view(0))
    assert replica.control_seen == 1


# -- loss scaling ----------------------------------------------------------------------------------------------


def test_loss_scale_halves_on_overflow_and_doubles_after_two_thousand() -> None:
    scale = LossScale(8.0)
    fine, overflown = torch.ones(3), torch.tensor([1.0, float("inf"), 1.0])
    assert [scale.accept(flat) for flat in (fine, overflown, torch.tensor([float("nan")]), fine)] == [
        True,
        False,
        False,
        True,
    ]
    assert (scale.value, scale.good) == (2.0, 1)
    for _ in range(1998):
        scale.accept(fine)
    assert scale.value == 2.0
    assert scale.accept(fine)
    assert (scale.value, scale.good) == (4.0, 0)


def test_an_overflow_skips_the_update_and_the_next_gradient_is_scaled_less() -> None:
    model = Products()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), precision="fp16")
    assert replica.loss_scale is not None
    gradient = summed(replica, model)
    assert values(gradient)["b"] == pytest.approx(20.0, rel=1e-2), "what is sent is unscaled"
    gradient.flat[0] = float("inf")
    replica.apply(gradient)
    assert parameters(model) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert replica.loss_scale.value == 2.0**15
    assert replica.updates == [1]
    replica.apply(summed(replica, model))
    assert parameters(model)["b"] == pytest.approx(1 - 0.1 * 20.0, rel=1e-2), (
        "momentum knows nothing of the skipped one"
    )


# -- state -----------------------------------------------------------------------------------------------------


def test_state_and_load_go_on_as_if_nothing_had_happened() -> None:
    def fresh() -> tuple[nn.Module, Replica]:
        model = Products(uses_c=True)
        schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
        return model, Replica(model, torch.optim.Adam(model.parameters(), lr=0.1), schedule=schedule, precision="fp16")

    model, replica = fresh()
    for _ in range(3):
        replica.apply(summed(replica, model))
    other_model, other = fresh()
    other.load(replica.state())
    assert other.updates == [3]
    for one, its_replica in ((model, replica), (other_model, other)):
        its_replica.apply(summed(its_replica, one))
    assert parameters(model) == parameters(other_model)
    assert replica.lr == other.lr
    assert other.loss_scale is not None and other.loss_scale.good == 4


def test_a_gradient_that_was_in_flight_comes_back_without_its_word_of_control() -> None:
    model = Products(uses_c=True)
    replica = Replica(model, sgd(model.parameters()), bucket_bytes=0)
    replica.control_out = 1
    gradient = summed(replica, model)
    _, other = model, Replica(model, sgd(model.parameters()), bucket_bytes=0)
    restored = other.gradient_from(gradient.flat, gradient.step, gradient.version)
    assert values(restored) == values(gradient)
    other.apply(restored)
    assert other.control_seen == 0
    assert parameters(model)["b"] == pytest.approx(1 - 2.0)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 2), lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)]
)
def test_parameters_are_read_and_written_in_order_of_registration(make: Callable[[], nn.Module]) -> None:
    model, other = make(), make()
    one, two = (Replica(item, sgd(item.parameters())) for item in (model, other))
    flat = one.read_parameters()
    assert torch.equal(flat, torch.cat([param.reshape(-1) for param in model.parameters()]))
    two.write_parameters(flat)
    flat.zero_()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()


# -- refusals --------------------------------------------------------------------------------------------------


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):  # type: ignore[no-untyped-def, override]
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "settings", "words"),
    [
        (torch.optim.LBFGS, {}, "LBFGS evaluates the loss itself"),
        (partial(NeedsClosure, lr=0.1), {}, "NeedsClosure evaluates the loss itself"),
        (sgd, {"applies_buckets": True, "clip_norm": 1.0}, "apply='all'"),
        (sgd, {"applies_buckets": True, "precision": "fp16"}, "precision='bf16'"),
    ],
)
def test_what_cannot_be_right_is_refused_at_construction(optimizer: Any, settings: dict[str, Any], words: str) -> None:
    model = Products()
    with pytest.raises(ConfigError, match=words):
        Replica(model, optimizer(model.parameters()), **settings)


def test_a_gradient_that_comes_twice_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(2, 2)
    replica = Replica(layer, sgd(layer.parameters()))

    def loss(use_reentrant: bool) -> Tensor:
        x = torch.ones(1, 2, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x.sum()

    with pytest.raises(ConfigError, match=r"(weight|bias) arrived twice.*use_reentrant=False"):
        replica.backward(0, [MicroBatch(lambda: loss(True), 1.0, 1)], Hooks())
    replica.backward(0, [MicroBatch(lambda: loss(False), 1.0, 1)], Hooks())


# -- a server's copy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1], ids=["before its first update", "after one"])
def test_a_server_takes_the_learning_rate_that_is_set(before: int) -> None:
    """a = 1 - lr * its gradient of 2, for each update."""
    model = Products(uses_c=True)
    replica = Replica(model, sgd(model.parameters()))
    replica.make_server_copy = lambda: ServerCopy(replica.parameters, replica.layout, sgd)
    server_copy = replica.server_copy
    for update in range(2):
        if update == before:
            replica.set_lr(0.5)
        gradient, _ = replica.backward(update, [micro(model)], Hooks())
        server_copy.apply(gradient, 1.0)
    assert server_copy.lr == 0.5
    assert float(server_copy.parameters[0].detach()) == pytest.approx(1 - 2 * (0.1 * before + 0.5 * (2 - before)))
    assert replica.optimizer_wrapper.optimizer.param_groups[0]["lr"] == 0.5
