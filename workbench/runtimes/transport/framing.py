"""The header of a message with a stamp, and the announcement of its length. Each is one int64 in front of the values.

    bits 0 to 39    the stamp; in an announcement, the dtype (4 bits) and the length of the messages that follow (36 bits)
    bit 61          set in an announcement
    bit 62          set in every header: zeroed memory, which nothing was received into, is no header

A message longer than the posted receive makes gloo abort the receiving process, and MPI truncates it. So an
announcement goes first on each channel, and again before a change of length. It is as long as the shortest message. The
receiver refuses an unexpected length before the message itself arrives. TCP and MPI keep messages in order and intact,
so a header has no number and no checksum.
"""

from __future__ import annotations

from typing import final

import torch

from workbench.errors import RankMismatch

HEADER_BYTES = 8
STAMP_BITS = 40
DTYPE_BITS = 4
LENGTH_BITS = STAMP_BITS - DTYPE_BITS
STAMP = (1 << STAMP_BITS) - 1
IS_ANNOUNCEMENT = 1 << 61
IS_HEADER = 1 << 62
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_FIX = ". Run one version of workbench, one algorithm and one model on all ranks, and resume from the last checkpoint"


def header(stamp: int) -> int:
    """The header of a message with this stamp."""
    assert 0 <= stamp <= STAMP, f"stamp {stamp} does not fit into {STAMP_BITS} bits"
    return IS_HEADER | stamp


def stamp_in(header: int) -> int:
    """The stamp of a header."""
    return header & STAMP


@final
class Channel:
    """One end of a channel: messages with one sender, one receiver and one tag."""

    def __init__(self, sender: int, receiver: int, tag: int) -> None:
        self.sender, self.receiver, self.tag = sender, receiver, tag
        self._announced: tuple[int, torch.dtype] | None = None

    def announcement(self, num_bytes: int, dtype: torch.dtype) -> int | None:
        """Return the announcement to send before messages of `num_bytes` (with header); None if it was sent before.

        For the sender.
        """
        if self._announced == (num_bytes, dtype):
            return None
        assert num_bytes < 1 << LENGTH_BITS, f"a message of {num_bytes} bytes cannot be announced"
        self._announced = (num_bytes, dtype)
        return IS_HEADER | IS_ANNOUNCEMENT | num_bytes << DTYPE_BITS | DTYPES.index(dtype)

    def accept(self, header: int, num_bytes: int, dtype: torch.dtype, received_bytes: int | None = None) -> int | None:
        """On the receiver: the stamp of a message that arrived; None for an announcement: wait for the next message.

        Args:
            num_bytes: length of the posted receive.
            received_bytes: length of the message, where the library reports it.

        Raises:
            RankMismatch: the message is not as expected; names its sender and the difference.
        """
        is_announcement = bool(header & IS_ANNOUNCEMENT)
        if header < 0 or not header & IS_HEADER:
            raise RankMismatch(f"{self}: {header:#018x} is no header of a message{_FIX}")
        if received_bytes not in (None, HEADER_BYTES if is_announcement else num_bytes):
            raise RankMismatch(f"{self}: {received_bytes} bytes came, {num_bytes} were announced{_FIX}")
        value = header & STAMP
        if is_announcement:
            self._check_announcement(value, num_bytes, dtype)
            self._announced = (num_bytes, dtype)
            return None
        if self._announced != (num_bytes, dtype):
            raise RankMismatch(f"{self}: received a message that was not announced{_FIX}")
        return value

    def _check_announcement(self, value: int, num_bytes: int, dtype: torch.dtype) -> None:
        length = value >> DTYPE_BITS
        code = value & ((1 << DTYPE_BITS) - 1)
        announced_dtype = DTYPES[code] if code < len(DTYPES) else None
        if (length, announced_dtype) != (num_bytes, dtype):
            raise RankMismatch(
                f"{self}: it announces {length} bytes of {announced_dtype}, and {num_bytes} of {dtype} are "
                f"expected{_FIX}"
            )

    def __str__(self) -> str:
        return f"messages from rank {self.sender} to rank {self.receiver} with tag {self.tag}"
