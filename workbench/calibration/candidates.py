"""The algorithms from which a recommendation chooses, and a lower bound on the time of their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from workbench.algorithms import BackupSGD, DeAR, LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.calibration.effective import Setting, codec_of, effective_costs
from workbench.calibration.model import Calibration
from workbench.codecs import Linear8, Truncate16
from workbench.collectives import Collective, Native, Ring
from workbench.collectives.wire import wire_share
from workbench.costs import Compute, Network
from workbench.gradients import Layout, build_layout, trainable
from workbench.program import Algorithm
from workbench.units import KIB, MIB

BUCKETS = (256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)
WIDTHS = (2, 3)
CHUNKS = 4


def candidates(workers: int, *, num_bytes: int, codecs: Sequence[str] = ("truncate16", "linear8")) -> list[Algorithm]:
    """Return the grid of candidates.

    It contains synchronous SGD, layer-wise SGD with several bucket sizes and Pipe-SGD with several widths, each with
    and without the codecs in a ring's hops. It also contains DeAR with several bucket sizes, and servers with b backup
    workers.

    Args:
        num_bytes: size of a gradient; buckets larger than half of it are left out.
        codecs: names of the codecs whose cost is known.
    """
    known = {"truncate16": Truncate16(), "linear8": Linear8()}
    sums: list[Collective] = [Native(), *(Ring(codec=known[name], chunks=CHUNKS) for name in codecs if name in known)]
    buckets = [size for size in BUCKETS if size < num_bytes / 2] or [max(1, num_bytes // 4)]
    found: list[Algorithm] = [SynchronousSGD(collective=way) for way in sums]
    if workers < 2:
        return found[:1]
    found += [LayerwiseSGD(bucket_bytes=size, collective=way) for size in buckets for way in sums]
    found += [DeAR(bucket_bytes=size) for size in buckets]
    found += [PipeSGD(width=width, collective=way) for width in WIDTHS for way in sums]
    spare = sorted({0, 1, max(1, workers // 16)} & set(range(workers)))
    found += [BackupSGD(backups=backups, shards=shards) for backups in spare for shards in sorted({1, workers})]
    return found


def least_s(calibration: Calibration, algorithm: Algorithm, setting: Setting) -> float:
    """Return a lower bound of a step's seconds: work that the algorithm cannot hide, without waits for stragglers.

    C = F + B + U is the compute (forward, backward, update). W is the time of all sums on the wire. The bound is
    max(C, W), with these exceptions:

    - synchronous SGD: C + W, because nothing overlaps.
    - layer-wise SGD: max(C + w, F + f + W), with w the last bucket's sum, and f the part of B until the first bucket is
      ready.
    - servers: max(F + B, R), or R if gradients are dropped. R is the time of the busiest server's replies.
    """
    compute, network = effective_costs(calibration, algorithm, setting)
    layout = layout_of(calibration, algorithm)
    usual = _usual_slowness(compute, setting.workers)
    forward_s, backward_s, update_s = compute.forward_s * usual, compute.backward_s * usual, compute.update_s
    total_s = forward_s + backward_s + update_s
    p = setting.workers
    if p < 2:
        return total_s
    if isinstance(algorithm, BackupSGD):
        taken = p - algorithm.backups
        busiest = max(algorithm.bytes_per_step(rank, p, layout) or 0.0 for rank in range(p))
        replies_s = busiest / network.bandwidth_bytes_per_s * (taken - 1) / (p - 1)
        return max(min(total_s, forward_s + backward_s) if taken == p else 0.0, replies_s)
    sums = [_sum_s(algorithm, layout.bucket_bytes(piece.index), p, network) for piece in layout.buckets]
    wire_s = math.fsum(sums)
    if isinstance(algorithm, SynchronousSGD):
        return total_s + wire_s
    if isinstance(algorithm, LayerwiseSGD):
        first = compute.ready_shares(layout)[0]
        return max(total_s + sums[-1], forward_s + backward_s * first + wire_s)
    return max(total_s, wire_s)


def layout_of(calibration: Calibration, algorithm: Algorithm) -> Layout:
    """Return the layout of the calibrated model's gradient with this algorithm."""
    buckets = algorithm.requires.buckets
    return build_layout(trainable(calibration.shapes.problem(1).model()), buckets.max_bytes, buckets.count)


def _sum_s(algorithm: Algorithm, num_bytes: int, p: int, network: Network) -> float:
    """Return a lower bound of a bucket's sum on the wire."""
    collective = getattr(algorithm, "collective", Native())
    share = wire_share(getattr(collective, "codec", None), num_bytes / p)
    sent_s: float = 2 * (p - 1) / p * num_bytes * share / network.bandwidth_bytes_per_s
    return sent_s


def _usual_slowness(compute: Compute, workers: int, steps: int = 16) -> float:
    """Return the median slowness of a rank."""
    return float(np.median([compute.factors(0, step, workers) for step in range(steps)]))


def describe(algorithm: Algorithm, setting: Setting) -> dict[str, object]:
    """Return the algorithm's width, bucket size, codec and b, if it has them."""
    return {
        "algorithm": type(algorithm).__name__,
        "width": getattr(algorithm, "width", None),
        "bucket_bytes": algorithm.requires.buckets.max_bytes,
        "codec": codec_of(algorithm),
        "backups": getattr(algorithm, "backups", None),
        "shards": getattr(algorithm, "shards", None),
        "messages": algorithm.messages_per_step(setting.workers, 1) != 0,
        "workers": setting.workers,
    }
