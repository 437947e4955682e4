"""Measure messages of several sizes on the same ranks, for costs that one run's trace cannot separate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, final

import torch
from torch import Generator, Tensor

from workbench import codecs
from workbench.calibration.model import Calibration
from workbench.calibration.parts import Estimate
from workbench.calibration.record import as_tuples
from workbench.codecs import Codec
from workbench.collectives import native_bytes
from workbench.runtimes.rank.main import transport_here
from workbench.runtimes.transport.base import CLOCK_TAG, Deadline, Handle, Transport

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # bytes
LOCAL_BYTES = 1 << 22  # float32 values to sum, encode and decode
ROUNDS = 7
LOST_WORK = 256  # side of the matrices whose product is one piece of compute


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measurements, equal on all ranks: medians over rounds, then means over ranks.

    Attributes:
        num_workers: number of ranks.
        sums: (bytes of the value, seconds) of the library's own all-reduce.
        messages: (bytes, seconds) of a send to the next rank and a receive from the previous rank at the same time, as
            in a ring.
        sum_s_per_byte: seconds to add a byte of float32 values.
        codecs: (name, seconds to encode a byte of float32 values, to decode one).
        cpu_s_per_byte: core seconds for a byte that a rank sends, at both ends together.
    """

    num_workers: int
    sums: tuple[tuple[int, float], ...]
    messages: tuple[tuple[int, float], ...]
    sum_s_per_byte: float
    codecs: tuple[tuple[str, float, float], ...]
    cpu_s_per_byte: float

    def as_record(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Make a probe from `as_record`."""
        return cls(**{name: as_tuples(value) for name, value in record.items()})

    @property
    def sum_latency_s(self) -> float:
        """alpha of a hop: from the shortest sum, minus the time of its few bytes."""
        return self.sums[0][1] / max(1, 2 * (self.num_workers - 1))

    @property
    def message_latency_s(self) -> float:
        """alpha of a message."""
        return self.messages[0][1]

    @property
    def s_per_byte(self) -> float:
        """beta: from the longest sum."""
        size, seconds = self.sums[-1]
        sent = native_bytes(self.num_workers, size)
        return max(seconds - 2 * (self.num_workers - 1) * self.sum_latency_s, 1e-12) / sent


def probe(transport: Transport, deadline: Callable[[str], Deadline], names: Sequence[str] = ("truncate16",)) -> Probe:
    """Measure on all ranks of a transport. This takes one or two seconds on a fast network.

    Args:
        deadline: makes the deadline of a wait.
        names: codecs to measure.
    """
    rank, num_workers = transport.rank, transport.num_workers

    def rounds(once: Callable[[], Any]) -> float:
        taken = []
        for _ in range(ROUNDS):
            transport.barrier(deadline("all ranks of the probe"))
            begin = time.perf_counter()
            once()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[1:])

    def all_reduce(value: Tensor) -> None:
        transport.all_reduce(value, deadline("a sum of the probe"))

    def exchange(message: Tensor) -> None:
        into = torch.empty_like(message)
        pending = [transport.start_recv((rank - 1) % num_workers, into, CLOCK_TAG)]
        pending.append(transport.start_send((rank + 1) % num_workers, message, CLOCK_TAG))
        for handle in pending:
            handle.wait(deadline("a message of the probe"))

    mine: list[float] = []
    if num_workers > 1:
        mine += [rounds(lambda size=size: all_reduce(torch.ones(size // 4))) for size in SIZES]  # type: ignore[misc]
        mine += [rounds(lambda size=size: exchange(torch.ones(size, dtype=torch.uint8))) for size in SIZES]  # type: ignore[misc]
        stolen = _stolen_s_per_byte(transport, deadline)
        mine.append(max(stolen, _cpu_s_per_byte(num_workers, all_reduce)))
    values, other = torch.randn(LOCAL_BYTES // 4), torch.randn(LOCAL_BYTES // 4)
    mine.append(rounds(lambda: values.add_(other)) / LOCAL_BYTES)
    for name in names:
        encode_s, decode_s = _codec_seconds(codecs.get(name), other, rounds)
        mine += [encode_s / LOCAL_BYTES, decode_s / LOCAL_BYTES]
    texts = transport.gather_texts(" ".join(map(repr, mine)), deadline("all ranks to end the probe"))
    mean = [statistics.fmean(column) for column in zip(*(map(float, text.split()) for text in texts), strict=True)]
    num = len(SIZES) if num_workers > 1 else 0
    rest = iter(mean[2 * num :])
    cpu = next(rest) if num else 0.0
    return Probe(
        num_workers=num_workers,
        sums=tuple(zip(SIZES, mean[:num], strict=False)),
        messages=tuple(zip(SIZES, mean[num : 2 * num], strict=False)),
        cpu_s_per_byte=cpu,
        sum_s_per_byte=next(rest),
        codecs=tuple((name, next(rest), next(rest)) for name in names),
    )


def probe_here(names: Sequence[str] = (), timeout_s: float = 60.0) -> Probe:
    """Run `probe` on the ranks of the world in which this process was started; all of them must call it."""
    transport = transport_here(timeout_s)
    try:
        return probe(transport, lambda what: Deadline(what, transport.peer_failure, timeout_s), names)
    finally:
        transport.close()


def _stolen_s_per_byte(transport: Transport, deadline: Callable[[str], Deadline]) -> float:
    """Return the seconds of compute that a rank loses during a sum, for each byte that it sends.

    They include costs that the process's CPU time does not show (the kernel's work on packets, caches). The result is 0
    if the library makes no progress in the background.
    """
    left, right = torch.randn(LOST_WORK, LOST_WORK), torch.randn(LOST_WORK, LOST_WORK)

    def pieces(handle: Handle | None, seconds: float) -> tuple[int, float]:
        begin, done = time.perf_counter(), 0
        while (not handle.poll()) if handle is not None else time.perf_counter() - begin < seconds:
            torch.mm(left, right)
            done += 1
        return done, time.perf_counter() - begin

    value, lost = torch.ones(SIZES[-1] // 4), []
    for _ in range(ROUNDS):
        transport.barrier(deadline("all ranks of the probe"))
        handle = transport.start_all_reduce(value)
        if handle is None:
            return 0.0
        beside, seconds = pieces(handle, 0.0)
        handle.wait(deadline("a sum of the probe"))
        transport.barrier(deadline("all ranks of the probe"))
        alone, calm_s = pieces(None, min(seconds, 0.25))
        lost.append(seconds - beside * calm_s / max(alone, 1))
    return max(statistics.median(lost), 0.0) / native_bytes(transport.num_workers, SIZES[-1])


def _cpu_s_per_byte(num_workers: int, all_reduce: Callable[[Tensor], None]) -> float:
    value = torch.ones(SIZES[-1] // 4)
    begin = time.process_time()
    for _ in range(ROUNDS):
        all_reduce(value)
    return (time.process_time() - begin) / ROUNDS / native_bytes(num_workers, SIZES[-1])


def _codec_seconds(codec: Codec, values: Tensor, rounds: Callable[[Callable[[], Any]], float]) -> tuple[float, float]:
    noise = Generator().manual_seed(0) if codec.stochastic else None
    coded = codec.encode(values, noise)
    return rounds(lambda: codec.encode(values, noise)), rounds(lambda: codec.decode(coded, values))


def with_probe(calibration: Calibration, found: Probe) -> Calibration:
    """Add the probe's results to a calibration: latencies, summing, codecs, core time of communication.

    beta is still that of the run, because the run's message sizes matter, but corrected by the measured latency.
    """
    line, p = calibration.line, found.num_workers
    if p < 2:
        return replace(
            calibration, line=replace(line, sum_s_per_byte=Estimate(found.sum_s_per_byte), codecs=found.codecs)
        )
    per_byte = line.s_per_byte
    before = line.latency_s.value
    if calibration.origin.num_workers > 1 and per_byte.value > 0:
        message_bytes = line.message_bytes or calibration.shapes.num_bytes / calibration.origin.num_workers
        least = 0.5 * per_byte.value
        if line.message_bytes is not None:  # latency may be most of the time of small messages
            least = min(least, found.s_per_byte)
        beta = max(per_byte.value - (found.sum_latency_s - before) / message_bytes, least)
        per_byte = Estimate(beta, per_byte.error)
    else:
        per_byte = Estimate(found.s_per_byte)
    alpha, message = Estimate(found.sum_latency_s), Estimate(found.message_latency_s)
    less = line.s_per_byte.value - per_byte.value
    draws = tuple(
        {
            **draw,
            "latency_s": alpha.value,
            "message_latency_s": message.value,
            "s_per_byte": max(beta - less, 0.5 * per_byte.value),
        }
        for draw in calibration.draws
        for beta in (draw.get("s_per_byte", line.s_per_byte.value),)
    )
    probed = replace(
        calibration,
        line=replace(
            line,
            latency_s=alpha,
            message_latency_s=message,
            s_per_byte=per_byte,
            sum_s_per_byte=Estimate(found.sum_s_per_byte),
            codecs=found.codecs,
            message_bytes=None,
            latency_limit_s=None,
        ),
        host=replace(calibration.host, cpu_s_per_byte=found.cpu_s_per_byte),
        draws=draws,
        notes=(
            *(note for note in calibration.notes if "--probe" not in note and "gamma" not in note),
            "latencies, gamma and codecs: by the probe",
        ),
    )
    return without_hold_up(probed)


def without_hold_up(calibration: Calibration) -> Calibration:
    """Limit the latency of a hop in the library's own sums to that of a message that Python handles.

    A hop of the library needs less handling than such a message. If its latency was measured as longer, other work on a
    busy machine delayed the shortest sum. The excess is then added to beta.
    """
    line, num_workers = calibration.line, calibration.origin.num_workers
    held_up_s = line.latency_s.value - line.message_latency_s.value
    if held_up_s <= 0 or num_workers < 2:
        return calibration
    sent = native_bytes(num_workers, calibration.shapes.num_bytes)
    wire = 2 * (num_workers - 1) * held_up_s / sent
    beta = line.s_per_byte.value + wire
    alpha = line.message_latency_s
    line = replace(line, latency_s=alpha, s_per_byte=Estimate(beta, line.s_per_byte.error))
    return replace(
        calibration,
        line=line,
        draws=tuple(
            {
                **draw,
                "latency_s": alpha.value,
                "s_per_byte": draw.get("s_per_byte", line.s_per_byte.value - wire) + wire,
            }
            for draw in calibration.draws
        ),
    )
