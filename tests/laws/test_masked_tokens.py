"""Test loss, accuracy and metrics: one number for the same weights, on any number of ranks, weighed as the loss divides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset

from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK, make_job, run_job, run_on_ranks
from workbench import simulate
from workbench.algorithms import DPSGD, SynchronousSGD
from workbench.callbacks import Callback
from workbench.errors import ConfigError
from workbench.problems import Problem
from workbench.program import Algorithm
from workbench.replica import local_training
from workbench.replica.local_training import LocalTraining
from workbench.settings import Settings
from workbench.trace.run import Run

T, V, N = 7, 5, 23
BATCH = 6  # of an evaluation
settings = Settings(steps=1, batch_size=4)


class Words(nn.Module):
    """(N, T) words -> (N, T, V) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, 4)
        self.head = nn.Linear(4, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def class_second(scores: Tensor, words: Tensor, **more: Any) -> Tensor:
    return cross_entropy(scores.transpose(1, 2), words, **more)


class ClassSecond(Words):
    """The order of dimensions of `cross_entropy`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


def data(mask: int = -100) -> tuple[Tensor, Tensor]:
    """Samples with 0 to T masked words, the long ones first."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randint(V, (2, N, T), generator=generator)
    lengths = torch.arange(N).flip(0) % (T + 1)
    return x, torch.where(torch.arange(T) < lengths[:, None], y, mask)


def evaluated(
    problem: Problem, num_ranks: int, monkeypatch: pytest.MonkeyPatch, batch: int = BATCH
) -> dict[str, float]:
    """Loss and accuracy at the initial weights, from the sums of each rank's share."""
    monkeypatch.setattr(local_training, "EVALUATION_BATCH", batch)
    worker = LocalTraining(SynchronousSGD(), problem, settings, 0, num_ranks, torch.device("cpu"))
    parts = [worker.evaluate(rank, num_ranks) for rank in range(num_ranks)]
    sums: dict[str, float] = {
        name: sum(part[name] or 0 for part in parts) for name in ("loss_sum", "loss_weight", "correct", "judged")
    }
    metrics = [part.get("metrics", {}).get("perplexity") for part in parts]
    found = {"loss": sums["loss_sum"] / sums["loss_weight"], "accuracy": sums["correct"] / sums["judged"]}
    if metrics[0] is not None:
        found["perplexity"] = sum(one[0] for one in metrics) / sum(one[1] for one in metrics)
    return found


def by_hand(problem: Problem, mask: int = -100, weight: Tensor | None = None) -> dict[str, float]:
    """The same, of all test data at once."""
    worker = LocalTraining(SynchronousSGD(), problem, settings, 0, 1, torch.device("cpu"))
    x, y = data(mask)
    with torch.no_grad():
        scores = Words.forward(worker.replica.model, x)  # type: ignore[arg-type]
        loss = cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=mask, weight=weight)
        kept = y != mask
        return {"loss": float(loss), "accuracy": float((scores.argmax(2) == y)[kept].double().mean())}


