"""How long a codec takes for a byte of float32 values: measured on one thread, or on a GPU."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from workbench.codecs import Codec
from workbench.errors import ConfigError


def normal_values(numel: int, seed: int, device: str = "cpu") -> Tensor:
    """Return independent normal values on a device.

    Raises:
        ConfigError: the device is a GPU, and torch sees none.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch sees no GPU here; give cpu")
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(seed), device=device)


def seconds_per_byte(codec: Codec, values: Tensor, *, repeats: int, seed: int = 0) -> tuple[float, float]:
    """Return the median seconds to encode and to decode a byte of float32 values, on one thread or on their GPU.

    Args:
        codec: the codec.
        values: what is encoded. The bytes are those of the values, not of the wire.
        repeats: number of measurements, after one that is not counted.
        seed: of the noise of a stochastic codec.
    """
    threads = torch.get_num_threads()
    noise = torch.Generator(values.device).manual_seed(seed)
    torch.set_num_threads(1)
    try:
        taken_s = []
        for _ in range(repeats + 1):
            begin_s = _now_s(values)
            wire = codec.encode(values, noise)
            encoded_s = _now_s(values)
            codec.decode(wire, values)
            taken_s.append((encoded_s - begin_s, _now_s(values) - encoded_s))
    finally:
        torch.set_num_threads(threads)
    encode_s, decode_s = np.median(taken_s[1:], axis=0) / (4 * values.numel())
    return float(encode_s), float(decode_s)


def _now_s(values: Tensor) -> float:
    """The time, when all work on the device of the values is done."""
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
