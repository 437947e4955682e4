"""A codec's seconds are per byte of float32 values, and a process keeps its number of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.errors import ConfigError
from workbench.papers.studies import codec_times
from workbench.papers.studies.codec_times import normal_values, seconds_per_byte


class Timed:
    """A codec with a clock of its own: 2 s to encode, 1 s to decode, and 30 s more on its first call."""

    def __init__(self) -> None:
        self.calls, self.now_s = 0, 0.0

    def encode(self, values: torch.Tensor, _: Any) -> torch.Tensor:
        self.calls += 1
        self.now_s += 2.0 if self.calls > 1 else 32.0
        assert torch.get_num_threads() == 1
        return values

    def decode(self, wire: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        self.now_s += 1.0
        return wire


def test_seconds_are_per_byte_and_without_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, codec = torch.get_num_threads(), Timed()
    monkeypatch.setattr(codec_times, "_now_s", lambda _: codec.now_s)
    found = seconds_per_byte(codec, torch.zeros(1000), repeats=1)  # type: ignore[arg-type]
    assert found == (2.0 / 4000, 1.0 / 4000)
    assert codec.calls == 2
    assert torch.get_num_threads() == threads


def test_values_depend_on_the_seed_alone() -> None:
    assert torch.equal(normal_values(5, 1), normal_values(5, 1))
    assert not torch.equal(normal_values(5, 1), normal_values(5, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        normal_values(5, 1, "cuda")
