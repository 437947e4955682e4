"""The end of a process with an unfinished `Trainer`: the other ranks learn why, and no thread stays in the library."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import warnings
from typing import final

from workbench.errors import LaunchError, RankMismatch
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.failure_detector import FailureDetector
from workbench.runtimes.transport.base import Transport
from workbench.runtimes.user_loop.monitored_barrier import MonitoredBarrier

IN_FLIGHT_S = 5.0  # how long a process waits at its end for operations in progress
FIX = "use `with Trainer(...) as trainer:`, or call trainer.finish() on every rank after the last step"


@final
class ProcessEnd:
    """What a `Trainer` does at the end of its process. It holds no reference to the `Trainer`.

    Attributes:
        failed: the failure has been announced already.
    """

    def __init__(
        self,
        transport: Transport,
        interpreter: Interpreter,
        detector: FailureDetector | None,
        barrier: MonitoredBarrier,
    ) -> None:
        self.failed = False
        self._transport, self._interpreter, self._detector, self._barrier = transport, interpreter, detector, barrier
        atexit.register(self._end)

    def forget(self) -> None:
        """Do nothing at the end of the process: the `Trainer` was released before."""
        atexit.unregister(self._end)

    def collected(self) -> None:
        """The `Trainer` was collected, so it takes no more steps. Must not wait: this may run on one of its threads."""
        with contextlib.suppress(RuntimeError):  # the process that holds the announcements is gone
            self._barrier.leave()

    def _end(self) -> None:
        if not self.failed:
            steps = "1 step" if self._barrier.steps == 1 else f"{self._barrier.steps} steps"
            reason = f"rank {self._transport.rank} ended after {steps} without trainer.finish()"
            error = getattr(sys, "last_value", None)
            why = f", because of {type(error).__name__}: {error}" if error is not None else f": {FIX}"
            if self._detector is not None:
                self._detector.leave(reason + why)
            self.collected()
            if error is None:
                with contextlib.suppress(Warning):  # as an error it would only be printed here
                    warnings.warn(
                        f"{reason}, so updates in flight are lost, and the model still has the Trainer's hooks: {FIX}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        self._interpreter.close()
        deadline = time.monotonic() + IN_FLIGHT_S
        while not self._interpreter.ended and time.monotonic() < deadline and not self._others_failed():
            time.sleep(1e-3)  # operations in progress end if the other ranks take part
        if not self._interpreter.ended:
            self._interpreter.clock.failure = LaunchError("this process ends")
            self._transport.abort_waits()
            self._interpreter.close()
        if self._detector is not None:
            self._detector.join_thread()

    def _others_failed(self) -> bool:
        try:
            self._barrier.num_arrived()
            return self.failed or self._transport.peer_failure() is not None
        except (RuntimeError, RankMismatch):
            return True
