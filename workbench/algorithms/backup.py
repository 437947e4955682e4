"""Synchronous SGD with backup workers: each update takes the first N of N + b gradients, and drops the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from workbench.algorithms.first_gradients import FirstGradients
from workbench.algorithms.parameter_server import ServerAlgorithm
from workbench.algorithms.quorum import FixedQuorum
from workbench.arguments import check_whole
from workbench.errors import ConfigError
from workbench.gradients import Layout
from workbench.program import Card


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSGD(FirstGradients):
    """w[t+1] = w[t] - lr * (1/N) sum_{first N} g_k(w[t]),   N = p - b workers

    A worker sends (g, t). The server drops a gradient of an older version than its own, and answers at once with its
    parameters. So a straggler catches up and skips the steps that it missed; no worker is cancelled. Staleness is 0.
    The mean is over the samples of the N gradients. Each server takes its own first N, so a worker may be late for one
    shard only. b = 0 is PS-Sync, synchronous SGD with the sum taken on servers: `ParameterServerSGD`. A worker that
    leaves counts as one of the b. If more than b have left, an update takes the gradients of all remaining workers.
    `OnlineBackupSGD` chooses b for each update. With b = 0, `timeout_s` takes its place; otherwise both hold.

    Attributes:
        backups: b, number of slowest workers that an update does not wait for.

    Paper: chen2016revisiting, Alg. 3-4 and section 3.1, which suggests time-outs.
    """

    card: ClassVar[Card] = Card(
        paper="chen2016revisiting, Alg. 3-4",
        staleness="0; late gradients dropped",
        bytes_per_step="n + 8M; server (p+M-2) (n/M + 8)",
        memory="n on servers; replies in flight",
        roles="N + b workers, M servers",
    )

    backups: int = 1

    def __post_init__(self) -> None:
        FirstGradients.__post_init__(self)
        least = "b, gradients that an update does not wait for, 0 or more; OnlineBackupSGD chooses b itself"
        check_whole("backups", self.backups, 0, least)

    def check(self, num_ranks: int) -> None:
        ServerAlgorithm.check(self, num_ranks)
        workers = self.roles(num_ranks).num_computing
        if self.backups >= workers:
            raise ConfigError(
                f"backups={self.backups} of {workers} workers leave no gradient to wait for: use at most {workers - 1}"
            )

    @property
    def depends_on_timing(self) -> bool:
        return self.backups > 0 or self.timeout_s is not None

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        if self.depends_on_timing:
            return None  # a straggler takes fewer steps
        return ServerAlgorithm.bytes_per_step(self, rank, num_ranks, layout)

    def quorum(self, num_workers: int, now_s: float) -> FixedQuorum:
        return FixedQuorum(num_workers - self.backups)


def ParameterServerSGD(*, shards: int = 1, dedicated: bool = False) -> BackupSGD:  # noqa: N802 - named as a class
    """PS-Sync: servers gather p gradients, update, and return the parameters: `BackupSGD(backups=0)`.

    Paper: li2018pipesgd (PS-Sync); chen2016revisiting, Alg. 3-4 with b = 0 (Sync-Opt).

    >>> ParameterServerSGD(shards=2).backups
    0
    """
    return BackupSGD(backups=0, shards=shards, dedicated=dedicated)
