"""Parse all lines of a trace at once: the fast twin of the JSON parser, for lines as `FileRecorder` writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.trace.files.text import parse_json
from workbench.trace.kinds import CODES, SPAN
from workbench.trace.spans import Spans

WORD_BYTES = 8  # characters read at once
NUM_COMMAS = 7  # in a line
DECIMALS = 7  # of a time, after the point
ZEROS, HIGH, CARRY = (np.uint64(int.from_bytes(bytes([code]) * WORD_BYTES)) for code in (0x30, 0xF0, 0x06))
MAX_PREFIX = 16 * WORD_BYTES  # longest kind and lane, in characters

IntArray = NDArray[np.int64]
WordArray = NDArray[np.uint64]


def read_columns(rank: int, text: bytes) -> Spans | None:
    """Return the spans of complete lines `["kind","lane",start,end,step,bucket,bytes,peer]`, by start.

    It is None if a line differs.

    Times have seven digits after the point and up to eight before it. Sizes have up to sixteen digits, other numbers
    up to eight. The result is bit-identical to that of the JSON parser: the digits of a time are an integer below
    2^53, and the division by 10^7 rounds once.

    >>> read_columns(0, b'["send","comm",0.1000000,0.4000000,0,3,800,1]\\n').table["end_s"].tolist()
    [0.4]
    >>> read_columns(0, b'["send","comm",1e-1,0.4,0,3,800,1]\\n') is None
    True
    """
    padded = np.frombuffer(b"\n" * WORD_BYTES + text + b"\n" * WORD_BYTES, np.uint8)
    ends = np.flatnonzero(padded == ord("\n"))[WORD_BYTES:-WORD_BYTES]
    places = np.flatnonzero(padded == ord(","))
    if len(places) != NUM_COMMAS * len(ends):
        return None
    if not len(ends):
        return Spans(np.zeros(0, SPAN))
    begins, commas = np.append(WORD_BYTES, ends[:-1] + 1), places.reshape(-1, NUM_COMMAS)
    # the eight characters from each position on
    words = np.ndarray(len(padded) - WORD_BYTES + 1, "V8", padded, strides=(1,))
    if np.any(commas[:, 0] < begins) or np.any(commas[:, -1] > ends) or np.any(padded[ends - 1] != ord("]")):
        return None
    named = _prefixes(padded, words, begins, commas[:, 1])
    if named is None:
        return None
    table = np.zeros(len(ends), SPAN)
    table["rank"] = rank
    kinds, lanes, which = named
    names = tuple(dict.fromkeys(lanes))
    positions = {name: position for position, name in enumerate(names)}
    table["kind"] = np.array([CODES[kind] for kind in kinds])[which]
    table["lane"] = np.array([positions[lane] for lane in lanes])[which]
    stops = [*commas.T[2:], ends - 1]
    for position, column in enumerate(("start_s", "end_s", "step", "bucket", "bytes", "peer")):
        first, stop = commas[:, position + 1] + 1, stops[position]
        values = (_times if column.endswith("_s") else _integers)(padded, words, first, stop)
        if values is None:
            return None
        table[column] = values
    return Spans(table[np.argsort(table["start_s"], kind="stable")], names)


def _prefixes(
    padded: NDArray[np.uint8], words: Any, begins: IntArray, stops: IntArray
) -> tuple[list[str], list[str], IntArray] | None:
    """Return the kinds and the lanes that lines begin with, and the index of each line's pair, shape (N,).

    It is None if a prefix is invalid.
    """
    lengths = stops - begins
    longest = int(lengths.max())
    if longest > MAX_PREFIX:
        return None
    columns = [lengths.astype(np.uint64)]
    for place in range(0, longest, WORD_BYTES):
        rest = np.clip(lengths - place, 0, WORD_BYTES)
        columns.append(_first(_load(words, np.minimum(begins + place, len(words) - 1)), rest))
    mixed = columns[0]
    for column in columns[1:]:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    _, first, which = np.unique(mixed, return_index=True, return_inverse=True)
    which = which.reshape(-1)
    if any(np.any(column != column[first][which]) for column in columns):  # two different prefixes have one hash
        return None
    order = np.argsort(first)
    found = [_names(padded[begins[line] : stops[line]].tobytes()) for line in first[order].tolist()]
    if any(item is None for item in found):
        return None
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    kinds, lanes = zip(*(item for item in found if item is not None), strict=True)
    return list(kinds), list(lanes), place_of[which]


def _names(prefix: bytes) -> tuple[str, str] | None:
    try:
        kind, lane = parse_json(prefix.decode() + "]")
    except (ValueError, TypeError):
        return None
    return (kind, lane) if isinstance(kind, str) and kind in CODES and isinstance(lane, str) else None


def _times(padded: NDArray[np.uint8], words: Any, first: IntArray, stop: IntArray) -> NDArray[np.float64] | None:
    """Return numbers with seven digits after the point, shape (N,); None if a number has another form."""
    point = stop - WORD_BYTES
    if np.any(point <= first) or np.any(padded[point] != ord(".")):
        return None
    minus, before = padded[first] == ord("-"), _digits(words, first + (padded[first] == ord("-")), point)
    behind = _digits(words, point + 1, stop)
    if before is None or behind is None or _padded(before, first + minus, point):
        return None
    size_s = (before * 10**DECIMALS + behind).astype(np.float64) / 10**DECIMALS
    return np.asarray(np.where(minus, -size_s, size_s), np.float64)


def _integers(padded: NDArray[np.uint8], words: Any, first: IntArray, stop: IntArray) -> IntArray | None:
    """Return integers, shape (N,); None if a number has another form."""
    if np.any(stop <= first):
        return None
    minus = padded[first] == ord("-")
    first = first + minus
    size = _digits(words, np.maximum(first, stop - WORD_BYTES), stop)
    if size is None:
        return None
    if np.any(stop - first > WORD_BYTES):
        long = stop - first > WORD_BYTES
        above = _digits(words, first[long], stop[long] - WORD_BYTES)
        if above is None:
            return None
        size[long] += above * 10**WORD_BYTES
    return None if _padded(size, first, stop) else np.where(minus, -size, size)


def _padded(size: IntArray, first: IntArray, stop: IntArray) -> bool:
    """Return whether a number begins with a zero, which JSON does not allow."""
    return bool(np.any((stop - first > 1) & (size < 10 ** np.minimum(stop - first - 1, 2 * WORD_BYTES))))


def _digits(words: Any, first: IntArray, stop: IntArray) -> IntArray | None:
    """Return the characters from `first` to before `stop` as a number of one to eight digits, shape (N,).

    It is None if some are not digits.
    """
    length = stop - first
    if np.any(length < 1) or np.any(length > WORD_BYTES):
        return None
    empty = ((WORD_BYTES - length) * 8).astype(np.uint64)
    read = (_load(words, stop - WORD_BYTES) >> empty) << empty
    read |= _first(np.broadcast_to(ZEROS, read.shape), WORD_BYTES - length)
    if np.any((read & HIGH) != ZEROS) or np.any(((read + CARRY) & HIGH) != ZEROS):
        return None
    return _value(read - ZEROS)


def _value(digits: WordArray) -> IntArray:
    """Return numbers, shape (N,), from eight digits each, one a byte, highest first: combine pairs, fours, then all."""
    pairs = digits * np.uint64(10) + (digits >> np.uint64(8))
    mask = np.uint64(0x000000FF000000FF)
    left = (pairs & mask) * np.uint64(100 + (1_000_000 << 32))
    right = ((pairs >> np.uint64(16)) & mask) * np.uint64(1 + (10_000 << 32))
    return np.asarray((left + right) >> np.uint64(32), np.int64)


def _first(read: WordArray, count: IntArray) -> WordArray:
    """Return the words with zero bytes after their first `count` characters, shape (N,)."""
    drop = ((WORD_BYTES - count) * 8).astype(np.uint64)
    kept = (read << (drop % np.uint64(64))) >> (drop % np.uint64(64))
    return np.where(count > 0, kept, np.uint64(0))


def _load(words: Any, at: IntArray) -> WordArray:
    """Return the eight characters from each position on, the first in the lowest byte, shape (N,)."""
    return np.asarray(words[at].view("<u8"), np.uint64)
