"""SignSGD: votes, ties, momenta, and ranks that do not vote."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workbench.algorithms import SignSGD
from workbench.algorithms.sign_sgd import Votes
from workbench.errors import ConfigError
from workbench.gradients import WEIGHT, Gradient, build_layout
from workbench.runtimes.reference import ReferenceRuntime

LR = 0.5
SIGNS = torch.tensor(
    [[1.0, 1, -1, 0, 1, 0], [1, -1, -1, 0, -1, 0], [-5, -1, 9, 0, 0, 2]], dtype=torch.float64
)  # of each rank; magnitudes do not count


def run(algorithm: SignSGD, gradients: Tensor, steps: int = 1) -> ReferenceRuntime:
    return ReferenceRuntime(
        algorithm, len(gradients), lambda rank, step, w: gradients[rank], lr=LR, start=0.0, sizes=(2, 3, 1)
    ).run(steps)


def test_each_coordinate_moves_by_lr_as_the_majority_votes() -> None:
    """A zero is no vote, and a tie (coordinate 4) moves nothing."""
    found = run(SignSGD(momentum=0.0), SIGNS, steps=2)
    for rank in found.ranks:
        assert [seen.tolist() for seen in rank.seen] == [[-0.5, 0.5, 0.5, 0, 0, -0.5], [-1, 1, 1, 0, 0, -1]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("beta", [0.0, 0.6, 0.9])
def test_it_is_the_formula_in_numpy(num_ranks: int, beta: float) -> None:
    """v_i <- beta v_i + (1 - beta) g_i; w <- w - lr sign(sum_i sign(v_i)), with gradients that depend on w."""
    rng = np.random.default_rng(num_ranks)
    targets = rng.standard_normal((num_ranks, 6))
    noise = rng.standard_normal((num_ranks, 12, 6))

    def gradient(rank: int, step: int, w: Tensor) -> Tensor:
        return w - torch.from_numpy(targets[rank] + noise[rank, step])

    found = ReferenceRuntime(SignSGD(momentum=beta), num_ranks, gradient, lr=0.05, start=0.0).run(12)
    w, momenta = np.zeros(6), np.zeros((num_ranks, 6))
    for step in range(12):
        momenta = beta * momenta + (1 - beta) * (w - targets - noise[:, step])
        w = w - 0.05 * np.sign(np.sign(momenta).sum(0))
        for rank in found.ranks:
            assert np.allclose(rank.seen[step].numpy(), w, rtol=0, atol=1e-14)


def gradient_of(values: list[float], weight: float) -> Gradient:
    layout = build_layout([("w", nn.Parameter(torch.zeros(len(values))))])
    gradient = Gradient(torch.zeros(layout.numel), layout, step=0, version=0)
    gradient.body().copy_(torch.tensor(values))
    gradient.tail()[WEIGHT] = weight
    return gradient


def test_a_rank_without_samples_does_not_vote_and_keeps_its_momentum() -> None:
    momentum, gradient = torch.tensor([1.0, -1.0]), gradient_of([0.0, 0.0], 0.0)
    newest = SignSGD()._vote(gradient, momentum)
    assert gradient.body().tolist() == [0, 0] and newest.tolist() == [1, -1]


def test_a_momentum_is_of_a_ranks_mean_whatever_its_weight() -> None:
    """A share of a quarter of the batch with the gradient 4 counts as 4, not as 1."""
    momentum, gradient = torch.tensor([-2.0]), gradient_of([1.0], 0.25)
    newest = SignSGD(momentum=0.5)._vote(gradient, momentum)
    assert newest.tolist() == [1.0] and gradient.body().tolist() == [1.0]


def test_what_is_not_finite_stays_visible_and_out_of_the_momentum() -> None:
    momentum, gradient = torch.zeros(3), gradient_of([float("inf"), 1.0, -1.0], 1.0)
    assert SignSGD()._vote(gradient, momentum).tolist() == [0, 0, 0]
    codec = Votes()
    for values in (gradient.body(), torch.tensor([float("nan"), 1, -1]), torch.tensor([-float("inf"), 1, -1])):
        decoded = codec.decode(codec.encode(values), values)
        assert bool(decoded[0].isnan()) and decoded[1:].tolist() == [1, -1]


def test_votes_are_two_bits() -> None:
    values = torch.tensor([3.0, 0.0, -2.0, 1e-45, -0.0])
    wire = Votes().encode(values)
    assert wire.numel() == Votes().wire_bytes(5) == 2
    assert Votes().decode(wire, values).tolist() == [1, 0, -1, 1, 0]


@pytest.mark.parametrize("momentum", [1.0, -0.1, True])
def test_a_momentum_out_of_its_range_is_refused(momentum: float) -> None:
    with pytest.raises(ConfigError, match="from 0 to below 1"):
        SignSGD(momentum=momentum)
