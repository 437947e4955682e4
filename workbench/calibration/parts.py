"""The parts of a calibration: numbers with errors, shapes, pace, line, host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from workbench.costs import Stragglers
from workbench.errors import ConfigError
from workbench.problems.base import Problem

LEAST_S_PER_BYTE = 1e-15


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its standard error (NaN: the number was given, not fitted)."""

    value: float
    error: float = float("nan")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of a calibration: the record, its algorithm, runtime, number of ranks and number of steps."""

    source: str
    algorithm: str
    runtime: str
    num_workers: int
    num_steps: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The model: (name, shape) of each parameter in order of registration, bytes of an element, samples of a worker."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    batch_size: int
    itemsize: int = 4

    def problem(self, num_samples: int) -> Problem:
        """Return a problem with these shapes and no values, for timing-only simulations."""
        return Problem(
            model=self._module,
            loss=_no_loss,
            train=_Samples(num_samples),
            name="shapes",
            correct=None,
            batch_size=self.batch_size,
        )

    def _module(self) -> nn.Module:
        # 16-bit gradients are summed as float32
        dtype = {2: torch.float32, 4: torch.float32, 8: torch.float64}[self.itemsize]
        return nn.ParameterList(
            [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for _, shape in self.parameters]
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of one gradient, without the tails of its buckets."""
        return sum(_numel(shape) for _, shape in self.parameters) * max(4, self.itemsize)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of one rank's step, if the rank has a core for each of its threads.

    Attributes:
        other_s: time of each step outside compute and communication: fetching the minibatch, bookkeeping.
        stragglers: factors of forward and backward; `fit` says how they were chosen.
        forward_shares, backward_shares: see `costs.Compute`; empty: in proportion to the elements.
    """

    forward_s: Estimate
    backward_s: Estimate
    update_s: Estimate
    other_s: Estimate
    stragglers: tuple[Stragglers, ...] = ()
    fit: str = ""
    forward_shares: tuple[float, ...] = ()
    backward_shares: tuple[float, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The costs of the network.

    Attributes:
        latency_s: alpha of a hop in the library's own sums.
        message_latency_s: alpha of a message that an algorithm sends itself, with its handling in Python.
        s_per_byte: beta.
        sum_s_per_byte: gamma, for float32 values.
        codecs: (name, seconds to encode a byte of float32 values, to decode one).
        line_bytes_per_s: nominal rate of the link, if known. 1 / beta is lower, because headers take a share of it.
        message_bytes: size of the run's messages, if all have one size and the latency was not given. Then only
            alpha + message_bytes beta is known.
        latency_limit_s: the largest alpha that is possible then.
    """

    latency_s: Estimate
    message_latency_s: Estimate
    s_per_byte: Estimate
    sum_s_per_byte: Estimate
    codecs: tuple[tuple[str, float, float], ...] = ()
    line_bytes_per_s: float | None = None
    message_bytes: float | None = None
    latency_limit_s: float | None = None

    @property
    def efficiency(self) -> float:
        """The share of the link's nominal rate that carries gradients; 1 if the rate is not known."""
        return 1.0 if self.line_bytes_per_s is None else 1 / (self.s_per_byte.value * self.line_bytes_per_s)

    def with_largest_latency(self) -> Line:
        """Return the other limit of what messages of one size allow: the largest alpha, and beta for the same times."""
        if self.message_bytes is None or self.latency_limit_s is None:
            return self
        alpha = Estimate(self.latency_limit_s)
        more_s = alpha.value - self.latency_s.value
        beta = max(self.s_per_byte.value - more_s / self.message_bytes, LEAST_S_PER_BYTE)
        nominal = None if self.line_bytes_per_s is None else max(self.line_bytes_per_s, 1 / beta)
        return replace(
            self,
            latency_s=alpha,
            message_latency_s=alpha,
            s_per_byte=Estimate(beta),
            line_bytes_per_s=nominal,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Cores that all ranks of a run share, threads of a rank, and core seconds for a byte sent, at both ends together.

    `cores` is None if ranks share no cores (separate machines).
    """

    cores: float | None = None
    threads: int = 1
    cpu_s_per_byte: float = 0.0


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _no_loss(*_: Any) -> torch.Tensor:
    raise ConfigError("a calibration has shapes but no data: use it with timing_only=True")


@final
@dataclass(frozen=True, slots=True)
class _Samples:
    """A number of samples without values."""

    num: int

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)
