"""When compression saves time: below which bandwidth, and from which ratio on. All derived here."""

from __future__ import annotations

import math

from workbench.collectives import Link
from workbench.errors import ConfigError


def break_even_bandwidth(saved_bytes: float, codec_s: float) -> float:
    """Return the bytes per second at which a codec takes the time that it saves on the wire. Below, it saves time.

    `saved_bytes` are those of one rank's critical path. Infinite for a codec that takes no time.

    >>> break_even_bandwidth(100e6, 0.1) / 1e9
    1.0
    """
    return saved_bytes / codec_s if codec_s else math.inf


def ring_break_even_bandwidth(
    num_workers: int, ratio: float, encode_s_per_byte: float, decode_s_per_byte: float
) -> float:
    """Return the break-even bandwidth of a ring with a codec in each hop: 2 (p-1)/p n beta (1 - 1/r) = `codec_s`.

    It is 2 (p-1) (1 - 1/r) / (p (e + d)) if decoding hides under an encoded block's time on the wire. Otherwise it is
    (p-1) (2 - 1/r) / (p e + (2p-1) d). It does not depend on n.

    Args:
        ratio: r, bytes of the values divided by bytes on the wire.
        encode_s_per_byte, decode_s_per_byte: e and d, for a byte of uncompressed values.

    >>> ring_break_even_bandwidth(4, 2.0, 1e-9, 1e-9) / 1e6  # a codec of 1 GB/s either way helps below 3 Gbit/s
    375.0...

    Raises:
        ConfigError: the codec does not compress, or there is only one worker.
    """
    if num_workers < 2:
        raise ConfigError(f"num_workers={num_workers}: one worker sends nothing; give 2 or more")
    if ratio < 1:
        raise ConfigError(f"ratio={ratio}: give the bytes before divided by the bytes after, 1 or more")
    p = num_workers
    hidden = break_even_bandwidth(2 * (p - 1) * (1 - 1 / ratio), p * (encode_s_per_byte + decode_s_per_byte))
    if hidden * ratio * decode_s_per_byte <= 1:
        return hidden
    return break_even_bandwidth((p - 1) * (2 - 1 / ratio), p * encode_s_per_byte + (2 * p - 1) * decode_s_per_byte)


def smallest_useful_ratio(
    compute_s: float, num_bytes: float, num_workers: int, link: Link, codec_s: float = 0.0
) -> float:
    """Return the smallest compression ratio r with which a ring's all-reduce hides under compute in Pipe-SGD: m_r <= c.

    m_r = 2 (p-1) alpha + 2 (p-1)/p n beta / r + (p-1)/p n gamma + t_codec. It is 1 if the all-reduce hides without a
    codec. It is infinite if latency, sums and the codec alone take longer than compute.

    >>> from workbench.costs import Network
    >>> smallest_useful_ratio(0.5, 1e9, 2, Network(latency_s=0.0, bandwidth_bytes_per_s=1e9), codec_s=0.25)
    4.0
    """
    p, share = num_workers, (num_workers - 1) / num_workers * num_bytes
    wire_s = 2 * share / link.bandwidth_bytes_per_s
    fixed_s = 2 * (p - 1) * link.latency_s + share * link.sum_s_per_byte
    if fixed_s + wire_s <= compute_s:
        return 1.0
    left_s = compute_s - fixed_s - codec_s
    return max(1.0, wire_s / left_s) if left_s > 0 else math.inf
