"""Fixtures of every test: one compute thread and an empty run store; and what the machine must have for a marked test."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import random
import re
import shutil
import signal
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.core
import psutil
import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings

if TYPE_CHECKING:
    from tests.leftovers import Definitions

os.environ["WORKBENCH_CONFIG"] = os.devnull  # the user's defaults do not count in tests
# `python` in a test's command is this environment's. Some machines have no other one, and on others it lacks the package.
os.environ["PATH"] = os.pathsep.join(
    dict.fromkeys([sysconfig.get_path("scripts"), *os.environ.get("PATH", os.defpath).split(os.pathsep)])
)

# Jupyter's library for schemas would build a grammar with it, for a second of a core; our files have no such addresses.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# torch is imported where tests run: the workers start when this file is loaded, and it takes two seconds.

# The limit is pytest's own. In continuous integration the examples are always the same, so that a failure is that of
# the change.
settings.register_profile("workbench", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("workbench")


_definitions: Definitions | None = None
_longer = False  # a fixture that lasts longer than a test has begun or ended, and may have replaced functions
_largest = (0, "")  # the most memory of this process so far, and the test in which it came to that
_of_workers: list[tuple[int, str, int]] = []  # the same of each worker, and the most memory of a rank of its pools


def _found(*commands: str) -> bool:
    return any(shutil.which(command) for command in commands)


def _has_modules(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


def _mpiexec() -> bool:
    return _has_modules("mpi4py") and _found("mpiexec", str(Path(sys.prefix, "bin", "mpiexec")))


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "mpi": (_mpiexec, "no mpiexec: pip install 'sgd-workbench[mpi]'"),
    "notebooks": (
        lambda: _has_modules("ipyparallel", "papermill", "plotly"),
        "no Jupyter: pip install 'sgd-workbench[notebooks]'",
    ),
    "browser": (lambda: _found("chromium", "google-chrome", "chromium-browser", "chrome"), "no Chrome or Chromium"),
    "root": (lambda: os.geteuid() == 0 and _found("ip") and _found("tc"), "needs root and iproute2"),
    "slurm": (
        lambda: all(map(_found, ("slurmctld", "slurmd", "munged", "sbatch"))),
        "no Slurm: apt-get install slurm-wlm munge",
    ),
    "gpu": (_gpu, "no CUDA device; on a machine with one: make gpu"),
}


@pytest.hookimpl(trylast=True)  # pytest-rerunfailures connects its workers before they have a network of their own
def pytest_configure(config: pytest.Config) -> None:
    """Let the tests be interrupted, and hide the GPUs from tests that expect a CPU's numbers.

    A shell ignores interrupts of what it starts in the background, and so would all that the tests start.
    """
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        from tests.sharing import take_own_network

        take_own_network()
    if (
        config.pluginmanager.hasplugin("randomly")
        and config.pluginmanager.hasplugin("hypothesispytest")
        and not os.environ.get("CI")
    ):
        config.pluginmanager.register(SameSeed())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In continuous integration a failed test of real processes runs once more; the summary lists it as RERUN.

    On a busy machine a process may be late by chance. Elsewhere the first failure counts, so that rare faults are seen.
    """
    if os.environ.get("CI"):
        for item in items:
            if item.path.parent.name in ("browser", "distributed", "laws", "notebooks"):
                item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: without looking for garbage in it, the collection takes half as long."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Search for doctests only in files that have some: each worker would spend seconds on the others."""
    found = yield
    return [one for one in found if not isinstance(one, DoctestModule) or ">>> " in file_path.read_text()]


class SameSeed:
    """Hypothesis draws from the seed of the order, so that one number brings a run back."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if session.config.getoption("hypothesis_seed", None) is None:
            hypothesis.core.global_force_seed = session.config.getoption("randomly_seed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells how much memory it needed."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peaks"] = _peaks()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any, error: object) -> None:
    _of_workers.append(tuple(getattr(node, "workeroutput", {}).get("peaks", (0, "", 0))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What brings this order back, and the memory of the largest process: a test that needs much shows itself here."""
    peaks = [_peaks(), *_of_workers]
    num_bytes, test, _ = max(peaks)
    of_ranks = max(of_ranks for *_, of_ranks in peaks)
    seed = (
        f"order and examples: SEED={config.getoption('randomly_seed')}, "
        if config.pluginmanager.hasplugin("randomly")
        else ""
    )
    terminalreporter.write_line(
        f"{seed}peak memory: {num_bytes / 2**30:.2f} GB of a process of tests (in {test}), {of_ranks / 2**30:.2f} GB of a rank of its pools"
    )


