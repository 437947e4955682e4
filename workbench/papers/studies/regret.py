"""The regret of a convex training with late gradients, and its bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from workbench import problems
from workbench.algorithms import SerialSGD
from workbench.problems.base import Problem, Sampler
from workbench.runtimes.simulator.simulate import simulate

BATCH = 16
BEST_STEPS, BEST_LR, BEST_MOMENTUM = 400, 0.5, 0.9  # of the search for the best fixed parameters


def projected_sgd(parameters: Iterable[nn.Parameter], *, radius: float, **options: Any) -> torch.optim.SGD:
    """Return SGD with a projection onto the ball of this radius around 0 after each step."""
    optimizer = torch.optim.SGD(parameters, **options)
    optimizer.register_step_post_hook(partial(_project, radius))
    return optimizer


@torch.no_grad()
def _project(radius: float, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    norm = math.sqrt(sum(float((item**2).sum()) for item in parameters))
    for item in parameters:
        item.div_(max(1.0, norm / radius))


@final
@dataclass(frozen=True, slots=True)
class RegressionInBall:
    """Softmax regression on the digits, with parameters in a ball around 0: convex, and gradients are bounded.

    Attributes:
        radius: of the ball.
        problem: the regression, in float64.
    """

    radius: float
    problem: Problem = field(default_factory=lambda: problems.get("digits-softmax", dtype="float64"))

    def data(self) -> tuple[Tensor, Tensor]:
        """Return images and labels of the training data."""
        train = self.problem.train() if callable(self.problem.train) else self.problem.train
        return train[0], train[1]

    def largest_gradient(self) -> float:
        """Return G, a bound on the norm of every gradient.

        The gradient of a sample is (p - y) x^T, and p - y for the biases: at most sqrt(2) times the norm of (x, 1).
        """
        images, _ = self.data()
        return math.sqrt(2) * float(torch.sqrt((images.flatten(1) ** 2).sum(1) + 1).max())

    def bound(self, delay: int, steps: int) -> float:
        """Return D G sqrt((1 + 2 d) T)."""
        return 2 * self.radius * self.largest_gradient() * math.sqrt((1 + 2 * delay) * steps)

    def best_loss(self, steps: int, seed: int) -> float:
        """Return the least mean loss of fixed parameters in the ball, over the minibatches of a training."""
        images, labels = self.data()
        sampler, weights = Sampler(len(labels), BATCH, 1, seed), torch.zeros(len(labels), dtype=torch.float64)
        for step in range(steps):
            share = sampler.share(step, 0)
            weights[share] += 1 / (len(share) * steps)
        torch.manual_seed(0)
        model = self.problem.model()
        optimizer = projected_sgd(model.parameters(), radius=self.radius, lr=BEST_LR, momentum=BEST_MOMENTUM)
        loss = torch.tensor(math.nan)
        for _ in range(BEST_STEPS):
            optimizer.zero_grad()
            loss = weights @ torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    def regrets(self, delays: Sequence[int], steps: int, seeds: Sequence[int]) -> dict[int, list[float]]:
        """Return delay -> regret of a training for each seed.

        The regret is the sum of the losses before each update, minus that of the best fixed parameters. The step size
        is that of the bound, D / (G sqrt((1 + 2 d) T)).
        """
        best = [steps * self.best_loss(steps, seed) for seed in seeds]
        sums = {delay: [self._sum_of_losses(delay, steps, seed) for seed in seeds] for delay in delays}
        return {delay: [ours - least for ours, least in zip(found, best, strict=True)] for delay, found in sums.items()}

    def _sum_of_losses(self, delay: int, steps: int, seed: int) -> float:
        lr = 2 * self.radius / (self.largest_gradient() * math.sqrt((1 + 2 * delay) * steps))
        how: dict[str, Any] = {"steps": steps, "seed": seed, "batch_size": BATCH, "trace_steps": 0, "evaluate_every": 0}
        solver = partial(projected_sgd, radius=self.radius, lr=lr)
        run = simulate(SerialSGD(delay=delay), self.problem, workers=1, network="free", optimizer=solver, **how)
        return float(sum(row["loss"] for row in run.steps()))
