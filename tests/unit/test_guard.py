"""Faults that a guard finds in one rank's gradient: at once on a CPU, and later where it must not wait for a device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import workbench as wb
from workbench import costs
from workbench.errors import ConfigError, Diverged
from workbench.gradients import USED, WEIGHT, Gradient
from workbench.replica.backward import Hooks, MicroBatch
from workbench.replica.gradient_guard import GradientGuard, LossWatch, entries_of
from workbench.replica.replica import Replica
from workbench.settings import Settings


class Net(nn.Module):
    """Two linear layers around a BatchNorm; `spoil` multiplies the gradient of one parameter."""

    def __init__(self, spoil: float = 1.0, name: str = "first.weight") -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.get_parameter(name).register_hook(lambda grad: grad * spoil)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def replica_of(
    model: nn.Module, policy: str = "stop", deferred: bool = False, max_norm: float | None = None, **more: Any
) -> Replica:
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), **more)
    replica.guard = GradientGuard(replica, policy, 2, max_norm, deferred=deferred)
    return replica


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    return model(torch.arange(15.0).view(5, 3)).square().mean() * factor


def backward(replica: Replica, factor: float = 1.0, hooks: Hooks | None = None, share: float = 0.25) -> Gradient:
    torch.manual_seed(0)
    micro_batches = [MicroBatch(partial(loss_of, replica.model, factor), share, 5)]
    return replica.backward(7, micro_batches, hooks or Hooks())[0]


def entries(replica: Replica, loss: float | None = 1.0) -> dict[str, Any]:
    assert isinstance(replica.guard, GradientGuard)
    return entries_of(replica.guard.take_reports(), loss)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("spoil", "words"), [(float("nan"), "nan"), (float("inf"), "inf|nan")])
def test_one_that_stops_names_rank_step_and_parameter(spoil: float, words: str, deferred: bool) -> None:
    replica = replica_of(Net(spoil), deferred=deferred)
    with pytest.raises(
        Diverged, match=rf"rank 2 .*step 7.*({words}) in .*first\.weight.*lower the learning rate \(now 0\.1\)"
    ):
        _ = backward(replica), entries(replica)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("bucket_bytes", [None, 0])
def test_one_that_is_left_out_counts_nothing(bucket_bytes: float | None, deferred: bool) -> None:
    """From its bucket on: what has left before is counted; BatchNorm's statistics are as they were."""
    replica = replica_of(Net(float("nan"), "last.weight"), "skip", deferred, bucket_bytes=bucket_bytes)
    before = [buffer.clone() for buffer in replica.module_state.buffers]
    replica.control_out = 5
    gradient = backward(replica)
    bad = replica.layout.slots[[slot.name for slot in replica.layout.slots].index("last.weight")].bucket
    for piece, flat in gradient.slices():
        tail = gradient.tail(piece.index)
        if piece.index < bad:
            assert tail[WEIGHT] == 0.25 and bool((tail[USED:] == 1).all()) and bool(flat.any())
        else:
            assert (
                tail[WEIGHT] == 0 and not bool(tail[USED:].any()) and not bool(flat[: piece.tail - piece.start].any())
            )
        assert tail[1] == 5, "a word of control is for all"
    assert [piece.index for piece in replica.layout.buckets][bad:] and (bad > 0) == (bucket_bytes == 0)
    assert all(torch.equal(now, then) for now, then in zip(replica.module_state.buffers, before, strict=True))
    assert "last.weight" in entries(replica)["skipped"]


@pytest.mark.parametrize("deferred", [False, True])
def test_a_good_one_is_let_through_as_it_is(deferred: bool) -> None:
    plain, watched = Net(), Net()
    watched.load_state_dict(plain.state_dict())
    expected = backward(Replica(plain, torch.optim.SGD(plain.parameters(), lr=0.1)))
    for policy, max_norm in (("stop", None), ("skip", None), ("clip", 1e6)):
        replica = replica_of(watched, policy, deferred, max_norm)
        assert torch.equal(backward(replica).flat, expected.flat) and entries(replica) == {"loss": 1.0}
        replica.close()


