"""Data sets of Hugging Face `datasets` as training data, with the real package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import workbench as wb
from tests.laws import tiny
from tests.laws.train import train
from workbench.problems.base import Problem
from workbench.problems.loading import Reading
from workbench.settings import Settings
from workbench.trace.run import Run

datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets: pip install 'sgd-workbench[datasets]'")

INPUTS, TARGETS = tiny.data()
HOW: dict[str, Any] = {"workers": 2, "steps": 8, "batch_size": 3, "evaluate_every": 4}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"].double()), batch["y"].long())


def correct(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(batch["x"].double()).argmax(1) == batch["y"]).sum(), len(batch["y"])


def problem(data: Any) -> Problem:
    return replace(
        tiny.problem(), train=data, test=as_dataset(), loss=loss, correct=correct, whole_batch=True, name="dicts"
    )


def as_dataset() -> Any:
    columns = {"x": INPUTS.tolist(), "y": TARGETS.tolist()}
    return datasets.Dataset.from_dict(columns).with_format("torch", dtype=torch.float64)


def rows() -> Iterator[dict[str, Any]]:
    for x, y in zip(INPUTS.tolist(), TARGETS.tolist(), strict=True):
        yield {"x": x, "y": y}


def as_stream() -> Any:
    return datasets.IterableDataset.from_generator(rows).with_format("torch")


def stacked(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        "x": torch.stack([item["x"].double() for item in items]),
        "y": torch.stack([item["y"].long() for item in items]),
    }


def plain() -> Problem:
    """The same samples as tensors."""
    names = ("x", "y")

    def as_dict(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return loss(model, dict(zip(names, batch, strict=True)))

    return replace(tiny.problem(), loss=as_dict, whole_batch=True, name="tuples")


def losses(run: Run) -> list[float]:
    return [float(one) for one in run.curve("steps", "loss")[1]]


def test_a_data_set_trains_as_its_tensors_do() -> None:
    run = wb.simulate(wb.SynchronousSGD(), problem(DataLoader(as_dataset(), shuffle=True, collate_fn=stacked)), **HOW)
    assert losses(run) == pytest.approx(losses(wb.simulate(wb.SynchronousSGD(), plain(), **HOW)), rel=1e-6)
    assert all(0 <= row["accuracy"] <= 1 for row in run.evaluations()) and len(run.evaluations()) == 2


def test_a_data_set_without_a_loader() -> None:
    """Items are dicts, which torch collates into a dict of tensors."""
    batch = problem(as_dataset()).train_source().some(4)
    assert torch.allclose(batch["x"], INPUTS[:4]) and batch["x"].shape == (4, tiny.NUM_FEATURES)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_divided_among_ranks_and_loader_processes(num_workers: int) -> None:
    source = problem(DataLoader(as_stream(), num_workers=num_workers, collate_fn=stacked)).train_source()
    part = source.batches(23)
    (batch, number), *more = part
    assert number == 23 and not more and torch.allclose(batch["x"], INPUTS, atol=1e-6)
    read = set()
    for rank in range(2):
        reader = source.reader(
            Reading(seed=0, rank=rank, num_ranks=2, batch_size=3, num_micro=1, share=torch.arange, num_steps=2)
        )
        read |= {tuple(item) for step in range(2) for batch, _ in reader.read(step) for item in batch["x"].tolist()}
        reader.close()
    assert read == {tuple(item) for item in stacked([*as_stream()])["x"][:12].tolist()}


def test_real_ranks_train_with_one() -> None:
    how = Settings(steps=6, batch_size=3, timeout_s=60, evaluate_every=0)
    data = problem(DataLoader(as_dataset(), shuffle=True, collate_fn=stacked))
    assert losses(train("torch", 2, wb.SynchronousSGD(), data, how).run) == losses(
        train("simulated", 2, wb.SynchronousSGD(), data, how).run
    )
