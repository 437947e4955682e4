"""A cluster's start, in a thread of its own, so that a notebook's cell need not wait for it."""

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
    """`work` starts the engines; then they are asked who they are. If either fails, nothing is left running.

    Args:
        timeout_s: for the answer.
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
            except BaseException as error:  # noqa: BLE001 - raised where somebody waits
                self._error = error
                progress.fail(error)
                engines.stop()
            finally:
                self._over.set()

        engines.starting = threading.Thread(target=run, name="workbench-start", daemon=True)
        engines.starting.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Who the ranks are, in order.

        Raises:
            LaunchError: they did not start.
            TimeoutError: they are not ready after `timeout_s`; the start goes on.
        """
        with Waiting(self._what, silent=self._progress.tells) as waiting:
            there = waiting.until(self._over.wait, timeout_s)
        if not there:
            raise TimeoutError(f"the ranks are not ready after {timeout_s:g} s; the start goes on: wait() again, or stop()")
        if isinstance(self._error, LaunchError):
            raise LaunchError(str(self._error)) from None
        if self._error is not None:
            raise self._error
        return self._ranks


@contextlib.contextmanager
def or_let_go(engines: Engines, told: dict[str, Any]) -> Iterator[None]:
    """An error or an interrupt while a cluster is taken up leaves it as it was found, with its training: detached.

    Args:
        told: what who detached it said.
    """
    try:
        yield
    except BaseException:
        engines.detach(**told)
        raise


def end_engines(engines: Engines) -> None:
    """When the cluster is no longer referred to: in the main thread at the program's end, else in a thread of its own,

    because the collector may have been called in one of the threads that are to be ended.
    """
    if threading.current_thread() is threading.main_thread():
        engines.stop()
    else:
        threading.Thread(target=engines.stop, name="workbench-cluster-end").start()
