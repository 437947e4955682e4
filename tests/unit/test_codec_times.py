"""A codec's seconds are per byte of float32 values, and a process keeps its number of threads."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from workbench.errors import ConfigError
from workbench.papers.codec_times import normal_values, seconds_per_byte


class Sleeping:
    """A codec that sleeps: longer on its first call, for allocations."""

    encode_s, decode_s = 0.02, 0.01

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, values: torch.Tensor, _: Any) -> torch.Tensor:
        self.calls += 1
        time.sleep(self.encode_s if self.calls > 1 else 0.3)
        assert torch.get_num_threads() == 1
        return values

    def decode(self, wire: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        time.sleep(self.decode_s)
        return wire


def test_seconds_are_per_byte_and_without_the_first_call() -> None:
    threads, codec = torch.get_num_threads(), Sleeping()
    encode_s, decode_s = seconds_per_byte(codec, torch.zeros(1000), repeats=3)  # type: ignore[arg-type]
    assert codec.encode_s / 4000 <= encode_s < 0.25 / 4000
    assert codec.decode_s / 4000 <= decode_s < 0.25 / 4000
    assert codec.calls == 4
    assert torch.get_num_threads() == threads


def test_values_depend_on_the_seed_alone() -> None:
    assert torch.equal(normal_values(5, 1), normal_values(5, 1))
    assert not torch.equal(normal_values(5, 1), normal_values(5, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        normal_values(5, 1, "cuda")
