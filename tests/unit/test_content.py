"""Digests of content: equal for equal content in every process, different for any change that a call could show."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from workbench.content import UnreadableContent, content_digest, digest_of
from workbench.user_file import load

FACTOR = 2.0


def uses_a_global(x: float) -> float:
    return FACTOR * x


def calls_another(x: float) -> float:
    return uses_a_global(x)


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def default(value: Any) -> Callable[[], Any]:
    return lambda value=value: value


def keyword(value: Any) -> Callable[[], Any]:
    def function(*, value: Any = value) -> Any:
        return value

    return function


@dataclass(frozen=True)
class Held:
    value: Any

    def method(self) -> Any:
        return self.value


def defined(value: Any) -> type:
    class Kind(nn.Module):
        constant = value

        def __init__(self) -> None:
            super().__init__()

        @property
        def shown(self) -> Any:
            return value

    return Kind


def numbered(value: Any) -> Any:
    return Enum("Numbered", {"ONE": value})


@pytest.mark.parametrize(
    "made",
    [
        closure,
        default,
        keyword,
        defined,
        numbered,
        lambda value: partial(max, value),
        lambda value: partial(max, key=value),
        lambda value: Held(value).method,
        lambda value: lru_cache(closure(value)),
        lambda value: closure(closure(value)),
        lambda value: nn.Sequential(OrderedDict(layer=nn.Linear(2, 2), other=nn.Dropout(value / 10))),
        lambda value: torch.tensor([1.0, value]),
        lambda value: np.array([1.0, value]),
        lambda value: {"a": [1, (value,)]},
        lambda value: {1, "a", value},
        lambda value: partial(torch.optim.SGD, lr=value),
        lambda value: torch.Generator().manual_seed(value),
        lambda value: wb.SynchronousSGD(collective=wb.collectives.Ring(chunks=value)),
        lambda value: wb.problems.digits_mlp(hidden=value).model,
    ],
)
def test_content_counts(made: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    first = made(3)
    torch.manual_seed(0)
    assert content_digest(first) == content_digest(made(3) if not isinstance(first, nn.Module) else first)
    torch.manual_seed(0)
    assert content_digest(first) != content_digest(made(4))


def test_what_a_function_reads_from_its_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = content_digest(calls_another)
    assert content_digest(calls_another) == before
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert content_digest(calls_another) != before


def test_the_code_of_a_users_modules_counts_and_not_their_place(tmp_path: Path) -> None:
    def written(folder: str, body: str) -> str:
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir()
        file.write_text(
            f"import torch\n\ndef helper(x):\n    return {body}\n\ndef loss(x):\n    return torch.exp(helper(x))\n"
        )
        return content_digest(load(f"{file}:loss", "loss", callable))

    assert written("one", "x + 1") == written("two", "x + 1") != written("three", "x + 2")


def test_it_is_equal_in_all_processes() -> None:
    """Also of sets, whose order depends on the process."""
    code = "from tests.unit.test_content import *; print(content_digest(in_a_set, Held({'a', 'b', 'c'}), numbered(1)))"
    found = set()
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": "."}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


def in_a_set(name: str) -> bool:
    return name in {"a", "b", "c", "d"}


def test_a_cycle_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert content_digest(loop) == content_digest(loop)

    def recursive(n: int) -> int:
        return n and recursive(n - 1)

    assert content_digest(recursive) == content_digest(recursive)


@pytest.mark.parametrize("value", [threading.Lock(), (one for one in ()), closure(threading.Lock())])
def test_what_cannot_be_read_is_said(value: Any) -> None:
    with pytest.raises(UnreadableContent, match=r"lock|generator"):
        content_digest(value)


def test_functions_of_packages_count_by_name_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (torch.relu, len, torch.nn.functional.cross_entropy, torch.float32, np.tanh, wb.PipeSGD)
    assert len({content_digest(one) for one in known}) == len(known)


_log: list[float] = []


def test_a_log_that_a_function_keeps_need_not_count() -> None:
    """A run's record is compared after its functions have run."""

    def logging(rate: float) -> float:
        _log.append(rate)
        return scale * rate

    scale = 2.0
    strict, tolerant = digest_of(logging), digest_of(logging, logs=False)
    logging(0.1)
    assert digest_of(logging) != strict and digest_of(logging, logs=False) == tolerant
    scale = 3.0
    assert digest_of(logging, logs=False) != tolerant
