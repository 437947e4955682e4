"""Laws of `Sampler`: who takes which samples when."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.problems.base import Sampler


@st.composite
def samplers(draw: st.DrawFn) -> Sampler:
    return Sampler(
        num_samples=draw(st.integers(1, 200)),
        batch_size=draw(st.integers(1, 20)),
        num_workers=draw(st.integers(1, 9)),
        seed=draw(st.integers(0, 2**31)),
    )


def global_batch(sampler: Sampler, step: int) -> list[int]:
    return [int(index) for rank in range(sampler.num_workers) for index in sampler.share(step, rank)]


@given(samplers(), st.integers(0, 3))
def test_every_sample_is_taken_exactly_once_an_epoch(sampler: Sampler, epoch: int) -> None:
    first = epoch * sampler.steps_per_epoch
    taken = [index for step in range(first, first + sampler.steps_per_epoch) for index in global_batch(sampler, step)]
    assert sorted(taken) == list(range(sampler.num_samples))


@given(samplers(), st.integers(0, 30))
def test_the_ranks_shares_in_order_are_the_batch_of_one_process(sampler: Sampler, step: int) -> None:
    alone = Sampler(num_samples=sampler.num_samples, batch_size=sampler.global_batch, num_workers=1, seed=sampler.seed)
    assert alone.steps_per_epoch == sampler.steps_per_epoch
    assert global_batch(sampler, step) == alone.share(step, 0).tolist()


@given(samplers(), st.integers(0, 30))
def test_shares_are_nearly_equal_and_none_is_above_the_batch_size(sampler: Sampler, step: int) -> None:
    sizes = [len(sampler.share(step, rank)) for rank in range(sampler.num_workers)]
    assert max(sizes) <= sampler.batch_size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "where the batch is short the last ranks take less"
    assert sum(sizes) > 0, "no step is empty"
    if (step + 1) % sampler.steps_per_epoch:
        assert sizes == [sampler.batch_size] * sampler.num_workers, "only the last batch of an epoch may be short"


@given(samplers(), st.integers(0, 30))
def test_samples_before_counts_what_was_taken(sampler: Sampler, step: int) -> None:
    assert sampler.samples_before(step) == sum(len(global_batch(sampler, earlier)) for earlier in range(step))


@given(samplers(), st.integers(0, 30))
def test_shares_depend_on_nothing_but_their_arguments(sampler: Sampler, step: int) -> None:
    before = [sampler.share(step, rank) for rank in range(sampler.num_workers)]
    before[0].fill_(-1)  # a caller may do as it likes with its share
    for other in range(step + 2 * sampler.steps_per_epoch):
        sampler.share(other, 0)
    twin = Sampler(sampler.num_samples, sampler.batch_size, sampler.num_workers, sampler.seed)
    after = [sampler.share(step, rank) for rank in range(sampler.num_workers)]
    assert all(torch.equal(twin.share(step, rank), share) for rank, share in enumerate(after))
    assert all(torch.equal(old, new) for old, new in zip(before[1:], after[1:], strict=True))
    assert (after[0] >= 0).all()


def test_fewer_samples_than_ranks_leaves_the_last_ranks_without_any() -> None:
    sampler = Sampler(num_samples=3, batch_size=4, num_workers=5, seed=0)
    assert sampler.steps_per_epoch == 1
    shares = [sampler.share(0, rank) for rank in range(5)]
    assert [len(share) for share in shares] == [1, 1, 1, 0, 0]
    assert all(share.dtype == torch.int64 for share in shares), "an empty share indexes tensors, too"


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}])
def test_another_seed_or_epoch_is_another_order(change: dict[str, int]) -> None:
    base = Sampler(num_samples=100, batch_size=100, num_workers=1, seed=0).share(0, 0)
    other = Sampler(num_samples=100, batch_size=100, num_workers=1, seed=change.get("seed", 0)).share(
        change.get("epoch", 0), 0
    )
    assert not torch.equal(base, other)
    assert not torch.equal(base, torch.arange(100)), "the order is shuffled"
