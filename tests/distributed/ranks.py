"""The ranks' side of `pool.py`: join the world, then do what the test process sends until it hangs up."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import cloudpickle

if TYPE_CHECKING:
    from tests.leftovers import Definitions, Picture

START_S = 100.0  # importing torch on all ranks at once, on a busy machine
GRACE_S = 5.0  # from being asked to leave to being killed
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
        left: what is otherwise than at its start, a line each.
        num_groups: groups of torch.distributed and communicators of MPI that were made since and are still there. A run that failed
            leaves some, for they can only be freed by all ranks together.
        peak_bytes: the most memory that it had so far.
    """

    left: list[str]
    num_groups: int
    peak_bytes: int


_at_start: tuple[Picture, Definitions, int] | None = None


def health() -> Health:
    """Of this rank, which is compared with what it was when it began to serve; a call like another."""
    from tests.leftovers import peak_bytes

    assert _at_start is not None, "it does not serve"
    picture, definitions, num_groups = _at_start
    return Health([*picture.differences(), *definitions.changes()], _num_groups() - num_groups, peak_bytes())


def _picture() -> tuple[Picture, Definitions, int]:
    from tests.leftovers import Definitions, Picture

    return Picture(), Definitions(), _num_groups()


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


def nurse(connection_number: int, socket_number: int) -> None:
    """Fork a rank for each world that the test process sends, and for each stand-in that calls, until the test process hangs up."""
    _import_all()  # before the fork, for all
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ranks: they must not stay as zombies
    _leave_with_parent()
    connection, listener = Connection(connection_number), socket.socket(fileno=socket_number)
    while True:
        if listener in wait([connection, listener]):
            caller, _ = listener.accept()
            with caller:
                if os.fork() == 0:
                    _become_a_rank(connection, listener)
                    serve_mpi(caller)
            continue
        try:
            world = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if os.fork() == 0:
            _become_a_rank(connection, listener)
            serve_torch(world)


def _become_a_rank(connection: Connection, listener: socket.socket) -> None:
    """In a process that was just forked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.close()
    listener.close()


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


STAND_IN = """
import json, os, signal, socket, sys
caller = socket.socket(socket.AF_UNIX)
caller.connect(sys.argv[1])
socket.send_fds(caller, [b"!"], [1, 2])
caller.sendall(json.dumps(dict(os.environ)).encode() + b"\\n")
status = caller.recv(1)
os.kill(os.getpid(), signal.SIGKILL) if not status else os._exit(status[0])
"""
"""What an mpiexec starts in place of a rank, with the nursery's socket: a new interpreter would import torch for two seconds of a core.

The rank is forked off the nursery. When one of the two is gone, the other ends: as a killed process, or with the rank's exit status.
"""


def serve_mpi(caller: socket.socket) -> None:
    """A rank of MPI, which stands in the place of the caller: with its environment and its output."""
    status = 1
    try:
        _, (out, err), _, _ = socket.recv_fds(caller, 1, 2)
        os.environ.clear()
        with caller.makefile("rb") as environment:
            os.environ.update(json.loads(environment.readline()))
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        _leave_with(caller)
        from mpi4py import MPI

        _serve(MPI.COMM_WORLD.Get_rank())
        status = 0
    except BaseException:  # noqa: BLE001 - the log is all that is left to tell
        traceback.print_exc()
    caller.send(bytes([status]))
    os._exit(status)  # what failed runs left in MPI may wait for peers for ever in MPI_Finalize


def _import_all() -> None:
    """What a training imports."""
    import torch

    import workbench.runtimes.rank.main  # noqa: F401

    torch.set_num_threads(1)


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
    """End this process when the one that started it is gone, whatever the main thread does."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _leave_with(caller: socket.socket) -> None:
    """End this process when the one in whose place it stands is gone."""

    def watch() -> None:
        caller.recv(1)  # it says nothing more
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