def sum_and_count(scores: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """What a metric returns if it is no mean over samples."""
    return class_second(scores, words, reduction="sum"), (words != -100).sum()


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
# loss, model, mask, class weights: what the loss divides by is seen from it, or from the targets
LOSSES: dict[str, tuple[Any, type[nn.Module], int, Tensor | None]] = {
    "cross_entropy": (cross_entropy, ClassSecond, -100, None),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), ClassSecond, -100, None),
    "a word of its own": (nn.CrossEntropyLoss(ignore_index=0), ClassSecond, 0, None),
    "a partial": (partial(cross_entropy, ignore_index=0), ClassSecond, 0, None),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), ClassSecond, -100, WEIGHTS),
    "a function of the user's": (class_second, Words, -100, None),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("batch", [1, BATCH, 256])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_masked_words_count_nothing(loss: str, batch: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function, model, mask, weight = LOSSES[loss]
    problem = Problem(model=model, loss=function, train=data(mask), test=data(mask))
    found = evaluated(problem, num_ranks, monkeypatch, batch)
    assert found == pytest.approx(by_hand(problem, mask, weight), rel=1e-5)


def test_metrics_may_say_what_they_divide_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexity's exponent: a sum over words and their number, in place of a mean over samples."""
    problem = Problem(model=Words, loss=class_second, train=data(), test=data(), metrics={"perplexity": sum_and_count})
    expected = by_hand(problem)
    for num_ranks in (1, 2, 3):
        found = evaluated(problem, num_ranks, monkeypatch)
        assert found["perplexity"] == pytest.approx(expected["loss"], rel=1e-5)


def test_what_is_not_seen_can_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of the whole batch; undeclared it is still one number on any number of ranks."""
    declared = Problem(
        model=Words,
        loss=lambda model, batch: class_second(model(batch[0]), batch[1]),
        whole_batch=True,
        loss_weight=lambda batch: (batch[1] != -100).sum(),
        train=data(),
        test=data(),
    )
    expected = by_hand(declared)
    assert evaluated(declared, 2, monkeypatch) == pytest.approx(expected, rel=1e-5)
    undeclared = replace(declared, loss_weight=None)
    numbers = [evaluated(undeclared, num_ranks, monkeypatch)["loss"] for num_ranks in (1, 2, 3, 5)]
    assert numbers == pytest.approx([numbers[0]] * 4, rel=1e-6)
    assert numbers[0] != pytest.approx(expected["loss"], rel=1e-5), "the law above can fail"


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*data(), strict=True)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_streams_too(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(model=Words, loss=class_second, train=data(), test=Lines())
    assert evaluated(problem, num_ranks, monkeypatch) == pytest.approx(by_hand(problem), rel=1e-5)


def test_real_ranks_have_the_same_number() -> None:
    problem = Problem(model=Words, loss=class_second, train=data(), test=data(), batch_size=8)
    how = Settings(steps=2, batch_size=8, evaluate_every=1, timeout_s=30, optimizer=partial(torch.optim.SGD, lr=1e-30))
    job = make_job("torch", 2, SynchronousSGD(), problem, how)
    run_on_ranks(run_job, job, 2)
    for row in Run.load(job.folder).evaluations():
        expected = by_hand(problem)
        assert [row["test_loss"], row["accuracy"]] == pytest.approx([expected["loss"], expected["accuracy"]], rel=1e-5)


# -- before the first step ---------------------------------------------------------------------------------------------


def wrong_metric(scores: Tensor, words: Tensor) -> Tensor:
    return (scores.argmax(1) == words).float().mean()


def squares(out: Tensor, y: Tensor) -> Tensor:
    return out.square().mean() + 0 * y.sum()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "accuracy of regression": ({"loss": squares, "test": (data()[0], torch.rand(N, 3))}, "correct=None"),
    "a metric": ({"metrics": {"share": wrong_metric}}, "cannot be judged: RuntimeError"),
    "what counts": ({"correct": lambda model, batch: model(batch[0]).argmax(2)}, "cannot be judged"),
    "the loss": ({"test": (torch.rand(N, T), data()[1])}, "model and loss cannot take the batch"),
    "no sample": ({"test": lambda rank, num_ranks: []}, "no samples"),
    "classes in two dimensions": ({"test": (data()[0][:, :V], data()[1][:, :V])}, "dimension 1 or the last one"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("runtime", ["one program", "many programs"])
def test_what_a_test_batch_shows_is_refused_before_the_first_step(case: str, runtime: str) -> None:
    changes, words = REFUSED[case]
    problem = Problem(**{"model": Words, "loss": class_second, "train": data(), "test": data(), **changes})
    algorithm = SynchronousSGD() if runtime == "one program" else DPSGD()
    seen: list[int] = []
    with pytest.raises(ConfigError, match=words):
        simulate(algorithm, problem, workers=2, steps=3, callbacks=[Counts(seen)])
    assert not seen


class Counts(Callback):
    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_step(self, row: Any) -> None:
        self.steps.append(row["step"])


class Draws(nn.Module):
    """Dropout, BatchNorm, a buffer that counts calls, and random numbers in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x + 0.1 * torch.randn_like(x)) + self.calls


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = tiny.data()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(6) + random.random() + np.random.rand(), self.y[index]  # noqa: NPY002


@pytest.mark.parametrize("algorithm", [SynchronousSGD(), DPSGD()], ids=["one program", "many programs"])
def test_the_numbers_are_those_without_it(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny.problem(Draws, train=Augmented(), test=Augmented())
    rows = []
    for rehearses in (True, False):
        if not rehearses:
            monkeypatch.setattr(LocalTraining, "_rehearse_evaluation", lambda _: None)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        run = simulate(algorithm, problem, workers=2, steps=4, evaluate_every=2, compute=COMPUTE, network=NETWORK)
        evaluations = [(row["test_loss"], row["accuracy"]) for row in run.evaluations()]
        drawn = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        rows.append(([row["loss"] for row in run.metrics[0] if "loss" in row], evaluations, drawn))
    assert rows[0] == rows[1]
