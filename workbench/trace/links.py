"""Related spans of a trace: a send and its receive, and the calls of one collective on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.trace.kinds import CODES

Numbers = NDArray[np.int64]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
EXTRA_BYTES = 8  # a stamp's header: the send counts it, the receive may not


def messages(table: NDArray[Any]) -> tuple[Numbers, Numbers]:
    """Return the places of sends and of their receives in a span table: two arrays of shape (M,).

    Between two ranks, messages of one size arrive in the order in which they were sent. The n-th send to end
    therefore belongs to the n-th receive to end. Step and bucket cannot be used: the sender records the gradient's
    step, the receiver its own step. If a span has no partner of equal size, the sizes differ by a stamp, or the other
    side was not recorded.
    """
    sent, received = _of_kind(table, "send"), _of_kind(table, "recv")
    size = table["bytes"].astype(np.int64)
    pairs = np.zeros(len(table), np.int64)  # one number for each pair of sender and receiver
    pairs[sent] = _pair(table["rank"][sent], table["peer"][sent])
    pairs[received] = _pair(table["peer"][received], table["rank"][received])
    found = [(sent[:0], received[:0])]
    for extra in (0, EXTRA_BYTES, None):  # equal sizes, then a stamp more, then any size
        sizes = size * 0 if extra is None else size
        keys = _numbered(
            np.append(pairs[sent], pairs[received]), np.append(sizes[sent] - (extra or 0), sizes[received])
        )
        left, right = _in_order(keys[: len(sent)], table["end_s"][sent], keys[len(sent) :], table["end_s"][received])
        found.append((sent[left], received[right]))
        sent, received = np.delete(sent, left), np.delete(received, right)
    return np.concatenate([one for one, _ in found]), np.concatenate([other for _, other in found])


def collective_numbers(table: NDArray[Any]) -> Numbers:
    """Return a number for each collective, shape (N,): equal for its calls on all ranks, -1 for other spans.

    If all ranks call the same collectives on each lane, the n-th calls of a lane belong together. Otherwise (ranks that
    joined or left, lanes with other names) calls of one kind, step and bucket do, in their order on each rank. The step
    alone is not enough: a background sum of other values than a gradient has the step of its rank at that time.
    """
    groups = np.full(len(table), -1, np.int64)
    chosen = np.flatnonzero(np.isin(table["kind"], [CODES[kind] for kind in COLLECTIVES]))
    calls = table[chosen]
    order = np.lexsort((calls["start_s"], calls["lane"], calls["rank"]))
    _, counts = np.unique(calls["rank"], return_counts=True)
    if len(set(counts.tolist())) == 1:
        called = np.stack([calls[name][order] for name in ("lane", "kind", "bucket")]).reshape(3, len(counts), -1)
        if np.all(called == called[:, :1]):
            groups[chosen[order]] = np.tile(np.arange(counts[0]), len(counts))
            return groups
    same = _numbered(_numbered(calls["kind"], calls["step"]), calls["bucket"])
    mine = _numbered(same, calls["rank"])
    order = np.lexsort((calls["start_s"], mine))
    number = np.arange(len(order)) - np.searchsorted(mine[order], mine[order])  # the position of the call on its rank
    groups[chosen[order]] = _numbered(same[order], number)
    return groups


def _of_kind(table: NDArray[Any], kind: str) -> Numbers:
    return np.flatnonzero(table["kind"] == CODES[kind])


def _pair(source: NDArray[Any], to: NDArray[Any]) -> Numbers:
    return np.asarray((source.astype(np.int64) << 32) + to, np.int64)


def _numbered(first: NDArray[Any], second: NDArray[Any]) -> Numbers:
    """Return a number from 0 for each distinct pair of values, in their order, shape (N,)."""
    _, one = np.unique(first, return_inverse=True)
    seconds, other = np.unique(second, return_inverse=True)
    _, numbers = np.unique(one.reshape(-1) * max(len(seconds), 1) + other.reshape(-1), return_inverse=True)
    return np.asarray(numbers.reshape(-1), np.int64)


def _in_order(key_sent: Numbers, sent_s: Any, key_received: Numbers, received_s: Any) -> tuple[Numbers, Numbers]:
    """Return positions on both sides: the n-th of a key on one side belongs to the n-th on the other, by end time."""
    order_sent, order = np.lexsort((sent_s, key_sent)), np.lexsort((received_s, key_received))
    keys_sent, keys = key_sent[order_sent], key_received[order]
    place = np.searchsorted(keys_sent, keys) + np.arange(len(keys)) - np.searchsorted(keys, keys)
    found = place < np.searchsorted(keys_sent, keys, side="right")
    return order_sent[place[found]], order[found]
