"""Codecs compared with a copy: bytes of float32 values per second on one thread, encoded, decoded, and summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import torch

from workbench.bench import BenchOptions
from workbench.bench.paired import Step, alternate
from workbench.bench.rows import Row, compare
from workbench.codecs import QSGD, Codec, Linear8, SharedInt, Sign, TopK, Truncate16, compiler, kernels
from workbench.units import MB

SIZES_MB = {25: 1, 1: 20}  # size -> consecutive repetitions
ASKED_MB = 25
CODECS: dict[Codec, float | None] = {  # codec -> required share of a copy's speed
    Truncate16(): 1 / 2,
    Truncate16(rounding="nearest"): 1 / 2,
    Linear8(): 1 / 3,
    Linear8(group=1024): 1 / 3,
    Linear8(rounding="stochastic"): None,
    QSGD(levels=1): None,
    QSGD(levels=7): None,
    QSGD(levels=127): None,
    TopK(fraction=0.01): None,
    TopK(fraction=0.1): None,
    Sign(): None,
    SharedInt(): None,
    SharedInt(bits=16): None,
}
OPERATIONS = ("encode", "decode", "decode and sum", "decode, sum and encode")
COMPILED = "compiled"
COMPILED_ASKED: dict[Codec, dict[str, float]] = {  # as CODECS, for each operation
    Truncate16(): {"decode, sum and encode": 0.8},
    Truncate16(rounding="nearest"): {"decode, sum and encode": 0.8},
    Linear8(): {"decode, sum and encode": 0.6},
    Linear8(group=1024): {"decode, sum and encode": 0.6},
    TopK(fraction=0.01): {"encode": 0.5},
    TopK(fraction=0.1): {},
}
GPU = torch.device("cuda")
GPU_SIZES_MB = {256: 20, 25: 100}
GPU_ASKED_MB = 256  # a smaller copy fits in a large cache, and ends before the next operation is queued
# summing 16-bit values moves 10 bytes per value, a copy moves 8
GPU_ASKED = {"encode": 0.8, "decode": 0.8, "decode, sum and encode": 0.8}
COPY = "a copy of the same bytes"


def run(how: BenchOptions) -> Iterator[Row]:
    """Measure each codec at each size, by torch's operations and compiled. For codecs that re-encode, also measure sums.

    If there is a GPU, also measure the codecs with kernels on it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for size_mb, block in SIZES_MB.items():
            for codec, case, asked in _cases(size_mb):
                if how.wanted(case):
                    with nullcontext() if COMPILED in case else kernels.torch_only():
                        times = alternate(steps_of(codec, int(size_mb * MB) // 4), how.rounds, block=block)
                    yield from _speeds(times, case, size_mb * MB, asked)
        if torch.cuda.is_available():
            yield from _on_gpu(how, torch.cuda.get_device_name(GPU))
    finally:
        torch.set_num_threads(threads)


def _cases(size_mb: int) -> Iterator[tuple[Codec, str, dict[str, float]]]:
    """Yield codec, case and required shares of a copy's speed: by torch's operations, then compiled."""
    for codec, asked in CODECS.items():
        plain = {} if asked is None or size_mb != ASKED_MB else dict.fromkeys(OPERATIONS, asked)
        yield codec, f"{size_mb} MB, {codec!r}", plain
        if codec in COMPILED_ASKED and compiler.library().functions is not None:
            case = f"{size_mb} MB, {codec!r}, {COMPILED}"
            yield codec, case, COMPILED_ASKED[codec] if size_mb == ASKED_MB else {}


def _on_gpu(how: BenchOptions, name: str) -> Iterator[Row]:
    """Measure on a GPU. Operations, like copies, are queued one after another, and the host waits once for all."""
    for size_mb, in_a_row in GPU_SIZES_MB.items():
        for codec in (Truncate16(), Truncate16(rounding="nearest"), Linear8(), Linear8(group=1024)):
            case = f"{size_mb} MB, {codec!r}, GPU: {name}"
            if how.wanted(case):
                steps = {
                    what: partial(_queue, step, in_a_row)
                    for what, step in steps_of(codec, int(size_mb * MB) // 4, GPU).items()
                }
                times = alternate(steps, how.rounds)
                yield from _speeds(times, case, in_a_row * size_mb * MB, GPU_ASKED if size_mb == GPU_ASKED_MB else {})


def _queue(step: Step, in_a_row: int) -> None:
    for _ in range(in_a_row):
        step()
    torch.cuda.synchronize(GPU)


def _speeds(
    times: dict[str, list[float]], case: str, num_bytes: float, asked: Mapping[str, float | None]
) -> Iterator[Row]:
    """Yield the speed of each operation, compared with the copy."""
    speeds = {name: [num_bytes / taken for taken in column] for name, column in times.items()}
    for name in list(speeds)[1:]:
        yield compare(
            speeds[name], speeds[COPY], case=case, what=name, over=COPY, unit="B/s", kind="limit", above=asked.get(name)
        )


def steps_of(codec: Codec, numel: int, device: torch.device | None = None) -> dict[str, Step]:
    """Return steps: a copy of `numel` values, and the codec's operations on them. All memory is allocated in advance.

    `device`: None for the CPU.
    """
    noise = torch.Generator(device or "cpu").manual_seed(0)
    values = torch.randn(numel, generator=noise, device=device)
    out, total, given = torch.empty_like(values), values.clone(), noise if codec.stochastic else None
    wire = codec.encode(values, given)
    steps: dict[str, Step] = {
        COPY: partial(out.copy_, values),
        "encode": partial(codec.encode_into, values, torch.empty_like(wire), given),
        "decode": partial(codec.decode_into, wire, out),
    }
    if codec.reencodes:
        steps["decode and sum"] = partial(codec.add, wire, total)
        steps["decode, sum and encode"] = partial(codec.encode_sum, wire, total, torch.empty_like(wire), given)
    return steps
