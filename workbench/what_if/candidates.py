"""The algorithms that a study compares by default."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    DeAR,
    LayerwiseSGD,
    LocalSGD,
    PipeSGD,
    SynchronousSGD,
)
from workbench.codecs import ErrorFeedback, Linear8, Truncate16
from workbench.collectives import Collective, Native, Ring
from workbench.naming import kebab
from workbench.program import Algorithm, defaults_of, settings_of
from workbench.units import KIB, MIB

CHUNKS = 4  # pieces of a ring's hop, so that encoding overlaps with sending
BUCKETS = 8  # that a small gradient is cut into; a large one has buckets of 1 MiB


def default_candidates(workers: int, num_bytes: int) -> list[Algorithm]:
    """Return a dozen algorithms, the plainest first.

    Servers are sharded over all ranks, as sums are. A sixteenth of the workers are backups.

    Args:
        num_bytes: size of a gradient.
    """
    bucket = int(min(1 * MIB, max(64 * KIB, num_bytes / BUCKETS)))
    if workers < 2:
        return [SynchronousSGD()]

    def ring(codec: Linear8 | Truncate16) -> Collective:
        return Ring(codec=codec, chunks=CHUNKS)

    found: list[Algorithm] = [
        SynchronousSGD(),
        LayerwiseSGD(bucket_bytes=bucket),
        DeAR(bucket_bytes=bucket),
        SynchronousSGD(collective=ring(Truncate16())),
        SynchronousSGD(collective=ring(Linear8())),
        LayerwiseSGD(bucket_bytes=4 * bucket, collective=ring(Linear8())),
        PipeSGD(width=2),
        PipeSGD(width=2, collective=ring(Truncate16())),
        PipeSGD(width=2, collective=ring(Linear8())),
        PipeSGD(width=3),
        LocalSGD(every=8),
        AsyncSGD(shards=workers),
    ]
    if workers > 2:
        found.append(BackupSGD(backups=max(1, workers // 16), shards=workers))
    return found


def name_of(algorithm: Algorithm) -> str:
    """Return a name: the class, its first setting and those that differ from their defaults, and the codec or collective.

    >>> name_of(PipeSGD(width=3)), name_of(SynchronousSGD(collective=Ring(codec=Linear8())))
    ('PipeSGD(width=3)', 'SynchronousSGD with linear8')
    """
    quiet = {"collective", "bucket_bytes", "shards", "apply", "clip_norm", *defaults_of(algorithm)}
    shown = {name: value for name, value in settings_of(algorithm).items() if name not in quiet}
    if getattr(algorithm, "clip_norm", None) is not None:
        shown["clip_norm"] = getattr(algorithm, "clip_norm")  # noqa: B009 - not every algorithm has it
    kind = type(algorithm).__name__
    said = f"{kind}({', '.join(f'{name}={value}' for name, value in shown.items())})" if shown else kind
    collective = getattr(algorithm, "collective", None)
    if collective is None or isinstance(collective, Native):
        return said
    return f"{said} with {codec_name_of(algorithm) or _brief(type(collective).__name__, collective)}"


def codec_name_of(algorithm: Algorithm) -> str | None:
    """Return the codec of an algorithm's collective, with the settings that differ from their defaults.

    >>> from workbench.codecs import ErrorFeedback, TopK
    >>> from workbench.collectives import Once
    >>> codec_name_of(SynchronousSGD(collective=Once(codec=ErrorFeedback(codec=TopK(fraction=0.01)))))
    'error-feedback of top-k(fraction=0.01)'
    """
    codec: Any = getattr(getattr(algorithm, "collective", None), "codec", None)
    return None if codec is None else _codec_name(codec)


def _codec_name(codec: Any) -> str:
    name = kebab(type(codec).__name__)
    return f"{name} of {_codec_name(codec.codec)}" if isinstance(codec, ErrorFeedback) else _brief(name, codec)


def _brief(name: str, made: Any) -> str:
    """Return a name with the settings of a codec or collective that differ from their defaults."""
    if not is_dataclass(made):
        return name
    shown = [f"{item.name}={value}" for item in fields(made) if (value := getattr(made, item.name)) != item.default]
    return f"{name}({', '.join(shown)})" if shown else name
