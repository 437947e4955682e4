"""Every algorithm of the package, found by walking it, in the settings in which the laws test it.

The laws test a new file in `workbench/algorithms` with its defaults, without its name here. Which law is for which
algorithm follows from its members (`replicas`, `asynchronous`, `requires`, `max_staleness`, ...).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from functools import cache

import workbench.algorithms
from workbench.algorithms import (
    ADPSGD,
    DPSGD,
    SPARTA,
    AdaptiveDelaySGD,
    AdasumSGD,
    ApplyOrder,
    AsyncSGD,
    BackupSGD,
    ChocoSGD,
    Constant,
    DeAR,
    DelayCompensatedSGD,
    DeMo,
    DiLoCo,
    EagerDiLoCo,
    FedAvg,
    FirstSteps,
    GradientTracking,
    LayerwiseSGD,
    LocalSGD,
    NoLoCo,
    OnlineBackupSGD,
    PartialAllReduce,
    PipeSGD,
    Quorum,
    SendOrder,
    SerialSGD,
    SignSGD,
    SlowMo,
    SoftsyncSGD,
    StaleSGD,
    StaleSynchronousSGD,
    StochasticGradientPush,
    StreamingDiLoCo,
    SynchronousSGD,
    Uniform,
)
from workbench.codecs import QSGD, ErrorFeedback, TopK, Truncate16
from workbench.collectives import HalvingDoubling, Hierarchical, Linear, Native, Once, PowerSGD, Ring, Tree
from workbench.errors import ConfigError
from workbench.laws.sentences import name_of as name_of
from workbench.program import Algorithm
from workbench.topologies import Complete, Exponential, OnePeerExponential, Star

COLLECTIVES = (Native(), Ring(), Linear())
MORE_COLLECTIVES = (
    Tree(),
    HalvingDoubling(),
    Hierarchical(group=2),
    Ring(codec=Truncate16()),
    Once(codec=Truncate16()),
    Once(codec=ErrorFeedback(codec=TopK(k=5))),
    Once(codec=QSGD()),
    PowerSGD(rank=1),
)
SMALL_BUCKET = 200.0  # bytes; cuts the tiny model's six tensors into four buckets

SETTINGS: dict[type[Algorithm], list[Algorithm]] = {
    SynchronousSGD: [SynchronousSGD(collective=collective) for collective in (*COLLECTIVES, *MORE_COLLECTIVES)],
    LayerwiseSGD: [
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, apply=ApplyOrder.ANY),
        *(LayerwiseSGD(bucket_bytes=size) for size in (0, None)),
        *(LayerwiseSGD(bucket_bytes=SMALL_BUCKET, apply=order) for order in (ApplyOrder.ALL, ApplyOrder.BACKWARD)),
        LayerwiseSGD(bucket_bytes=0, apply=ApplyOrder.ANY, collective=Ring()),
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, apply=ApplyOrder.BACKWARD, collective=Linear()),
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, lanes=2),
        LayerwiseSGD(bucket_bytes="auto"),
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, lanes=2, collective=Ring()),
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, order=SendOrder.PRIORITY, collective=Ring()),
    ],
    PipeSGD: [
        *(PipeSGD(width=width) for width in (2, 1, 3, 4)),
        PipeSGD(width=2, collective=Ring()),
        PipeSGD(width=3, collective=Linear()),
        PipeSGD(width=3, lanes=2),
        PipeSGD(width=3, warmup_steps=2),
        PipeSGD(width=3, first=FirstSteps.DUPLICATE),
        PipeSGD(width=2, collective=Ring(codec=Truncate16())),
    ],
    AdaptiveDelaySGD: [AdaptiveDelaySGD(max_delay=2, adapt_every=2), AdaptiveDelaySGD(max_delay=0)],
    DeAR: [
        DeAR(bucket_bytes=SMALL_BUCKET),
        DeAR(bucket_bytes=0),
        DeAR(bucket_bytes=None),
        DeAR(bucket_bytes=SMALL_BUCKET, collective=Native()),
    ],
    LocalSGD: [LocalSGD(every=3), LocalSGD(every=1), LocalSGD(every=2, after=3), LocalSGD(every=2, collective=Ring())],
    DiLoCo: [
        DiLoCo(every=2),
        DiLoCo(every=1),
        DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0),
    ],
    StreamingDiLoCo: [
        StreamingDiLoCo(every=3, fragments=2, nesterov=False),
        StreamingDiLoCo(every=2, fragments=1, delay=1, mix=0.5, collective=Ring()),
        StreamingDiLoCo(every=1, fragments=1),
    ],
    EagerDiLoCo: [EagerDiLoCo(every=2)],
    SlowMo: [
        SlowMo(every=2, inner=DPSGD()),
        SlowMo(every=2),
        SlowMo(every=1),
        SlowMo(every=3, inner=DPSGD(overlap=False), slow_lr=1.0, slow_momentum=0.0),
        SlowMo(every=3, inner=PipeSGD(width=2)),
        SlowMo(every=3, inner=StochasticGradientPush()),
        SlowMo(every=3, inner=LayerwiseSGD(bucket_bytes=SMALL_BUCKET)),
    ],
    FedAvg: [
        FedAvg(every=2),
        FedAvg(every=3, fraction=0.7, proximal=0.5),
        FedAvg(every=3, fraction=1.0),
        FedAvg(every=1, fraction=1.0, collective=Ring()),
    ],
    SPARTA: [SPARTA(fraction=0.3), SPARTA(fraction=1.0), SPARTA(collective=Ring())],
    SignSGD: [SignSGD(momentum=0.0), SignSGD(momentum=0.5)],
    AdasumSGD: [AdasumSGD()],
    DeMo: [DeMo(), DeMo(chunk=16, top_k=2, sign=False)],
    DPSGD: [
        DPSGD(),
        DPSGD(overlap=False, topology=Star()),
        DPSGD(overlap=False),
        DPSGD(overlap=False, topology=Complete()),
        DPSGD(topology=Star()),
        DPSGD(topology=OnePeerExponential()),
    ],
    GradientTracking: [GradientTracking(), GradientTracking(topology=OnePeerExponential())],
    StochasticGradientPush: [StochasticGradientPush(), StochasticGradientPush(topology=Exponential())],
    NoLoCo: [NoLoCo(every=2), NoLoCo(every=1, topology=Star()), NoLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)],
    ADPSGD: [ADPSGD(), ADPSGD(topology=Star())],
    ChocoSGD: [
        ChocoSGD(),
        ChocoSGD(codec=TopK(k=30), consensus_lr=0.3, topology=Star()),
        ChocoSGD(codec=QSGD(group=16), topology=Complete()),
    ],
    StaleSGD: [
        StaleSGD(staleness=Uniform(0, 3)),
        StaleSGD(staleness=Constant(0)),
        StaleSGD(staleness=Constant(2), ramp_steps=4),
    ],
    PartialAllReduce: [PartialAllReduce(quorum=quorum) for quorum in (Quorum.MAJORITY, Quorum.SOLO, Quorum.ALL, 2)]
    + [PartialAllReduce(collective=Linear())],
    SerialSGD: [SerialSGD(), SerialSGD(delay=2)],
    AsyncSGD: [
        AsyncSGD(),
        AsyncSGD(shards=3),
        AsyncSGD(shards=2, clip_norm=0.1),
        AsyncSGD(dedicated=True),
        AsyncSGD(cutoff=1),
    ],
    BackupSGD: [
        BackupSGD(backups=1, shards=2),
        BackupSGD(backups=1),
        BackupSGD(backups=0),
        BackupSGD(backups=0, shards=3),
        BackupSGD(backups=0, dedicated=True),
        BackupSGD(backups=1, dedicated=True),
        BackupSGD(backups=0, timeout_s=0.3),
    ],
    OnlineBackupSGD: [OnlineBackupSGD()],
    DelayCompensatedSGD: [
        DelayCompensatedSGD(),
        DelayCompensatedSGD(strength=0),
        DelayCompensatedSGD(strength=0.5, shards=2),
    ],
    SoftsyncSGD: [SoftsyncSGD(), SoftsyncSGD(splits=2, dedicated=True), SoftsyncSGD(splits=3, shards=2, divide=False)],
    StaleSynchronousSGD: [
        StaleSynchronousSGD(bound=1),
        StaleSynchronousSGD(bound=0, shards=2),
        StaleSynchronousSGD(dedicated=True),
    ],
}


def find_algorithms() -> list[type[Algorithm]]:
    """The algorithms in `workbench.algorithms`, file by file."""
    found: list[type[Algorithm]] = []
    for module_info in pkgutil.walk_packages(workbench.algorithms.__path__, "workbench.algorithms."):
        module = importlib.import_module(module_info.name)
        for _, item in inspect.getmembers(module, inspect.isclass):
            if issubclass(item, Algorithm) and not inspect.isabstract(item) and item.__module__ == module.__name__:
                found.append(item)
    return found


def all_variants() -> list[Algorithm]:
    """Each algorithm in each of its settings; with its defaults where there is no entry."""
    return [variant for kind in find_algorithms() for variant in SETTINGS.get(kind, [kind()])]


def variants(num_ranks: int = 3) -> list[Algorithm]:
    """Those that can run on that many ranks."""
    return [variant for variant in all_variants() if runs_on(variant, num_ranks)]


@cache
def representatives(num_ranks: int = 3) -> tuple[Algorithm, ...]:
    """One of each algorithm: what is run where every run costs time. Found once: many laws ask for each variant."""
    first: dict[type[Algorithm], Algorithm] = {}
    for variant in variants(num_ranks):
        first.setdefault(type(variant), variant)
    return tuple(first.values())


def runs_on(algorithm: Algorithm, num_ranks: int) -> bool:
    """Whether `check` lets it."""
    try:
        algorithm.check(num_ranks)
    except ConfigError:
        return False
    return True


def in_step(algorithms: Iterable[Algorithm]) -> list[Algorithm]:
    """Algorithms whose ranks take their steps together."""
    return [item for item in algorithms if not item.asynchronous]
