"""Checks of the machine: limits, shared memory, the run store, addresses, Slurm, GPUs, an emulated network."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.schedulers.dialects import DIALECTS
from workbench.doctor.check_result import CheckResult, State
from workbench.errors import WorkbenchError
from workbench.machine import num_cores
from workbench.trace.store import runs_root
from workbench.units import GB, MB

MIN_FILES, MIN_PROCESSES = 1024, 512
MIN_SHARED_BYTES, MIN_FREE_BYTES = 64 * MB, 1 * GB
ANSWER_S = 10.0


def limits() -> Iterator[CheckResult]:
    """Check cores, open files, processes and shared memory."""
    yield CheckResult("cores", "ok", f"{num_cores()} for this process, {os.cpu_count()} in the machine")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < MIN_FILES
    yield CheckResult(
        "open files", "warning" if few else "ok", _limit(files), f"ulimit -n {4 * MIN_FILES}" if few else ""
    )
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    few = processes != resource.RLIM_INFINITY and processes < MIN_PROCESSES
    yield CheckResult(
        "processes", "warning" if few else "ok", _limit(processes), f"ulimit -u {8 * MIN_PROCESSES}" if few else ""
    )
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared)
        small = size.free < MIN_SHARED_BYTES
        fix = "mount -o remount,size=1G /dev/shm; in a container: docker run --shm-size=1g" if small else ""
        found = f"{size.free / MB:.0f} MB free of {size.total / MB:.0f} MB in {shared}"
        yield CheckResult("shared memory", "warning" if small else "ok", found, fix)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else f"at most {value}"


def store() -> CheckResult:
    """Check that runs can be written, and how much space is free."""
    root = runs_root().absolute()
    existing = next(path for path in (root, *root.parents) if path.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{existing} is no folder")
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".doctor-"):
            pass
    except OSError as error:
        fix = "export WORKBENCH_RUNS=FOLDER, with a folder that you can write to"
        return CheckResult("run store", "fault", f"{root} cannot be written ({error.strerror})", fix, core=True)
    free = shutil.disk_usage(existing).free
    scarce = free < MIN_FREE_BYTES
    fix = "workbench runs remove --where status=failed, or export WORKBENCH_RUNS=FOLDER" if scarce else ""
    return CheckResult("run store", "warning" if scarce else "ok", f"{root}, {free / GB:.1f} GB free", fix)


def addresses() -> Iterator[CheckResult]:
    """Check that a port of this machine can be reached over loopback, and by the host name, which ranks use."""
    for part, name, fix, core in (
        ("loopback", "127.0.0.1", "ip link set lo up", True),
        ("host name", socket.gethostname(), f"add a line `127.0.1.1 {socket.gethostname()}` to /etc/hosts", False),
    ):
        try:
            port = _reach(name)
        except OSError as error:
            state: State = "fault" if core else "warning"
            yield CheckResult(part, state, f"{name} cannot be reached ({error.strerror or error})", fix, core=core)
        else:
            yield CheckResult(part, "ok", f"{name} ({socket.gethostbyname(name)}), tried on port {port}")


def _reach(name: str) -> int:
    with closing(socket.socket()) as listener:
        listener.bind((name, 0))
        listener.listen(1)
        listener.settimeout(ANSWER_S)
        port = int(listener.getsockname()[1])
        with closing(socket.create_connection((name, port), timeout=ANSWER_S)), closing(listener.accept()[0]):
            return port


def slurm() -> CheckResult:
    """Check whether Slurm is installed and answers."""
    program = shutil.which("sinfo")
    if program is None:
        return CheckResult("slurm", "missing", "no sinfo: not a node of a Slurm cluster")
    try:
        done = subprocess.run(
            [program, "-h", "-o", "%P %D"], capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return CheckResult(
            "slurm",
            "missing",
            f"{program} does not answer within {ANSWER_S:g} s",
            "scontrol ping shows which controller does not answer",
        )
    if done.returncode != 0:
        message = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        return CheckResult(
            "slurm", "missing", f"{program}: {message}", "scontrol ping shows which controller does not answer"
        )
    if not shutil.which("sbatch"):
        return CheckResult("slurm", "warning", "it answers, but there is no sbatch", "put Slurm's bin folder on PATH")
    partitions = "; ".join(f"partition {line}" for line in done.stdout.split("\n") if line)
    return CheckResult("slurm", "ok", f"{partitions} nodes")


def schedulers() -> Iterator[CheckResult]:
    """Name the other schedulers whose commands are on this machine."""
    for command in dict.fromkeys(dialect.submit_with[0] for dialect in DIALECTS.values()):
        if shutil.which(command):
            names = [f"'{name}:...'" for name, dialect in DIALECTS.items() if dialect.submit_with[0] == command]
            yield CheckResult(
                "scheduler",
                "ok",
                f"{command}: launcher={' or '.join(names)}; docs/how-to/schedulers.md says what was tested",
            )


def gpu(torch_devices: list[str] | None) -> CheckResult:
    """Check the GPUs of the driver and those of torch.

    Args:
        torch_devices: names of the GPUs that torch can use; None if torch could not be asked.
    """
    if torch_devices:
        return CheckResult("gpu", "ok", f"{len(torch_devices)}: {', '.join(dict.fromkeys(torch_devices))}")
    program = shutil.which("nvidia-smi")
    cards: list[str] = []
    if program is not None:
        try:
            done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=ANSWER_S, check=False)
            cards = (
                [line for line in done.stdout.splitlines() if line.startswith("GPU")] if done.returncode == 0 else []
            )
        except (OSError, subprocess.TimeoutExpired):
            return CheckResult(
                "gpu", "warning", f"{program} does not answer within {ANSWER_S:g} s", "dmesg | grep -i nvrm shows why"
            )
    if cards and torch_devices is None:
        return CheckResult("gpu", "ok", f"{len(cards)} in the machine; torch was not asked")
    if cards and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return CheckResult(
            "gpu", "missing", f"{len(cards)} here, hidden by CUDA_VISIBLE_DEVICES: ranks compute on the CPU"
        )
    if cards:
        fix = "pip install torch --force-reinstall, with a build for CUDA: see https://pytorch.org/get-started"
        return CheckResult("gpu", "warning", f"{len(cards)} here, but this build of torch uses none", fix)
    return CheckResult("gpu", "missing", "none: ranks compute on the CPU")


def emulation() -> CheckResult:
    """Check whether an emulated network of two hosts can be made."""
    try:
        with EmulatedNetwork(2):
            rights = "root" if os.geteuid() == 0 else "user namespaces"
            return CheckResult("emulated network", "ok", f"two hosts were made, with {rights}")
    except WorkbenchError as error:
        first, _, rest = str(error).partition("\n")
        fix = rest.strip() or "see the message; or run as root on Linux with iproute2"
        return CheckResult("emulated network", "missing", first, fix)
