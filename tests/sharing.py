"""How workers of pytest-xdist share the tests: each file has one worker, and tests that need the whole machine run
alone, at the end.

`make test` has three workers: tests often wait, for processes that start and for time-outs. A worker has its own pools
of ranks and, as root, its own ports.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Tests for which the machine must be quiet, by file or by name, with the reason. One worker runs them when all others
# have ended.
ALONE = {
    "tests/distributed/test_leaks.py": "looks for shared memory that nobody uses on the whole machine, where other tests kill ranks",
    "tests/distributed/test_calibrate.py": "foretells the seconds of steps from the seconds of others",
    "tests/distributed/test_emulated.py::test_rates_are_those_of_the_slower_end": "measures rates",
    "tests/distributed/test_emulated.py::test_a_rate_up_limits_where_it_is_the_lower": "measures rates",
    "tests/distributed/test_emulated.py::test_latency_is_added_and_the_rate_is_kept": "measures times and rates",
    "tests/distributed/test_emulated_faults.py::test_a_rate_can_be_changed_in_both_directions": "measures rates",
}

# Files of one worker: namespaces that are gone are recognised by numbers, which the kernel uses again.
NETWORKS = (
    "tests/distributed/test_emulated.py",
    "tests/distributed/test_emulated_faults.py",
    "tests/distributed/test_slurm.py",
    "tests/distributed/test_cluster_ssh.py",
    "tests/distributed/test_batch_jobs.py",
    "tests/distributed/test_doctor.py",
)

ALONE_UNIT, NETWORKS_UNIT = "alone", "tests/distributed/ on emulated networks"

# Files of a minute or more: a worker that began one as the last would be alone with it.
LONG = (
    "tests/notebooks/test_docs_code.py",
    "tests/browser/test_panel_ranks.py",
    "tests/distributed/test_rejoin.py",
    "tests/notebooks/test_study.py",
    "tests/distributed/test_killed.py",
    "tests/notebooks/test_reproduce.py",
    "tests/distributed/test_cluster.py",
    "tests/browser/test_panel.py",
    "tests/distributed/test_cluster_life.py",
    "tests/browser/test_lab.py",
    "tests/distributed/test_checkpoints.py",
    "tests/browser/test_live_views.py",
    "tests/distributed/test_ddp_hooks.py",
    "tests/browser/test_panel_lost.py",
)

# The longest unit comes first. Every second worker begins at the other end, where waiting is least: they meet at short
# files, and end at about the same time.
ORDER = (
    NETWORKS_UNIT,
    *LONG,
    "tests/distributed/",
    "tests/notebooks/",
    "tests/browser/",
    "workbench/",
    "tests/unit/",
    "tests/laws/",
)

NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h


def unit_of(nodeid: str) -> str:
    """The unit of a test: its file, or files that the same worker must run."""
    path = nodeid.partition("::")[0]
    if path in ALONE or nodeid.partition("[")[0] in ALONE:
        return ALONE_UNIT
    return NETWORKS_UNIT if path in NETWORKS else path


def place_of(unit: str) -> int:
    """Of a unit of work in the order of all."""
    return next((place for place, folder in enumerate(ORDER) if unit.startswith(folder)), len(ORDER))


class Sharing(LoadScopeScheduling):
    """xdist's sharing by units of work, from both ends; the unit of those that must be alone waits until one worker is left.

    Other units of a folder come in the order in which they were collected, which pytest-randomly draws, and not by
    their number of tests.
    """

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        units = sorted((unit for unit in self.workqueue if unit != ALONE_UNIT), key=place_of)
        if units:
            backwards = int(node.gateway.id.removeprefix("gw")) % 2
            self.workqueue.move_to_end(units[-1 if backwards else 0], last=False)
        elif self.nodes != [node]:
            return
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker tests as often as it asks: with only one test it would wait for the next one, and never report."""
        left = None
        while not node.shutting_down and left != len(self.workqueue):
            left = len(self.workqueue)
            self._give(node)

    def _give(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # it came in the place of one that crashed, and still collects
        others = [other for other in self.nodes if other is not node]
        if not others or list(self.workqueue) != [ALONE_UNIT]:
            super()._reschedule(node)
        elif self._pending_of(self.assigned_work[node]) <= 2 and not all(one.shutting_down for one in others):
            node.shutdown()  # after its last tests; the last worker that has work continues

    def remove_node(self, node: WorkerController) -> str | None:
        """As xdist's, but that a test in which a worker ended is not run again."""
        workload = self.assigned_work.pop(node)
        ended_in = next((test for tests in workload.values() for test, done in tests.items() if not done), None)
        if ended_in is not None:
            workload[unit_of(ended_in)][ended_in] = True
            self.workqueue.update({unit: tests for unit, tests in workload.items() if not all(tests.values())})
        for other in self.nodes if self.collection is not None else ():
            self._reschedule(other)
        return ended_in


def take_own_network() -> None:
    """As root on Linux: ports of this process's own, and of all that it starts.

    A free port that is picked for another process, as Jupyter does for its kernels, may meanwhile be taken by another
    test. If namespaces are forbidden, ports are shared. The addresses of the machine's name lead to loopback.
    """
    ip = shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or ip is None:
        return
    addresses: list[str] = []
    with suppress(OSError):
        addresses = [
            address for address in socket.gethostbyname_ex(socket.gethostname())[2] if not address.startswith("127.")
        ]
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) != 0:
        return
    lines = ["link set lo up", *(f"addr add {address}/32 dev lo" for address in addresses)]
    subprocess.run([ip, "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True, timeout=20)
