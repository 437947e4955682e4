"""Seconds of sums over all workers that `Collective.seconds` does not cover: codecs and parameter servers.

Ring, tree, halving-doubling and linear have their formulas on the classes (`collectives.Ring().seconds`), next to
their messages. p workers, n bytes, alpha = `latency_s`, beta = 1 / `bandwidth_bytes_per_s`, gamma = `sum_s_per_byte`
of a link.
"""

from __future__ import annotations

from workbench.collectives import Collective, HalvingDoubling, Linear, Link, Ring, Tree
from workbench.collectives.wire import wire_share
from workbench.costs import Network
from workbench.errors import ConfigError


def wire_s(num_bytes: float, num_workers: int, link: Link) -> float:
    """Return 2 (p-1)/p n beta: the bandwidth part of a ring's seconds, which no concurrency can shorten.

    >>> from workbench.costs import ethernet_1g
    >>> round(wire_s(25e6, 2, ethernet_1g), 6)
    0.2
    """
    return 2 * (num_workers - 1) / num_workers * num_bytes / link.bandwidth_bytes_per_s


def all_reduce_s(collective: Collective, num_bytes: float, num_workers: int, network: Network) -> float:
    """Return `collective.seconds`, plus `codec_s` if it has a codec in its hops.

    Raises:
        ConfigError: it has no formula.
    """
    return collective.seconds(num_bytes, num_workers, network) + codec_s(collective, num_bytes, num_workers, network)


def codec_s(collective: Collective, num_bytes: float, num_workers: int, network: Network) -> float:
    """Return a codec's seconds on the critical path of a sum; e and d = `encode_s_per_byte`, `decode_s_per_byte`.

    Derived here.

    | collective | with a codec in its hops |
    |---|---|
    | `Ring` | n e + n d + (p-1) max(0, n/p d - alpha - w): p encodings and p decodings of blocks; in spreading, w hides decoding |
    | `HalvingDoubling` | n e + (2q-2)/q n d + max(0, n/q d - alpha - w) on a power of two q; with folded ranks n (e + 2d) more |
    | `Linear` | 2 n e + p n d: the root decodes p-1 values, a worker the sum |
    | `Tree` | (k+1) n (e + d), k = ceil(log2 p): each level encodes its sum; the whole sum is encoded once |

    w is the wire time of an encoded block, n/p beta / r (of `HalvingDoubling` n/q beta / r): while it arrives, a rank decodes
    its own block. The result is 0 without a codec. `Ring(chunks=c)` hides more
    of the codec's time, and has no formula here.

    Raises:
        ConfigError: no formula is known.
    """
    p, encoding_s, decoding_s = (
        num_workers,
        num_bytes * network.encode_s_per_byte,
        num_bytes * network.decode_s_per_byte,
    )
    if not collective.lossy or p == 1:
        return 0.0
    match collective:
        case Ring(chunks=1):
            return encoding_s + decoding_s + (p - 1) * _exposed_decoding_s(collective, num_bytes / p, network)
        case HalvingDoubling():
            q = 1 << (p.bit_length() - 1)
            folded = encoding_s + 2 * decoding_s if q < p else 0.0
            own_s = _exposed_decoding_s(collective, num_bytes / q, network)
            return encoding_s + (2 * q - 2) / q * decoding_s + own_s + folded
        case Linear():
            return 2 * encoding_s + p * decoding_s
        case Tree():
            return ((p - 1).bit_length() + 1) * (encoding_s + decoding_s)
        case Ring():
            raise ConfigError(
                f"{collective} hides its codec's time, and there is no formula for it: use Ring(codec=...), or "
                "simulate it"
            )
    raise ConfigError(
        f"{collective} has no formula for its codec's time: use Ring, HalvingDoubling, Linear or Tree, or simulate it"
    )


def _exposed_decoding_s(collective: Ring | HalvingDoubling, num_bytes: float, network: Network) -> float:
    """Return by how much the decoding of a block takes longer than the arrival of another one."""
    arriving_s = wire_share(collective.codec, num_bytes) * num_bytes / network.bandwidth_bytes_per_s
    return max(0.0, num_bytes * network.decode_s_per_byte - network.latency_s - arriving_s)


def gather_s(num_bytes: float, num_workers: int, link: Link, shards: int = 1) -> float:
    """Return p (alpha + m beta) + (p-1) m gamma, m = n/M.

    A server receives p gradients of its shard through one interface and sums them. It receives one gradient after
    another, so each has its latency. It sums before it receives the next, so sums are not hidden. All M servers work at
    the same time. The servers after the first lag by a message each, because a worker has one interface too;
    `scatter_s` hides that.

    Derived here.
    """
    message_s, summing_s = _message(num_bytes, link, shards)
    return num_workers * (link.latency_s + message_s) + (num_workers - 1) * summing_s


def scatter_s(num_bytes: float, num_workers: int, link: Link, shards: int = 1) -> float:
    """Return M alpha + (p + M - 1) m beta, m = n/M.

    A server sends its replies one after another, and a worker takes its shards in turn. With one server it is alpha + p
    n beta. Derived here.
    """
    message_s, _ = _message(num_bytes, link, shards)
    return shards * link.latency_s + (num_workers + shards - 1) * message_s


def parameter_server_s(
    num_bytes: float, num_workers: int, link: Link, shards: int = 1, *, staggered: bool = False
) -> float:
    """Return PS-Sync's communication: gather, then scatter, without overlap.

    About 2 p n beta / M, compared with a ring's 2 (p-1)/p n beta.

    This is the time from a common start to the last worker's end. `staggered` is the time of a step in the long run
    if replies are sent one after another: the worker with the first reply computes and pushes first, while the other
    workers still wait for their replies. Then communication takes about half of that time:

        p (alpha + m beta) + (p-1) m gamma  +  M (alpha + m beta)

    If replies share the interface fairly, as TCP flows do, all arrive late at the same time, and nothing is saved. A
    server that received all gradients at once would need p - 1 latencies less: 2 alpha + 2 p n beta + (p-1) n gamma.

    Derived here; the comparison with a ring is li2018pipesgd's.

    >>> from workbench.units import GBIT_PER_S
    >>> link = Network(latency_s=0.0, bandwidth_bytes_per_s=10 * GBIT_PER_S)
    >>> [round(1e3 * seconds, 1) for seconds in (Ring().seconds(244e6, 4, link), parameter_server_s(244e6, 4, link))]
    [292.8, 1561.6]

    Raises:
        ConfigError: there are no servers.
    """
    gather = gather_s(num_bytes, num_workers, link, shards)
    if not staggered:
        return gather + scatter_s(num_bytes, num_workers, link, shards)
    return gather + shards * (link.latency_s + _message(num_bytes, link, shards)[0])


def server_over_ring(num_workers: int) -> float:
    """Return p^2 / (p-1): how much longer one server's interface is busy than those of a ring. Derived here.

    >>> server_over_ring(4) == 16 / 3
    True
    """
    if num_workers < 2:
        raise ConfigError(f"num_workers={num_workers}: one worker sends nothing; give 2 or more")
    return num_workers**2 / (num_workers - 1)


def _message(num_bytes: float, link: Link, shards: int) -> tuple[float, float]:
    """Return the seconds on the wire, and to sum, of one shard."""
    if not isinstance(shards, int) or shards < 1:
        raise ConfigError(f"shards={shards}: give the number of servers, 1 or more")
    return num_bytes / shards / link.bandwidth_bytes_per_s, num_bytes / shards * link.sum_s_per_byte
