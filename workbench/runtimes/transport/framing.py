"""Eight bytes in front of a message that carries a stamp: what it says, which of its path it is, and that it is whole.

    bits 0 to 39    the stamp; of an announcement, the length of the messages behind it (36 bits) and the dtype of their values (4)
    bits 40 to 47   its number on its path, modulo 256; a path is a sender, a receiver and a tag
    bits 48 to 63   CRC-16 of all that, with sender, receiver, tag, and of a message also length and dtype

A message longer than the receive that it meets makes gloo abort the receiving process, and MPI cut it off. So the first message of
a path, and the first of another length, goes behind an announcement, which is as long as the shortest message: the receiver
refuses a length that it does not expect before the message itself can come.
"""

from __future__ import annotations

import struct
from binascii import crc_hqx
from typing import final

import torch

from workbench.errors import RankMismatch

HEADER_BYTES = 8
STAMP_BITS, LENGTH_BITS = 40, 36
STAMP, NUMBER, WHOLE = (1 << STAMP_BITS) - 1, 0xFF, (1 << 64) - 1
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


def stamp_in(header: int) -> int:
    """The stamp of a header, whatever else it says."""
    return header & STAMP


@final
class Path:
    """One end of a path: what was sent on it, or what came.

    A message that came before, again or late, is left out by its number. One that is damaged, that nobody announced or that comes
    where others are missing is an error.
    """

    def __init__(self, sender: int, receiver: int, tag: int) -> None:
        self.sender, self.receiver, self.tag = sender, receiver, tag
        self._number = 0  # of the next one
        self._announced: tuple[int, torch.dtype] | None = None
        self._announces = crc_hqx(struct.pack("<iii", sender, receiver, tag), 1)
        self._carries = 0

    def _agree(self, num_bytes: int, dtype: torch.dtype) -> None:
        self._announced = (num_bytes, dtype)
        facts = struct.pack("<iiiqi", self.sender, self.receiver, self.tag, num_bytes, DTYPES.index(dtype))
        self._carries = crc_hqx(facts, 2)

    # -- the sender's end --------------------------------------------------------------------------------------

    def announcement(self, num_bytes: int, dtype: torch.dtype) -> int | None:
        """The header that must go first where messages of so many bytes, their header among them, are to go; None: it has gone."""
        if self._announced == (num_bytes, dtype):
            return None
        self._agree(num_bytes, dtype)
        return self._header(num_bytes << (STAMP_BITS - LENGTH_BITS) | DTYPES.index(dtype), self._announces)

    def header(self, stamp: int) -> int:
        """That of the next message, as a signed number."""
        return self._header(stamp, self._carries)

    def _header(self, value: int, seed: int) -> int:
        assert 0 <= value <= STAMP, f"{value} does not fit into a header's {STAMP_BITS} bits"
        low = value | self._number << STAMP_BITS
        self._number = (self._number + 1) & NUMBER
        whole = low | _check(low, seed) << 48
        return whole - (1 << 64) if whole >> 63 else whole

    # -- the receiver's end ------------------------------------------------------------------------------------

    def judge(self, header: int, num_bytes: int, dtype: torch.dtype, came: int | None = None) -> int | None:
        """The stamp of a message that came where one of so many bytes was expected; None: it is not to be used, wait for the next one.

        Args:
            came: how many bytes did, where the library tells.

        Raises:
            RankMismatch: names the sender and what is wrong.
        """
        header &= WHOLE
        low, check = header & ((1 << 48) - 1), header >> 48
        value, number = low & STAMP, low >> STAMP_BITS
        announces = check == _check(low, self._announces)
        whole = announces or (self._announced is not None and check == _check(low, self._carries))
        if not whole or came not in (None, HEADER_BYTES if announces else num_bytes):
            raise RankMismatch(f"{self}: what came (header {header:#018x}) is damaged, or of another length than was announced{_FIX}")
        ahead = (number - self._number) & NUMBER
        if ahead > NUMBER // 2:
            return None
        if ahead:
            raise RankMismatch(f"{self}: number {number} came where {self._number} was due, so {ahead} got lost or come late{_FIX}")
        self._number = (number + 1) & NUMBER
        if not announces:
            return value
        length, kind = value >> (STAMP_BITS - LENGTH_BITS), value & ((1 << (STAMP_BITS - LENGTH_BITS)) - 1)
        said = DTYPES[kind] if kind < len(DTYPES) else None
        if (length, said) != (num_bytes, dtype):
            raise RankMismatch(f"{self}: it announces {length} bytes of {said}, and {num_bytes} of {dtype} are expected{_FIX}")
        self._agree(num_bytes, dtype)
        return None

    def __str__(self) -> str:
        return f"messages from rank {self.sender} to rank {self.receiver} with tag {self.tag}"


_FIX = ". Run one version of workbench, one method and one model on all ranks, and resume from the last checkpoint"


def _check(low: int, seed: int) -> int:
    """Never 0: memory of zeros, in which nothing came, is no header."""
    return crc_hqx(low.to_bytes(6, "little"), seed) or 1
