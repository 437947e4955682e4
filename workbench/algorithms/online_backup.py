"""Synchronous SGD with backup workers whose number is chosen for each update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from workbench.algorithms.first_gradients import FirstGradients
from workbench.algorithms.quorum import OnlineQuorum
from workbench.arguments import check_number
from workbench.gradients import Layout
from workbench.program import Card


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineBackupSGD(FirstGradients):
    """w[t+1] = w[t] - lr * (1/N) sum_{first N} g_k(w[t]),   N = argmin_N t(N) (1 + S/N)

    As `BackupSGD`, but each server chooses N again for every update. t(N) is the measured mean time of the N-th
    gradient. S is the noise scale of the gradients, in units of one worker's batch. With N gradients in each update,
    I (1 + S/N) updates are needed, where I is their number without noise. N is p while times or noise are unknown.

    Attributes:
        noise_scale: S, noise of the gradients in units of one worker's batch; none: measured, with N at least 2.

    Paper: xu2020dynamic, whose idea this is; mccandlish2018empirical, appendix A.1, for the noise scale.
    """

    card: ClassVar[Card] = Card(
        paper="xu2020dynamic; mccandlish2018empirical, A.1",
        staleness="0; late gradients dropped",
        bytes_per_step="n + 8M; server (p+M-2) (n/M + 8)",
        memory="n on servers; replies in flight",
        roles="p workers, M servers",
    )

    noise_scale: float | None = None

    def __post_init__(self) -> None:
        FirstGradients.__post_init__(self)
        if self.noise_scale is not None:
            check_number("noise_scale", self.noise_scale, 0, "S, in gradients of one worker, or None to measure it")

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        return None  # a straggler takes fewer steps

    def quorum(self, num_workers: int, now_s: float) -> OnlineQuorum:
        return OnlineQuorum(num_workers, self.noise_scale, now_s)