@pytest.mark.parametrize("deferred", [False, True])
def test_clipping_is_of_the_mean_over_the_ranks_own_samples(deferred: bool) -> None:
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    loss_of(plain).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    replica = replica_of(model, "clip", deferred, 0.01)
    gradient = backward(replica, share=0.25)
    for slot, param in zip(replica.layout.slots, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient.view(slot) / 0.25, param.grad)
    assert entries(replica)["clipped"] == pytest.approx(norm)
    assert float(gradient.tail()[WEIGHT]) == 0.25


@pytest.mark.parametrize("deferred", [False, True])
def test_clip_leaves_out_what_is_not_finite(deferred: bool) -> None:
    replica = replica_of(Net(float("inf")), "clip", deferred, 1.0)
    gradient = backward(replica)
    assert not bool(gradient.flat.any()) and "first.weight" in entries(replica)["skipped"]


def test_buckets_leave_only_when_the_whole_is_known() -> None:
    for max_norm in (None, 0.5):
        left: list[str] = []
        replica = replica_of(Net(), "clip" if max_norm else "stop", False, max_norm, bucket_bytes=0)
        first = replica.parameters[0]
        handle = first.register_hook(lambda grad: left.append("backward's end"))  # noqa: B023 - called in this turn of the loop
        backward(replica, hooks=Hooks(bucket=lambda bucket: left.append("bucket")))  # noqa: B023 - likewise
        handle.remove()
        assert (left[0] == "backward's end") == (max_norm is not None), left
        replica.close()


@pytest.mark.parametrize("deferred", [False, True])
def test_a_loss_that_is_no_number_is_a_bad_gradient(deferred: bool) -> None:
    replica = replica_of(Net(), "skip", deferred)
    gradient = backward(replica, float("nan"))
    assert not bool(gradient.flat.any())
    assert entries(replica, float("nan")) == {"loss": None, "skipped": "loss nan"}
    with pytest.raises(
        Diverged, match=r"the loss of rank 2 is inf at step 7 \(its parameters are finite: check its batch"
    ):
        backward(replica_of(Net()), float("inf"))


def test_a_sum_that_overflows_is_not_applied() -> None:
    """Each rank's gradient was finite; all ranks have the same sum, so all leave it out."""
    for policy in ("stop", "skip"):
        replica = replica_of(Net(), policy)
        before, gradient = replica.read_parameters(), backward(replica)
        gradient.flat[3] = float("inf")
        if policy == "stop":
            with pytest.raises(
                Diverged, match=r"the sum of gradients that rank 2 applies, of step 7, is not finite: inf in 1 of"
            ):
                replica.apply(gradient)
        else:
            replica.apply(gradient)
            assert torch.equal(replica.read_parameters(), before) and entries(replica)["skipped"].endswith("of the sum")
            assert replica.updates == [1]


def test_values_whose_sum_is_too_large_are_finite_ones() -> None:
    replica = replica_of(Net(), "stop")
    gradient = backward(replica)
    gradient.flat.fill_(3e38)
    assert replica.guard is not None and replica.guard.accepts_sum(gradient)


def test_a_loss_scale_keeps_its_overflows() -> None:
    """It must see them: the step is skipped on all ranks, and the scale halved."""
    replica = replica_of(Net(float("inf")), "stop", precision="fp16")
    gradient = backward(replica)
    before = replica.read_parameters()
    replica.apply(gradient)
    assert (
        torch.equal(replica.read_parameters(), before)
        and replica.loss_scale is not None
        and replica.loss_scale.value == 2.0**15
    )


@pytest.mark.parametrize("deferred", [False, True])
def test_a_loss_scale_does_not_fall_for_ever(deferred: bool) -> None:
    replica = replica_of(Net(float("nan")), "stop", deferred, precision="fp16")
    with pytest.raises(
        Diverged, match=r"not finite: nan in 12 of 12 values of first\.weight.* The loss scale has fallen to 0\.5"
    ):
        _ = [replica.apply(backward(replica)) for _ in range(40)]
    assert min(replica.updates) == 17


