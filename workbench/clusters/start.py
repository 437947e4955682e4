"""Starts a cluster in a thread, so that a notebook's cell does not have to wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

from workbench.clusters.engines import remote
from workbench.clusters.engines.engines import Engines
from workbench.clusters.engines.world import verified_world
from workbench.clusters.supervision.registry import change_record
from workbench.clusters.supervision.start_progress import Progress, count
from workbench.clusters.waiting import Waiting
from workbench.errors import LaunchError


@final
class Start:
    """Starts the engines by `work`, then checks that they form one world. If either fails, all processes end.

    Args:
        engines: the engines to start.
        progress: shows how many ranks are ready.
        timeout_s: limit for the check, in seconds.
        work: starts the engines.
    """

    def __init__(self, engines: Engines, progress: Progress, timeout_s: float, work: Callable[[], None]) -> None:
        self._ranks: list[dict[str, Any]] = []
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._progress = progress
        self._what = f"{count(engines.num_ranks)} to start ({engines.launcher.title})"

        def run() -> None:
            try:
                work()
                self._ranks = verified_world(engines, timeout_s)
                change_record(engines.folder, ranks=self._ranks)
                engines.client[:].apply_async(remote.warm_up)
                progress.finish()
            except BaseException as error:  # noqa: BLE001 - `wait` raises it
                self._error = error
                progress.fail(error)
                engines.stop()
            finally:
                self._over.set()

        engines.starting = threading.Thread(target=run, name="workbench-start", daemon=True)
        engines.starting.start()

    @property
    def done(self) -> bool:
        """Return True if the start has ended, with success or with an error."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Wait for the start. Return one mapping per rank, in order: rank, size, host, pid, library.

        Raises:
            LaunchError: the ranks did not start.
            TimeoutError: the ranks are not ready after `timeout_s` seconds. The start continues.
        """
        with Waiting(self._what, silent=self._progress.shows_line) as waiting:
            ended = waiting.until(self._over.wait, timeout_s)
        if not ended:
            raise TimeoutError(
                f"the ranks are not ready after {timeout_s:g} s; the start continues: wait() again, or stop()"
            )
        if isinstance(self._error, LaunchError):
            raise LaunchError(str(self._error)) from None
        if self._error is not None:
            raise self._error
        return self._ranks


@contextlib.contextmanager
def detached_on_error(engines: Engines, left: dict[str, Any]) -> Iterator[None]:
    """Detach the cluster again, with its training, if attaching to it fails or is interrupted.

    Args:
        left: what the process that detached the cluster wrote into its folder.
    """
    try:
        yield
    except BaseException:
        engines.detach(**left)
        raise


def end_engines(engines: Engines) -> None:
    """End the engines of a cluster that was garbage collected, or whose program ends.

    The garbage collector may run in one of the threads that must end. So outside the main thread a new thread
    ends them.
    """
    if threading.current_thread() is threading.main_thread():
        engines.stop()
    else:
        threading.Thread(target=engines.stop, name="workbench-cluster-end").start()
