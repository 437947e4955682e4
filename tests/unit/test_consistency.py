"""Facts that ranks compare before their first step: the rank that differs, allowed differences, and digests of code and data."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from tests.laws import tiny
from workbench.algorithms import SynchronousSGD
from workbench.content import code_digest
from workbench.gradients import build_layout, trainable
from workbench.resources import PACKAGE
from workbench.runtimes.rank import fingerprint
from workbench.runtimes.rank.consistency import NOTED_DIFFERENCES, compare, facts_of_run, versions
from workbench.runtimes.rank.fingerprint import data_digest, package_digest
from workbench.settings import Settings


def facts(**changes: str) -> dict[str, str]:
    return {"torch": "2.9.0", "algorithm": "SynchronousSGD()", "parameter 0": "weight: (2, 3)", **changes}


def test_the_majority_is_right() -> None:
    odd = [facts(), facts(), facts(torch="2.8.0"), facts()]
    words = "rank 2 differs from ranks 0, 1 and 3: torch is '2.9.0' on ranks 0, 1 and 3, and '2.8.0' on rank 2"
    assert compare(odd) == {"torch": words}
    assert list(compare([facts(torch="2.8.0"), facts(), facts()])["torch"].split())[:2] == ["rank", "0"]


def test_of_two_the_first_is_right() -> None:
    assert compare([facts(), facts(torch="2.8.0")])["torch"].startswith(
        "rank 1 differs from rank 0: torch is '2.9.0' on rank 0"
    )


def test_what_is_missing_on_a_rank_is_named() -> None:
    found = compare([facts(), facts(), {**facts(), "parameter 1": "bias: (2,)"}])
    assert found == {
        "parameter 1": "rank 2 differs from ranks 0 and 1: parameter 1 is 'missing' on ranks 0 and 1, and 'bias: (2,)' on rank 2"
    }


def test_many_odd_ranks_are_counted() -> None:
    everyone = [facts(torch=f"2.{rank % 7}.0" if rank > 20 else "2.9.0") for rank in range(64)]
    words = compare(everyone)["torch"]
    assert (
        words.startswith("43 ranks (the first is 21) differ from 21 ranks (the first is 0): torch is '2.9.0'")
        and len(words) < 400
    )


def test_equal_ranks_agree() -> None:
    assert compare([facts()] * 5) == {}


def test_a_run_says_what_explains_the_rest_first() -> None:
    problem = tiny.problem()
    data = (problem.train_source(), problem.test_source())
    found = facts_of_run(SynchronousSGD(), problem, Settings(steps=3), build_layout(trainable(tiny.mlp())), data)
    assert list(found)[:3] == ["workbench", "torch", "build of torch"] and set(NOTED_DIFFERENCES) <= set(found)
    assert (
        found["samples"] == "23"
        and found["setting steps"] == "3"
        and found["parameter 2"].startswith("2.weight: (5, 7)")
    )
    assert versions()["workbench"].endswith(package_digest())


def test_one_other_number_is_other_data() -> None:
    x, y = tiny.data()
    plain = data_digest(TensorDataset(x, y))
    other = x.clone()
    other[22, 5] = torch.nextafter(other[22, 5], torch.tensor(9.0, dtype=torch.float64))
    assert data_digest(TensorDataset(x.clone(), y.clone())) == plain
    assert (
        len(
            {
                plain,
                data_digest(TensorDataset(other, y)),
                data_digest(TensorDataset(x.float(), y)),
                data_digest(TensorDataset(x[:22], y[:22])),
            }
        )
        == 4
    )
    assert data_digest(None) == "none"


def test_of_data_too_large_some_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "MAX_BYTES", 100)
    monkeypatch.setattr(fingerprint, "NUM_ROWS", 3)
    x, y = tiny.data()
    plain, other = data_digest(TensorDataset(x, y)), x.clone()
    other[[0, 11, 22]] += 1
    assert plain != data_digest(TensorDataset(other, y))


class Items(Dataset[Any]):
    """Samples of every kind, drawn by `make`."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return {"x": self.make(index), "name": [f"sample {index}", np.arange(index)], "label": index}


def test_data_that_are_loaded_are_told_by_some_items() -> None:
    plain = data_digest(Items(float))
    assert plain == data_digest(Items(float)) != data_digest(Items(lambda index: index + 0.5))
    before = torch.get_rng_state()
    assert "random" in data_digest(Items(lambda index: torch.rand(())))
    assert torch.equal(before, torch.get_rng_state()), "training would draw other numbers"


def test_data_that_cannot_be_read_say_why() -> None:
    def missing(index: int) -> None:
        raise FileNotFoundError(f"{index}.jpeg")

    assert data_digest(Items(missing)) == "cannot be read (FileNotFoundError: 0.jpeg)"


def test_code_is_told_apart_and_what_it_closes_over_is_not() -> None:
    def made(number: float) -> Any:
        return lambda x: x + number

    assert code_digest(made(1.0)) == code_digest(made(2.0)) != code_digest(lambda x: x - 1)
    assert code_digest(partial(tiny.FailsAt, None, 3)) == code_digest(tiny.FailsAt) != code_digest(tiny.TiedMLP)
    assert code_digest(tiny.mlp, None) != code_digest(tiny.dropout_mlp, None)


@pytest.mark.parametrize("file", ["ops.py", "algorithms/synchronous.py", "runtimes/rank/main.py"])
def test_the_digest_is_of_every_module(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(PACKAGE, tmp_path / "workbench", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fingerprint, "PACKAGE", tmp_path / "workbench")
    assert package_digest.__wrapped__() == (before := package_digest())
    (tmp_path / "workbench" / file).write_text("# another text\n")
    assert package_digest.__wrapped__() != before


class Shuffles(torch.utils.data.Sampler[int]):
    """An order for each epoch, from a generator that each process seeds on its own, or from torch's."""

    def __init__(self, own: torch.Generator | None = None) -> None:
        self.own = own

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23, generator=self.own).tolist())

    def __len__(self) -> int:
        return 23


@pytest.mark.parametrize(("own", "differs"), [(True, True), (False, False)])
def test_an_order_that_each_rank_draws_for_itself_is_found(own: bool, differs: bool) -> None:
    everyone = []
    for rank in range(2):
        sampler = Shuffles(torch.Generator().manual_seed(rank) if own else None)
        problem = tiny.problem(train=torch.utils.data.DataLoader(TensorDataset(*tiny.data()), sampler=sampler))
        data = (problem.train_source(), problem.test_source())
        layout = build_layout(trainable(tiny.mlp()))
        everyone.append(facts_of_run(SynchronousSGD(), problem, Settings(steps=1), layout, data))
    assert list(compare(everyone)) == (["order of the samples"] if differs else [])
