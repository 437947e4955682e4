"""What every test is given: one compute thread, a run store of its own, and what the machine must have for a marked one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import settings

# The limit is pytest's own; and a failure in continuous integration must come back on the next run.
settings.register_profile("workbench", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("workbench")


def _found(*commands: str) -> bool:
    return any(shutil.which(command) for command in commands)


def _has_modules(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


def _mpiexec() -> bool:
    return _has_modules("mpi4py") and _found("mpiexec", str(Path(sys.prefix, "bin", "mpiexec")))


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "mpi": (_mpiexec, "no mpiexec: pip install 'sgd-workbench[mpi]'"),
    "notebooks": (lambda: _has_modules("ipyparallel", "papermill", "plotly"), "no Jupyter: pip install 'sgd-workbench[notebooks]'"),
    "browser": (lambda: _found("chromium", "google-chrome", "chromium-browser", "chrome"), "no Chrome or Chromium"),
    "root": (lambda: os.geteuid() == 0 and _found("ip") and _found("tc"), "needs root and iproute2"),
    "slurm": (lambda: all(map(_found, ("slurmctld", "slurmd", "munged", "sbatch"))), "no Slurm: apt-get install slurm-wlm munge"),
    "gpu": (torch.cuda.is_available, "no CUDA device"),
}


def pytest_configure(config: pytest.Config) -> None:
    """A shell ignores interrupts of what it starts in the background, and so would all that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        from tests.sharing import take_own_network

        take_own_network()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one worker's, and what cannot share the machine has it alone: see `tests/sharing.py`."""
    from tests.sharing import Sharing

    return Sharing(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test, with the reason, on a machine that lacks what the marker stands for."""
    for marker, (available, reason) in NEEDS.items():
        if item.get_closest_marker(marker) and not available():
            pytest.skip(reason)


@pytest.fixture(autouse=True, scope="module")
def ranks_end_with_the_file() -> Iterator[None]:
    """Runs that failed, and hooks of DDP, leave groups of gloo in their ranks, each with a thread that wakes a hundred times a second."""
    yield
    if "tests.distributed.pool" in sys.modules:
        sys.modules["tests.distributed.pool"].end_torch_ranks()


@pytest.fixture(autouse=True, scope="session")
def single_threaded() -> None:
    """One compute thread here and in started ranks: sums come out the same on every machine, and ranks do not fight for cores."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty run store, also of the processes that the test starts."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("WORKBENCH_RUNS", str(folder))
    return folder


@pytest.fixture(scope="session")
def mpich() -> dict[str, str]:
    """Environment variables under which `mpiexec` and mpi4py are MPICH's, from the wheel that `make test` puts aside."""
    prefix = Path(os.environ.get("WORKBENCH_TEST_MPICH", Path(sys.prefix, "opt", "mpich")))
    libraries = sorted([*prefix.glob("lib/libmpi.so.*"), *prefix.glob("lib/libmpi.*.dylib")])
    if not libraries:
        pytest.skip("no MPICH wheel beside the environment: make test puts it there")
    return {"MPI4PY_LIBMPI": str(libraries[0]), "PATH": f"{prefix / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if a process it started, however far down and whoever adopted it, is alive ten seconds after its end."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("WORKBENCH_TEST_MARK", mark)
    yield
    deadline = time.monotonic() + 10
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, "processes left behind:\n" + "\n".join(f"{process.pid} {command[:120]}" for process, command in left.items())


def _marked(mark: str) -> dict[psutil.Process, str]:
    """Living processes that inherited the mark, with their command lines."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, or another user's
            if process.environ().get("WORKBENCH_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = " ".join(process.cmdline())
    return found
