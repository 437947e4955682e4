"""The ranks' side of `pool.py`: join the world, then do what the test process sends until it hangs up."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import cloudpickle

from tests.forked import become_forked

if TYPE_CHECKING:
    from tests.leftovers import Definitions, Picture

START_S = 100.0  # importing torch on all ranks at once, on a busy machine
GRACE_S = 5.0  # from being asked to leave to being killed
# Of commands, ranks, engines, kernels, and of commands that execute notebooks.
COMMON = (
    "numpy.ma",
    "torch.utils.flop_counter",
    "workbench.analysis",
    "workbench.cli.main",
    "workbench.problems.digits",
    "workbench.runtimes.rank.join",
    "workbench.runtimes.rank.main",
    "workbench.runtimes.simulator.simulate",
)
OF_NOTEBOOKS = ("ipyparallel.engine.app", "ipykernel.kernelapp", "nbclient", "workbench.clusters.engines.options")
WHERE_ARE_YOU = signal.SIGUSR2  # a rank prints what each of its threads is at


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to on one rank: a value, or the error with its traceback as text."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Health:
    """How a rank is after the calls of a test.

    Attributes:
        left: differences from the state at its start, a line each.
        num_groups: groups of torch.distributed and communicators of MPI that were made since and are still there. A run
            that failed leaves some, because only all ranks together can free them.
        peak_bytes: the most memory that it had so far.
    """

    left: list[str]
    num_groups: int
    peak_bytes: int


_definitions: Definitions | None = None  # those before the fork
_at_start: tuple[Picture, Definitions, int] | None = None


def health() -> Health:
    """Of this rank, which is compared with what it was when it began to serve; a call like another."""
    from tests.leftovers import peak_bytes

    assert _at_start is not None, "it does not serve"
    picture, definitions, num_groups = _at_start
    return Health([*picture.differences(), *definitions.changes()], _num_groups() - num_groups, peak_bytes())


def _picture() -> tuple[Picture, Definitions, int]:
    from tests.leftovers import Definitions, Picture

    definitions = _definitions or Definitions()
    definitions.changes()  # how a forked process starts others
    return Picture(), definitions, _num_groups()


def _num_groups() -> int:
    from tests.leftovers import num_groups

    return num_groups() + _num_communicators()


def _num_communicators() -> int:
    """A number that grows with them: MPI gives a new one the lowest handle that is free. 0 where MPI is not used."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return 0
    new = mpi.COMM_SELF.Dup()
    handle: int = new.py2f()
    new.Free()
    return handle


def serve_forks(connection_number: int, socket_number: int) -> None:
    """Fork a rank for each world that the test process sends, and a process for each stand-in that calls, until it hangs up."""
    _prepare()  # before the fork, for all
    gc.freeze()
    _leave_with_parent()
    connection, listener = Connection(connection_number), socket.socket(fileno=socket_number)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    callers: dict[int, socket.socket] = {}  # process -> its stand-in
    while True:
        ready = wait([connection, listener, woken])
        if woken in ready:
            woken.recv(4096)
            _reap(callers)
        if listener in ready:
            caller, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                _begin(connection, listener, woken, wake, *callers.values())
                become_forked(caller)
            _tell(caller, pid)
            callers[pid] = caller
        if connection in ready:
            try:
                world = connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            if os.fork() == 0:
                _begin(connection, listener, woken, wake, *callers.values())
                serve_torch(world)


def _begin(*of_fork_server: Connection | socket.socket) -> None:
    """In a process that was just forked."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.modules["numpy"].random.seed()  # not the numbers of its siblings
    for end in of_fork_server:
        end.close()


def _reap(callers: dict[int, socket.socket]) -> None:
    """Tell stand-ins how their processes ended."""
    with suppress(ChildProcessError):  # there is none left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            caller = callers.pop(ended[0], None)
            if caller is not None:
                with caller:
                    _tell(caller, os.waitstatus_to_exitcode(ended[1]))


def _tell(caller: socket.socket, number: int) -> None:
    with suppress(OSError):  # the stand-in was killed
        caller.sendall(f"{number}\n".encode())


def serve_torch(world: dict[str, str]) -> None:
    """A rank of torch.distributed: join, then serve."""
    from workbench.runtimes.transport.torch_distributed import join_process_group

    os.environ.update(world)
    folder = Path(world["RANKS_FOLDER"])
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        rank = int(world["RANK"])
        join_process_group(rank, int(world["WORLD_SIZE"]), str(folder / "rendezvous"), START_S)
        _serve(rank)
    except BaseException:  # noqa: BLE001 - the log is all that is left to tell
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # groups of failed runs hold threads that would wait for their peers


def serve_mpi() -> None:
    """A rank of MPI."""
    from mpi4py import MPI

    _serve(MPI.COMM_WORLD.Get_rank())
    os._exit(0)  # what failed runs left in MPI may wait for peers forever in MPI_Finalize


def _prepare() -> None:
    """What each forked process would do by itself: import what it needs, and digest the package."""
    import torch

    import tests.laws.train  # noqa: F401
    from tests.leftovers import Definitions
    from workbench.runtimes.rank.fingerprint import package_digest

    torch.set_num_threads(1)
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # nbclient's library would build a grammar for a second
    for name in COMMON:
        import_module(name)
    for name in OF_NOTEBOOKS:
        with suppress(ImportError):  # the extra `notebooks` is not installed
            import_module(name)
    package_digest()
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.atexit = False  # torch's, which take its operators apart for 20 ms
    global _definitions
    _definitions = Definitions()


def _serve(rank: int) -> None:
    """Do what the test process sends until it hangs up."""
    faulthandler.register(WHERE_ARE_YOU, file=os.dup(2))  # a test may replace stderr, and close it
    _leave_with_parent()
    address = str(Path(os.environ["RANKS_FOLDER"]) / "socket")
    connection = Client(address, family="AF_UNIX", authkey=bytes.fromhex(os.environ["RANKS_KEY"]))
    global _at_start
    _at_start = _picture()
    connection.send((rank, os.getpid()))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(_perform(message))


def _perform(message: bytes) -> bytes:
    begin = time.monotonic()
    try:
        function, args = cloudpickle.loads(message)
        outcome = Outcome(value=function(*args), seconds=time.monotonic() - begin)
    except BaseException as error:  # noqa: BLE001 - an interrupt is an outcome too
        outcome = Outcome(error=error, trace=traceback.format_exc(), seconds=time.monotonic() - begin)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # a training of one rank takes all cores, by design
    try:
        return cloudpickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - whatever a result's own pickling raises
        return cloudpickle.dumps(Outcome(error=TypeError(f"cannot be sent back: {error}"), trace=outcome.trace))


def _leave_with_parent() -> None:
    """End this process when the one that started it is gone, even if the main thread is busy."""
    parent = os.getppid()
    running = threading.Event()

    def watch() -> None:
        time.sleep(0.001)
        running.set()
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    # glibc marks a thread while it looks up a C function for its first call. A fork at that moment copies the mark, and
    # `dlclose` in the child waits until it is gone: it hangs. So this thread makes its first calls before any fork.
    threading.Thread(target=watch, daemon=True).start()
    running.wait()
