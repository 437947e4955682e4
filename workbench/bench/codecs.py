"""Codecs beside a copy: bytes of float32 values a second on one thread, encoded, decoded, and summed on the way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from workbench.bench import How
from workbench.bench.paired import Step, alternate
from workbench.bench.rows import Row, beside
from workbench.codecs import QSGD, Codec, Linear8, SharedInt, Sign, TopK, Truncate16
from workbench.units import MB

SIZES_MB = {25: 1, 1: 20}  # -> how many times in a row
ASKED_MB = 25
CODECS: dict[Codec, float | None] = {  # -> share of a copy's speed that is asked of it
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
COPY = "a copy of the same bytes"


def run(how: How) -> Iterator[Row]:
    """Each codec at each size; what is encoded anew in a ring's hops is also summed on the way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for size_mb, block in SIZES_MB.items():
            for codec, asked in CODECS.items():
                case = f"{size_mb} MB, {codec!r}"
                if how.wanted(case):
                    times = alternate(steps_of(codec, int(size_mb * MB) // 4), how.rounds, block=block)
                    speeds = {name: [size_mb * MB / taken for taken in column] for name, column in times.items()}
                    for name in list(speeds)[1:]:
                        above = asked if size_mb == ASKED_MB else None
                        yield beside(speeds[name], speeds[COPY], case=case, what=name, over=COPY, unit="B/s", kind="limit", above=above)
    finally:
        torch.set_num_threads(threads)


def steps_of(codec: Codec, numel: int) -> dict[str, Step]:
    """A copy of so many values, and what the codec does with them; all memory is there beforehand."""
    noise = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=noise)
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
