"""Throughput of each codec: GB of float32 values a second, encoded and decoded, on one thread.

Codecs alternate from round to round; the table shows medians, and in brackets the quartiles.

    python tests/benchmarks/codecs.py --megabytes 25 --rounds 15
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from workbench.codecs import QSGD, Codec, Linear8, SharedInt, Sign, TopK, Truncate16
from workbench.units import MB

CODECS: tuple[Codec, ...] = (
    Truncate16(),
    Truncate16(rounding="nearest"),
    Linear8(),
    Linear8(group=1024),
    Linear8(rounding="stochastic"),
    QSGD(levels=1),
    QSGD(levels=7),
    QSGD(levels=127),
    TopK(fraction=0.01),
    TopK(fraction=0.1),
    Sign(),
    SharedInt(),
    SharedInt(bits=16),
)


def measure(values: torch.Tensor, rounds: int) -> dict[Codec, np.ndarray]:
    """Seconds of (encode, decode) of each codec in each round."""
    noise = torch.Generator().manual_seed(0)
    took: dict[Codec, list[tuple[float, float]]] = {codec: [] for codec in CODECS}
    for number in range(-2, rounds):  # two rounds to warm up
        for codec in CODECS:
            begin = time.perf_counter()
            wire = codec.encode(values, noise)
            middle = time.perf_counter()
            codec.decode(wire, values)
            if number >= 0:
                took[codec].append((middle - begin, time.perf_counter() - middle))
    return {codec: np.array(times) for codec, times in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=25)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(int(options.megabytes * MB) // 4, generator=torch.Generator().manual_seed(0))
    num_bytes = values.numel() * 4
    print(f"{'codec':58}  {'wire':>6}  {'encode GB/s':>20}  {'decode GB/s':>20}")
    for codec, times in measure(values, options.rounds).items():
        speeds = [np.quantile(num_bytes / times[:, column] / 1e9, (0.5, 0.25, 0.75)) for column in (0, 1)]
        shown = [f"{middle:6.2f} [{low:5.2f}, {high:5.2f}]" for middle, low, high in speeds]
        print(f"{codec!r:58}  {num_bytes / codec.wire_bytes(values.numel()):5.1f}x  {shown[0]}  {shown[1]}", flush=True)


if __name__ == "__main__":
    main()
