"""What belongs together in a trace: a send and its receive, and the calls of one collective on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.trace.kinds import CODES

Numbers = NDArray[np.int64]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
EXTRA_BYTES = 8  # of a send that carries a stamp, which a receive may not count


def messages(table: NDArray[Any]) -> tuple[Numbers, Numbers]:
    """The sends and receives of a span table that are of one message: their places in the table, (M,) each.

    Between two ranks messages of one size arrive in the order in which they were sent: the first to end on one side is the first
    to end on the other. A receive's own step and bucket tell nothing: the gradient that is sent says which step it is of, the
    receiver only at which it was. What is left over once sizes were equal differs by a stamp, or has no other side.
    """
    sent, received = _of_kind(table, "send"), _of_kind(table, "recv")
    size = table["bytes"].astype(np.int64)
    pairs = np.zeros(len(table), np.int64)  # whose message: one number for each sender and receiver
    pairs[sent] = _pair(table["rank"][sent], table["peer"][sent])
    pairs[received] = _pair(table["peer"][received], table["rank"][received])
    found = [(sent[:0], received[:0])]
    for extra in (0, EXTRA_BYTES, None):  # of one size, of a stamp more, of any size
        sizes = size * 0 if extra is None else size
        keys = _numbered(np.append(pairs[sent], pairs[received]), np.append(sizes[sent] - (extra or 0), sizes[received]))
        left, right = _in_order(keys[: len(sent)], table["end_s"][sent], keys[len(sent) :], table["end_s"][received])
        found.append((sent[left], received[right]))
        sent, received = np.delete(sent, left), np.delete(received, right)
    return np.concatenate([one for one, _ in found]), np.concatenate([other for _, other in found])


def meetings(table: NDArray[Any]) -> Numbers:
    """(N,) a number for each collective, the same for its calls on all ranks; -1 for a span that is none.

    Calls of one kind, step and bucket belong together, in their order on each rank.
    """
    groups = np.full(len(table), -1, np.int64)
    chosen = np.flatnonzero(np.isin(table["kind"], [CODES[kind] for kind in COLLECTIVES]))
    calls = table[chosen]
    same = _numbered(_numbered(calls["kind"], calls["step"]), calls["bucket"])
    mine = _numbered(same, calls["rank"])
    order = np.lexsort((calls["start_s"], mine))
    number = np.arange(len(order)) - np.searchsorted(mine[order], mine[order])  # which call of its rank it is
    groups[chosen[order]] = _numbered(same[order], number)
    return groups


def _of_kind(table: NDArray[Any], kind: str) -> Numbers:
    return np.flatnonzero(table["kind"] == CODES[kind])


def _pair(source: NDArray[Any], to: NDArray[Any]) -> Numbers:
    return np.asarray((source.astype(np.int64) << 32) + to, np.int64)


def _numbered(first: NDArray[Any], second: NDArray[Any]) -> Numbers:
    """(N,) a number from 0 for each pair of values, in their order."""
    _, one = np.unique(first, return_inverse=True)
    seconds, other = np.unique(second, return_inverse=True)
    _, numbers = np.unique(one.reshape(-1) * max(len(seconds), 1) + other.reshape(-1), return_inverse=True)
    return np.asarray(numbers.reshape(-1), np.int64)


def _in_order(key_sent: Numbers, sent_s: Any, key_received: Numbers, received_s: Any) -> tuple[Numbers, Numbers]:
    """Positions on both sides of what is the same number of its key, by the time of its end."""
    order_sent, order = np.lexsort((sent_s, key_sent)), np.lexsort((received_s, key_received))
    keys_sent, keys = key_sent[order_sent], key_received[order]
    place = np.searchsorted(keys_sent, keys) + np.arange(len(keys)) - np.searchsorted(keys, keys)
    found = place < np.searchsorted(keys_sent, keys, side="right")
    return order_sent[place[found]], order[found]
