"""Real ends of ranks: a process that kills itself at a chosen place and step, or is killed from outside."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import psutil
import torch
from torch import Tensor

from tests.distributed.pool import RankPool
from tests.distributed.ranks import Outcome
from tests.laws import tiny
from workbench.codecs.base import Codec
from workbench.machine import is_running
from workbench.runtimes.checkpoint.files import complete_checkpoints
from workbench.trace.recorder import FileRecorder

Place = Literal["forward", "collective", "codec", "record", "checkpoint"]
IN_COLLECTIVE_S = 0.3  # so long the victim waits in a collective for another rank before it is killed
DEATH_S = 20.0  # the longest wait for that


def die() -> None:
    """End this process now, as the kernel does when memory is exhausted."""
    os.kill(os.getpid(), signal.SIGKILL)


class CountsSteps(tiny.FailsAt):
    """The MLP, with an action at one step of its training."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        super().__init__(None, step)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.count == self.step:
            self.act()
        return super().forward(x)


class Slow(tiny.FailsAt):
    """The MLP, which takes at least that long."""

    def __init__(self, seconds: float = 0.02) -> None:
        super().__init__(None, 0)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        return super().forward(x)


class Late(Slow):
    """The MLP, which takes so long on odd ranks that its gradients wait for rounds."""

    def __init__(self) -> None:
        super().__init__(0.03 if rank_here() % 2 else 0.005)


class SlowUntil(Slow):
    """The MLP, which is slow until a file exists, and then takes a twentieth: nobody waits for the rest of the run.

    Attributes:
        makes_it_at: in this process: the number of the step in which it makes the file.
    """

    makes_it_at: ClassVar[int | None] = None

    def __init__(self, seconds: float, path: Path) -> None:
        super().__init__(seconds)
        self.usual_s, self.path = seconds, path

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.count == self.makes_it_at:
            self.path.touch()
        if self.training and self.path.exists():
            self.seconds = self.usual_s / 20
        return super().forward(x)


@final
@dataclass(frozen=True)
class Dies:
    """The tiny problem's model, on whose rank `rank` the process ends at `step`.

    Args:
        place: in forward; in a collective, while another rank keeps all waiting; in a codec's hop; with half a line of
            its record written; with half a checkpoint written (the run must be stopped after that step).
        once: a file whose presence says that it happened already; None: always.
    """

    place: Place
    rank: int
    step: int
    once: str | None = None

    def __call__(self) -> torch.nn.Module:
        me = rank_here()
        if self.once is not None and Path(self.once).exists():
            return tiny.FailsAt(None, 0)
        if self.place == "collective" and me != self.rank:
            return CountsSteps(self.step, self._wait_for_death)
        return CountsSteps(self.step, self._arm) if me == self.rank else tiny.FailsAt(None, 0)

    def _wait_for_death(self) -> None:
        """Keep the victim waiting in the collective until it is dead.

        Its timer is late on a busy machine: `once` holds its number.
        """
        if self.once is None:
            time.sleep(2 * IN_COLLECTIVE_S)
            return
        deadline = time.monotonic() + DEATH_S
        while time.monotonic() < deadline and not self._victim_is_dead():
            time.sleep(0.01)

    def _victim_is_dead(self) -> bool:
        assert self.once is not None
        pid = Path(self.once).read_text() if Path(self.once).exists() else ""
        try:
            return bool(pid) and not is_running(psutil.Process(int(pid)))
        except psutil.NoSuchProcess:
            return True

    def _arm(self) -> None:
        if self.once is not None:
            Path(self.once).write_text(str(os.getpid()))
        match self.place:
            case "forward":
                die()
            case "collective":
                threading.Timer(IN_COLLECTIVE_S, die).start()
            case "codec":
                DyingCodec.armed = True
            case "record":
                FileRecorder._write = _half_a_line  # type: ignore[method-assign]
            case "checkpoint":
                torch.save = _half_a_file  # type: ignore[assignment]


def _half_a_line(self: FileRecorder) -> None:
    os.write(self._metrics_file, b'{"step": 3, "secon')
    die()


def _half_a_file(value: Any, file: Any) -> None:
    file.write(b"PK\x03\x04 half of it")
    file.flush()
    die()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DyingCodec(Codec):
    """Sends values as they are; once armed, the process ends where a received block is decoded, with the ring's next message unsent."""

    armed: ClassVar[bool] = False

    def wire_bytes(self, numel: int) -> int:
        return 8 * numel

    def encode(self, values: Tensor, noise: torch.Generator | None = None) -> Tensor:
        return values.double().clone().view(torch.uint8)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        if DyingCodec.armed:
            die()
        return wire.clone().view(torch.float64).to(like.dtype)


def rank_here() -> int:
    """This process's rank, with any launcher."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


class DiesAt(tiny.FailsAt):
    """The MLP, whose process is killed in the forward pass of a step; if a folder is given, not before it has a complete checkpoint."""

    def __init__(self, step: int, behind: str | None = None) -> None:
        super().__init__(None, step)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training and self.count == self.step + 1:
            deadline = time.monotonic() + 20.0
            while self.behind and not complete_checkpoints(Path(self.behind)) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return out


def outcomes(
    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
    timeout_s: float = 40.0,
    runtime: Literal["torch", "mpi"] = "torch",
) -> dict[int, Outcome]:
    """Return the outcome of each rank's call, in new processes; a killed rank has no outcome."""
    pool = RankPool(runtime, len(calls), outlives=runtime == "mpi")
    try:
        ends = pool.outcomes(calls, timeout_s=timeout_s, may_die=True)
    finally:
        pool.close()
    return {rank: end for rank, end in enumerate(ends) if not isinstance(end.error, EOFError | ConnectionError)}