def _peaks() -> tuple[int, str, int]:
    pool = sys.modules.get("tests.distributed.pool")
    return *_largest, pool.peak_bytes if pool else 0


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


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    global _longer
    _longer |= fixturedef.scope != "function"


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    global _longer
    _longer |= fixturedef.scope != "function"


@pytest.fixture(autouse=True, scope="module")
def files_give_back() -> Iterator[None]:
    """Ends pools of torch, and returns freed memory to the system.

    Runs that failed, and hooks of DDP, leave groups of gloo in their ranks, each with a thread that wakes a hundred
    times a second. The C library keeps freed memory: a gigabyte after one pass through a large network.
    """
    yield
    if "tests.distributed.pool" in sys.modules:
        sys.modules["tests.distributed.pool"].end_torch_ranks()
    if sys.platform.startswith("linux"):
        with suppress(AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, single_threaded: None) -> Iterator[None]:
    """Fails a test that changes this process, or ranks of a pool, for later tests.

    Torch draws from a seed of the test, as Python and NumPy do (pytest-randomly). WORKBENCH_TEST_MEMORY names a file
    for the resident megabytes of this process after each test, and the most it had so far.
    """
    import torch

    from tests.leftovers import Definitions, Picture, peak_bytes

    global _definitions, _largest, _longer
    if _definitions is None:
        _definitions = Definitions()
    before = Picture()
    if _longer:
        _definitions.changes()
        _longer = False
    seed = (
        torch.manual_seed if _gpu() else torch.default_generator.manual_seed
    )  # the first also records stacks for CUDA
    seed(random.getrandbits(63))
    yield
    torch.set_num_threads(1)  # a training of one rank takes all cores, by design
    _largest = max(_largest, (peak_bytes(), request.node.nodeid), key=lambda one: one[0])
    if log := os.environ.get("WORKBENCH_TEST_MEMORY"):
        with Path(log).open("a") as file:
            file.write(
                f"{psutil.Process().memory_info().rss >> 20} {_largest[0] >> 20} {os.getpid()} {request.node.nodeid}\n"
            )
    lines = [*before.differences(), *_definitions.changes()]
    if lines:
        before.restore()
    if "tests.distributed.pool" in sys.modules:
        lines += sys.modules["tests.distributed.pool"].left_behind()
    if lines:
        pytest.fail("this test leaves something behind:\n" + "\n".join(lines), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def single_threaded() -> None:
    """One compute thread here and in started ranks: sums are equal on every machine, and ranks do not compete for cores."""
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def runs_leave_nothing(
    request: pytest.FixtureRequest, nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validates each simulation, and each run on the reference runtime, that a test of the package makes: see `tests/invariants.py`."""
    if request.path.parent.name in ("laws", "unit"):
        from tests.invariants import validated

        validated(monkeypatch)


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


@pytest.fixture(scope="module")
def forked_starts() -> Iterator[None]:
    """Ranks, engines and cells that this process starts are forked from one that has imported torch."""
    from tests.distributed.pool import fork_server
    from tests.forked import fork_starts

    with pytest.MonkeyPatch.context() as patch:
        fork_starts(patch.setattr, fork_server().python, "ranks", "engines", "cells")
        yield


@pytest.fixture
def forked_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel `workbench`, also of processes that the test starts, is forked from one that has imported torch."""
    from tests.forked import fork_kernels

    shutil.copytree(Path(__file__).parents[1] / "kernels", tmp_path / "forked" / "kernels")
    fork_kernels(tmp_path / "forked")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "forked"))


@pytest.fixture
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if a process that it started, or a descendant, is alive ten seconds after its end."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("WORKBENCH_TEST_MARK", mark)
    yield
    deadline = time.monotonic() + 10
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, "processes left behind:\n" + "\n".join(
        f"{process.pid} {command[:120]}" for process, command in left.items()
    )


def _marked(mark: str) -> dict[psutil.Process, str]:
    """Living processes that inherited the mark, with their command lines."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, or another user's
            if process.environ().get("WORKBENCH_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = " ".join(process.cmdline())
    return found
