"""The table of the ranks' variables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("IPython", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench.kernel import variables
from workbench.kernel.variables import VariablesTable, describe, rank_variables


def row_of(monkeypatch: pytest.MonkeyPatch, *values: Any) -> dict[str, str]:
    """The row of a variable that has one of the values on each rank; a rank without a value has `...`."""
    of_ranks = []
    for value in values:
        names = {} if value is ... else {"x": value}
        shell = SimpleNamespace(user_ns={**names, "_hidden": 1, "np": np, "rank": 0}, user_ns_hidden={})
        monkeypatch.setattr("IPython.get_ipython", lambda shell=shell: shell)
        of_ranks.append(rank_variables())
    (row,) = VariablesTable(of_ranks).rows
    return row


@pytest.mark.parametrize(
    ("values", "equal"),
    [
        ((torch.ones(3), torch.ones(3)), "yes"),
        ((torch.ones(3), torch.ones(3), torch.zeros(3)), "no: 0-1 | 2"),
        ((torch.ones(3), torch.ones(4)), "no"),
        ((torch.ones(3), torch.ones(3).double()), "no"),
        ((torch.ones(4, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)[::2]), "yes"),
        ((np.ones((2, 2)), np.ones((2, 2)).T.copy()), "yes"),
        ((np.arange(2), np.arange(2) + 1), "no: 0 | 1"),
        ((1, 1), "yes"),
        ((1, True), "no"),
        (([1, {"a": "b"}], [1, {"a": "b"}]), "yes"),
        ((1, ..., 1), "only on 0,2"),
        ((object(), object()), "not compared"),
        ((torch.nn.Linear(2, 2),) * 2, "yes"),
        ((torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), "no: 0 | 1"),
        ((torch.tensor(float("nan")), torch.tensor(float("nan"))), "yes"),
    ],
)
def test_whether_the_ranks_have_the_same(monkeypatch: pytest.MonkeyPatch, values: tuple[Any, ...], equal: str) -> None:
    assert row_of(monkeypatch, *values)["equal"] == equal


def test_a_tensor_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(monkeypatch, torch.zeros(2, 3), torch.zeros(2, 4))
    assert row["shape"] == "[0] (2, 3), [1] (2, 4)"
    assert (row["type"], row["dtype"], row["device"]) == ("Tensor", "float32", "cpu")
    assert row["memory"] == "[0] 24 B, [1] 32 B"
    model = describe(torch.nn.Linear(2, 2))
    assert (model.type, model.shape, model.num_bytes) == ("Linear", "2 tensors", 24)


def test_an_object_that_cannot_be_described_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile(list[int]):
        def __len__(self) -> int:
            raise RuntimeError

    row = row_of(monkeypatch, Hostile(), Hostile())
    assert (row["type"], row["equal"]) == ("Hostile", "not compared")


def test_a_large_tensor_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "COMPARED_BYTES", 8)
    assert describe(torch.zeros(2)).digest and not describe(torch.zeros(3)).digest
    assert describe(np.zeros(1)).digest and not describe(np.zeros(2)).digest


def test_named_variables_are_all_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(user_ns={"x": 1, "y": 2, "rank": 0}, user_ns_hidden={})
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert set(rank_variables(["y", "rank"])) == {"y", "rank"} and set(rank_variables()) == {"x", "y"}


def test_the_table_is_text_and_html() -> None:
    table = VariablesTable([{"<x>": tuple(getattr(describe(3), name) for name in variables.Variable.__slots__)}])
    assert "<x>" in repr(table) and "&lt;x&gt;" in table._repr_html_()
    assert repr(VariablesTable([{}, {}])) == "no variables yet"
