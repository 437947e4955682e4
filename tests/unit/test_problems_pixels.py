"""The generative model: causal, a distribution, and judged by the same loss and accuracy as a classifier."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import workbench as wb
from workbench import problems
from workbench.costs import Compute
from workbench.errors import ConfigError
from workbench.problems.base import accuracy
from workbench.problems.loading import fetch
from workbench.problems.pixels import MaskedConv2d, PixelCNN


def randomised(channels: int, levels: int, width: int = 12, blocks: int = 2, kernel: int = 5) -> PixelCNN:
    """A model in which no weight is zero but by its mask, in double precision."""
    torch.manual_seed(0)
    model = PixelCNN(channels, levels, width, blocks, kernel, torch.float64)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.4)
    return model


@pytest.mark.parametrize(("channels", "side"), [(1, 5), (3, 4)])
def test_no_dimension_sees_itself_or_what_comes_after(channels: int, side: int) -> None:
    model = randomised(channels, levels=4)
    image = torch.rand(1, channels, side, side, dtype=torch.float64, requires_grad=True)
    order = [
        (row * side + column) * channels + colour
        for colour in range(channels)
        for row in range(side)
        for column in range(side)
    ]
    # Of each dimension in the order in which they are foretold
    place = torch.tensor(order).reshape(channels, side, side)
    scores = model(image)
    seen = 0
    for colour, row, column in itertools.product(range(channels), range(side), range(side)):
        total = (scores[0, :, colour, row, column] * torch.tensor([1.0, 2.0, 3.0, 5.0])).sum()
        (grad,) = torch.autograd.grad(total, image, retain_graph=True)
        depends = grad[0] != 0
        assert not (depends & (place >= place[colour, row, column])).any()
        seen += int(depends.sum())
    assert seen > place.numel() ** 2 / 8, "and of what comes before it sees a good part"


def test_an_unmasked_kernel_would_be_found_out() -> None:
    model = randomised(1, levels=4)
    model.first.mask.fill_(1)
    image = torch.rand(1, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(model(image)[0, :, 0, 2, 2].pow(2).sum(), image)
    assert grad[0, 0, 2, 2] != 0


@pytest.mark.parametrize(("channels", "side", "levels"), [(1, 2, 3), (2, 1, 4), (3, 1, 3)])
def test_the_likelihoods_of_all_images_sum_to_one(channels: int, side: int, levels: int) -> None:
    model = randomised(channels, levels)
    every = torch.tensor(list(itertools.product(range(levels), repeat=channels * side * side))).reshape(
        -1, channels, side, side
    )
    problem = problems.digits_pixelcnn()
    with torch.no_grad():
        nats = [float(problem.batch_loss(model, (image[None], image[None]))) * image.numel() for image in every]
    likelihoods = [math.exp(-value) for value in nats]
    assert math.fsum(likelihoods) == pytest.approx(1, rel=1e-12)
    assert max(likelihoods) > 3 * min(likelihoods), "they are not all the same"


def test_at_the_start_every_level_is_as_likely() -> None:
    problem = problems.digits_pixelcnn()
    batch = fetch(problem.test_data(), [0, 1, 2])
    assert float(problem.batch_loss(problem.model(), batch).detach()) == pytest.approx(math.log(17), rel=1e-6)
    right, judged = accuracy(problem.model(), batch)
    assert judged == 3 * 64 and 0 <= int(right) <= judged


def test_the_digits_are_their_seventeen_levels() -> None:
    levels, targets = problems.digits_pixelcnn().train_data().tensors
    assert levels.shape == (1437, 1, 8, 8) and torch.equal(levels, targets)
    assert levels.unique().tolist() == list(range(17))


def test_colours_are_merged_into_fewer_levels() -> None:
    fine, coarse = (problems.cifar10_pixelcnn(synthetic=True, levels=levels, width=6, blocks=1) for levels in (256, 8))
    levels, targets = fetch(coarse.train_data(), [0, 1])
    assert torch.equal(levels, fetch(fine.train_data(), [0, 1])[0] // 32)
    assert levels.dtype == torch.uint8 and targets.dtype == torch.int64
    assert coarse.model()(levels).shape == (2, 8, 3, 32, 32)


def test_masks_of_a_kernel_are_the_papers() -> None:
    first = MaskedConv2d("A", 1, 1, 3, 1, torch.float32).mask[0, 0]
    inner = MaskedConv2d("B", 1, 1, 3, 1, torch.float32).mask[0, 0]
    assert first.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert inner.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    middle = MaskedConv2d("A", 3, 3, 1, 3, torch.float32).mask[:, :, 0, 0]
    assert middle.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]], "red sees none of its pixel, green red, blue both"


def test_training_lowers_the_test_likelihood_on_simulated_workers() -> None:
    problem = problems.digits_pixelcnn(width=8, blocks=1)
    run = wb.simulate(
        wb.BackupSGD(backups=1),
        problem,
        workers=3,
        steps=40,
        evaluate_every=20,
        network="free",
        compute=Compute(forward_s=0.3, backward_s=0.7),
    )
    losses = [row["test_loss"] for row in run.evaluations()]
    assert losses[-1] < 0.9 * math.log(17) and 0 < run.evaluations()[-1]["accuracy"] < 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits-pixelcnn", {"kernel": 4}, "give an odd size, such as 5"),
        ("digits-pixelcnn", {"width": 7}, "width=7 is not a multiple of 2: choose width=6"),
        ("cifar10-pixelcnn", {"synthetic": True, "levels": 10}, "a divisor of 256"),
        ("cifar10-pixelcnn", {"synthetic": True, "folder": "x"}, "give one of the two"),
        ("cifar10-pixelcnn", {"synthetic": True, "width": 8}, "width=8 is not a multiple of 6: choose width=6"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_fix(name: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        problems.get(name, **options)
