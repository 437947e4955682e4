"""Cases of GPU kernels, for Triton's interpreter and for a GPU: they give the bits of the codecs on a CPU, for values of all kinds."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from workbench.codecs import Codec, Linear8, Truncate16

CODECS: list[Codec] = [
    Truncate16(),
    Truncate16(rounding="nearest"),
    Linear8(),
    Linear8(group=1),
    Linear8(group=7),
    Linear8(group=64),
    Linear8(group=1000),
]
TINY, LARGEST = 2.0**-149, 3.4028234663852886e38
# The next ones would carry into the sign
NANS = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
KINDS = ("plain", "ties", "tiny", "large", "nan", "infinite", "any")


def values_of(kind: str, numel: int, seed: int) -> Tensor:
    """(n,) float32: the kind decides what some of them are, and which scale they have."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    some = torch.rand(numel, generator=generator) < 0.2
    match kind:
        case "ties":  # with 127 the largest, what lies between two levels; and some that lie between two bfloat16
            values = torch.randint(-127, 127, (numel,), generator=generator) + 0.5
            values[some] = (values[some].view(torch.int32) | 0x8000).view(torch.float32)
            values[::5] = 127
        case "tiny":  # below what a scale can be, subnormal too, and zeros of both signs
            values = values * 2.0**-120
            values[some] = TINY * torch.randint(-3, 4, (numel,), generator=generator)[some] * -1.0
        case "large":
            values[some] = LARGEST * values[some].sign()
        case "infinite":
            values[:: max(3, numel // 3)] = -float("inf")
        case "nan":
            values.view(torch.int32)[:: max(3, numel // 3)] = NANS[: len(range(0, numel, max(3, numel // 3)))]
        case "any":
            anything = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32)
            values = torch.where(some, anything.view(torch.float32), values)
    return values


def bits(values: Tensor) -> Tensor:
    """Bits, of float32 values or of a message's halves: all NaNs are the same one."""
    return torch.where(values.isnan(), torch.nan, values).view(
        torch.int32 if values.dtype == torch.float32 else torch.int16
    )


def check(
    codec: Codec,
    kind: str,
    numel: int,
    device: torch.device,
    offset: int = 0,
    kernels: AbstractContextManager[object] | None = None,
) -> None:
    """Encode, decode, add, and encode a sum: once by torch's operations on a CPU, once under `kernels` on a device.

    The message that is read begins at byte `offset` of its memory, the one that is written at byte 4.
    """
    values, total = values_of(kind, numel, 1), values_of("plain", numel, 2)
    wire, again = (torch.empty(codec.wire_bytes(numel), dtype=torch.uint8) for _ in range(2))
    decoded, summed = torch.empty_like(values), total.clone()
    codec.encode_into(values, wire)
    codec.decode_into(wire, decoded)
    codec.add(wire, summed)
    codec.encode_sum(wire, total.clone(), again)
    theirs, found, sums, spent = (each.to(device, copy=True) for each in (values, values, total, total))
    read = torch.cat([torch.zeros(offset, dtype=torch.uint8), wire]).to(device)[offset:]
    room = torch.full((wire.numel() + 8,), 77, dtype=torch.uint8, device=device)
    with kernels or nullcontext():
        codec.encode_into(theirs, room[4:-4])
        assert same(codec, room[4:-4], wire) and torch.equal(theirs.cpu().view(torch.int32), values.view(torch.int32))
        codec.decode_into(read, found.fill_(77))
        assert torch.equal(bits(found.cpu()), bits(decoded))
        codec.add(read, sums)
        assert torch.equal(bits(sums.cpu()), bits(summed))
        codec.encode_sum(read, spent, room[4:-4])
        assert same(codec, room[4:-4], again)
    assert room[:4].tolist() == room[-4:].tolist() == [77] * 4, "written beside the message"


def same(codec: Codec, found: Tensor, expected: Tensor) -> bool:
    """Byte for byte, but for halves that are NaN."""
    if isinstance(codec, Truncate16):
        return torch.equal(bits(found.cpu().clone().view(torch.bfloat16)), bits(expected.view(torch.bfloat16)))
    return torch.equal(found.cpu(), expected)