@pytest.mark.parametrize("deferred", [False, True])
def test_on_a_worker_of_servers_it_does_not_either(deferred: bool) -> None:
    """The worker's own gradient is checked, and no sum."""
    replica = replica_of(Net(float("nan")), "stop", deferred, precision="fp16", served=True)
    assert replica.loss_scale is not None
    for halved in range(1, 18):
        gradient = backward(replica)
        assert not gradient.flat.any(), "zeros with weight 0"
        assert entries(replica) == {"loss": 1.0}
        assert replica.loss_scale.value == 2.0 ** (16 - halved)
    why = "" if deferred else r" The loss scale has fallen to 0\.5"
    with pytest.raises(Diverged, match=rf"rank 2 .*step 7.*nan in .*first\.weight.*{why}"):
        _ = backward(replica), entries(replica)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_bad_loss_is_left_out_on_a_worker_of_servers_and_its_scale_stays(deferred: bool) -> None:
    """A smaller scale would not help."""
    replica = replica_of(Net(), "skip", deferred, precision="fp16", served=True)
    gradient = backward(replica, float("nan"))
    assert not gradient.flat.any()
    assert entries(replica)["skipped"] == "loss nan"
    assert replica.loss_scale is not None and replica.loss_scale.value == 2.0**16


def test_a_server_in_fp16_checks_its_sums() -> None:
    """Each worker has left out its overflows, so no loss scale explains a sum that is not finite."""
    replica = replica_of(Net(), "stop", precision="fp16", served=True)
    gradient = backward(replica)
    gradient.flat[0] = float("inf")
    with pytest.raises(Diverged, match="the sum overflowed"):
        replica.server_copy.apply(gradient, 1.0)


def test_buckets_of_different_weights_are_divided_each_by_its_own() -> None:
    replica = replica_of(Net(), "skip", bucket_bytes=0)
    before, gradient = replica.read_parameters(), backward(replica)
    for piece, flat in gradient.slices():
        weight = 0.5 if piece.index > 2 else 1.0
        flat.fill_(weight)
        gradient.tail(piece.index)[WEIGHT] = weight
    replica.apply(gradient)
    torch.testing.assert_close(replica.read_parameters(), before - 0.1)


def test_losses_are_watched_rank_by_rank() -> None:
    watch = LossWatch(3.0, lambda: 0.1)
    for rank, loss in ((0, 1.0), (1, 4.0), (0, 2.9), (1, 11.9), (0, None)):
        watch.check(loss, 0, rank)
    with pytest.raises(Diverged, match=r"the loss of rank 0 is 3.1 at step 8, more than 3 times its first loss 1"):
        watch.check(3.1, 8, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"on_bad_gradient": "drop"}, "stop, skip, clip, ignore"),
        ({"on_bad_gradient": "clip"}, "set it, such as 1.0"),
        ({"on_bad_gradient": "ignore", "max_grad_norm": 1.0}, "does not check them"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"divergence_ratio": 1.0}, "above 1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings(steps=1, **changes)


def test_the_advice_for_a_micro_batch_without_labels_keeps_the_others() -> None:
    """The error's own words, followed: the step is that of the micro-batch with labels, as in plain torch."""
    inputs = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 1.0], [1.0, 1.0]])
    labels = torch.tensor([0, 1, -100, -100])  # the second micro-batch has none

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def advised(output: Tensor, target: Tensor) -> Tensor:
        total = nn.functional.cross_entropy(output, target, reduction="sum")
        return total / (target >= 0).sum().clamp(min=1)

    def model() -> nn.Module:
        made = nn.Linear(2, 2)
        nn.init.constant_(made.weight, 0.5)
        nn.init.zeros_(made.bias)
        return made

    data = TensorDataset(inputs, labels)

    def trained(loss: Any) -> wb.Run:
        in_order = DataLoader(data, sampler=SequentialSampler(data))
        given = wb.problems.Problem(model=model, loss=loss, train=in_order, correct=None, batch_size=4)
        compute = costs.Compute(forward_s=1e-3, backward_s=1e-3)
        return wb.simulate(wb.SynchronousSGD(), given, workers=1, steps=1, num_micro=2, compute=compute)

    with pytest.raises(Diverged, match=r"a mean over no labels is NaN: divide the sum by max.*all its micro-batches"):
        trained(mean)
    (row,) = trained(advised).steps()
    assert row["loss"] == pytest.approx(0.5 * mean(model()(inputs[:2]), labels[:2]).item())
