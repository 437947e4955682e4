"""A Slurm for tests: its controller and a login shell on one emulated host, a node daemon on each of the others.

Everything lies in one folder and ends with the network's process namespace. The hosts share this machine's files and
/tmp, so Slurm's files there are named by node.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from workbench.clusters.emulated import EmulatedNetwork

START_S = 30.0
ANSWER_S = 110.0
CONF = """\
ClusterName=workbench
SlurmctldHost=host0(10.87.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
TmpFS={root}/tmp-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=10
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP
PartitionName=down Nodes=ALL State=DOWN
"""
SERVE = """
import os, pickle, struct, sys, traceback
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
while size := sys.stdin.buffer.read(8):
    try:
        function, arguments = pickle.loads(sys.stdin.buffer.read(*struct.unpack("Q", size)))
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    body = pickle.dumps(answer)
    answers.write(struct.pack("Q", len(body)) + body)
    answers.flush()
"""


class SlurmWorld:
    """`num_nodes` nodes of `cpus` CPUs and two GPUs each, as Slurm counts; `host0` is where users log in.

    Args:
        root: an empty folder with a short path: a socket lies in it.
    """

    def __init__(self, root: Path, num_nodes: int = 2, cpus: int = 4) -> None:
        self.root, self.nodes = root, [f"host{index + 1}" for index in range(num_nodes)]
        for name in ("state", "home", "cache", *(f"{kind}-{node}" for node in self.nodes for kind in ("spool", "tmp"))):
            (root / name).mkdir(parents=True)
        addresses = [f"10.87.0.{index + 2}" for index in range(num_nodes)]
        rows = [
            f"NodeName={node} NodeAddr={at} CPUs={cpus} Gres=gpu:2"
            for node, at in zip(self.nodes, addresses, strict=True)
        ]
        (root / "slurm.conf").write_text(CONF.format(root=root, nodes="\n".join(rows)))
        (root / "gres.conf").write_text(f"NodeName={','.join(self.nodes)} Name=gpu File=/dev/null,/dev/zero\n")
        key = root / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))},
            "SLURM_CONF": str(root / "slurm.conf"),
            "HOME": str(root / "home"),
            "XDG_CACHE_HOME": str(root / "cache"),
            "WORKBENCH_MACHINE": "slurm-world",  # the nodes share this machine's cores
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_pml": "ob1",
        }
        self.network = EmulatedNetwork(1 + num_nodes, rate="10gbit")
        self._shell: subprocess.Popen[bytes] | None = None
        self._daemons: list[subprocess.Popen[Any]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        root, path = self.root, shutil.which("munged") or "munged"
        files = [f"--{name}-file={root}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("host0", [path, "--foreground", "--force", f"--socket={root}/munge.socket", *files])
        self._within(lambda: (root / "munge.socket").exists(), "munged listens")
        self._daemon("host0", ["slurmctld", "-D"])
        for node in self.nodes:
            self._daemon(node, ["slurmd", "-D", "-N", node])
        self._within(
            lambda: self.sh("sinfo -h -N -p debug -o %T").split() == ["idle"] * len(self.nodes), "all nodes are idle"
        )

    def _daemon(self, host: str, argv: list[str]) -> None:
        with (self.root / f"{host}-{Path(argv[0]).name}.out").open("wb") as out:
            self._daemons.append(self.popen(argv, host, stdout=out, stderr=out, stdin=subprocess.DEVNULL))

    def _within(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline:
                said = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.root.glob("*.out")))
                raise RuntimeError(f"not in {START_S} s: {what}\n{said}")
            time.sleep(0.05)

    def popen(
        self, argv: Sequence[str], host: str = "host0", env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """A process on a host, with nothing of the emulated network's own environment."""
        return subprocess.Popen(self.network.command(host, argv), env={**self.env, **(env or {})}, **options)

    def sh(
        self, line: str, *, host: str = "host0", env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> str:
        """What a shell's line on a host says."""
        process = self.popen(
            ["sh", "-c", line],
            host,
            env={**self.env, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            return str(process.communicate(timeout=timeout_s)[0])
        finally:
            process.kill()

    def jobs(self) -> list[str]:
        """Numbers of the jobs in the queue."""
        return self.sh("squeue -h -o %i").split()

    def told(self, job: str) -> str:
        """What Slurm says of a job: the queue, the job itself, and the ends of its daemons' logs."""
        logs = "\n".join(f"{path.name}: ...{path.read_text()[-2000:]}" for path in sorted(self.root.glob("slurm*.log")))
        return f"squeue:\n{self.sh('squeue')}\nscontrol show job:\n{self.sh(f'scontrol show job {job}')}\n{logs}"

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of a test returns that runs on the login host, in one process for all of them."""
        if self._shell is None:
            self._shell = self.popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._shell.stdin is not None and self._shell.stdout is not None
        body = cloudpickle.dumps((function, arguments))
        self._shell.stdin.write(struct.pack("Q", len(body)) + body)
        self._shell.stdin.flush()
        size = self._shell.stdout.read(8)
        assert size, "the login shell has ended"
        good, answer = pickle.loads(self._shell.stdout.read(*struct.unpack("Q", size)))
        assert good, f"on the login host:\n{answer}"
        return answer

    def close(self) -> None:
        """End all of it."""
        if self._shell is not None and self._shell.stdin is not None and self._shell.stdout is not None:
            self._shell.stdin.close()
            self._shell.stdout.close()
        self.network.close()
        for process in [*self._daemons, *([self._shell] if self._shell else [])]:
            process.wait()


def send_by_value(module: ModuleType) -> None:
    """Functions of that module travel with their code: the login shell cannot import tests."""
    cloudpickle.register_pickle_by_value(module)
