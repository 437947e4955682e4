"""Real ranks for tests: started once a session, given functions to run, gone at its end.

    pool = shared_pool("mpi", 3)
    pool.run(some_function, argument)       # -> its result on each rank

Importing torch costs seconds, so one pool of each kind and size serves all tests of a session, and ranks are forked
from one process that has imported it (`tests/forked.py`). If a pool's ranks died or hang, the next call starts new
ones.
"""

from __future__ import annotations

import atexit
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Listener, Pipe, wait
from pathlib import Path
from typing import Any, Literal, final

import cloudpickle
import psutil

from tests.distributed.ranks import GRACE_S, START_S, WHERE_ARE_YOU, Health, Outcome, health
from tests.forked import write_stand_in

ROOT = Path(__file__).parents[2]

RuntimeName = Literal["torch", "mpi"]
Call = tuple[Callable[..., Any], tuple[Any, ...]]


LOOK_S = 20.0  # for ranks to say how they are; what still runs in them is a fault of its own

# More than these, and ranks are ended. Torch's cost some forks, and groups have threads that wake a hundred times a second;
# MPI's cost seconds.
MAX_GROUPS = {"torch": 12, "mpi": 60}
MAX_BYTES = 1200 << 20

peak_bytes = 0  # the most memory that a rank of any pool had


class PoolDied(RuntimeError):
    """Ranks of a pool ended, or did not answer in time; says what they printed."""


@final
class RankPool:
    """`num_ranks` processes that are one world of `runtime`.

    Args:
        runtime: "torch" (one gloo group, met through a file) or "mpi" (under an mpiexec).
        outlives: MPI's ranks are not ended when one of them is killed.
        compiler: its ranks have imported torch's compiler, as a rank does that makes a DDP model or one of torch's
            optimizers.
    """

    def __init__(self, runtime: RuntimeName, num_ranks: int, *, outlives: bool = False, compiler: bool = False) -> None:
        self.runtime, self.num_ranks, self.outlives, self.compiler = runtime, num_ranks, outlives, compiler
        self.num_starts = 0
        self.used = False  # since it was last looked at
        self.pids: list[int] = []  # of the ranks, in order of rank
        self._mpiexec: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection] = []
        self._folder: Path | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 110.0) -> list[Any]:
        """The results of `function(*args)` on every rank, in order of rank.

        Raises:
            what it raised: a rank's own error rather than one that only reports another rank's; with that rank's
                traceback as a note.
            PoolDied: a rank ended or did not answer within `timeout_s`.
        """
        outcomes = self.outcomes([(function, args)] * self.num_ranks, timeout_s=timeout_s)
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        if failed:
            rank, first = next((item for item in failed if type(item[1].error).__name__ != "PeerFailed"), failed[0])
            assert first.error is not None
            first.error.add_note(f"on rank {rank} of the {self.runtime} pool:\n{first.trace}")
            raise first.error
        return [outcome.value for outcome in outcomes]

    def outcomes(self, calls: Sequence[Call], timeout_s: float = 110.0, *, may_die: bool = False) -> list[Outcome]:
        """What became of each rank's own call; a rank's error is an outcome like another, and so is its end if it `may_die` (EOFError)."""
        if not self._alive():
            self.close()
            self._start()
        self.used = True
        waiting = dict(zip(self._connections, range(self.num_ranks), strict=True))
        try:
            for connection, call in zip(self._connections, calls, strict=True):
                connection.send_bytes(cloudpickle.dumps(call))
            found: dict[int, Outcome] = {}
            deadline = time.monotonic() + timeout_s
            while waiting:
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._ask_where(waiting.values())
                    raise PoolDied(
                        f"ranks {sorted(waiting.values())} of the {self.runtime} pool did not answer within {timeout_s:.0f} s"
                    )
                for connection in ready:
                    assert isinstance(connection, Connection)
                    rank = waiting.pop(connection)
                    try:
                        found[rank] = cloudpickle.loads(connection.recv_bytes())
                    except (EOFError, OSError) as end:
                        if not may_die:
                            raise
                        found[rank] = Outcome(error=end)
        except (EOFError, OSError, PoolDied) as error:
            printed = self.close()
            raise PoolDied(
                f"the {self.runtime} pool of {self.num_ranks} ranks ended: {error!r}. Its ranks printed:\n{printed}"
            ) from None
        return [found[rank] for rank in range(self.num_ranks)]

    def left_behind(self) -> list[str]:
        """What the calls since the last look left in the ranks, a line each; ranks that are not as they were are ended."""
        if not self.used or not self._alive():
            self.used = False
            return []
        try:
            found: list[Health] = self.run(health, timeout_s=LOOK_S)
        except PoolDied:
            return []  # they do not answer, and have been ended
        finally:
            self.used = False
        global peak_bytes
        peak_bytes = max(peak_bytes, *(one.peak_bytes for one in found))
        name = f"of the {self.runtime} pool of {self.num_ranks}"
        lines = [f"rank {rank} {name}: {line}" for rank, one in enumerate(found) for line in one.left]
        worn = any(one.num_groups > MAX_GROUPS[self.runtime] or one.peak_bytes > MAX_BYTES for one in found)
        if lines or worn:
            self.close()
        return lines

    # -- processes ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.num_starts += 1
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        key = secrets.token_bytes(16)
        with Listener(str(self._folder / "socket"), family="AF_UNIX", authkey=key, backlog=self.num_ranks) as listener:
            world = {"RANKS_FOLDER": str(self._folder), "RANKS_KEY": key.hex()}
            if self.runtime == "torch":
                for rank in range(self.num_ranks):
                    fork_server(self.compiler).fork({**world, "RANK": str(rank), "WORLD_SIZE": str(self.num_ranks)})
            else:
                log = self._folder / "log"
                self._mpiexec = start_mpi(self.num_ranks, world, log, outlives=self.outlives, compiler=self.compiler)
            try:
                self._meet(listener)
            except PoolDied:
                listener.close()  # its file lies in the folder that goes
                self.close()
                raise

    def _meet(self, listener: Listener) -> None:
        """Wait for every rank to connect; on a thread, because `accept` has no time-out."""
        met: queue.SimpleQueue[Connection] = queue.SimpleQueue()

        def accept() -> None:
            for _ in range(self.num_ranks):
                try:
                    met.put(listener.accept())
                except OSError:  # closed: we gave up
                    return

        threading.Thread(target=accept, daemon=True).start()
        by_rank: dict[int, tuple[Connection, int]] = {}
        deadline = time.monotonic() + START_S
        while len(by_rank) < self.num_ranks:
            try:
                connection = met.get(timeout=0.1)
            except queue.Empty:
                if time.monotonic() > deadline or (self._mpiexec is not None and self._mpiexec.poll() is not None):
                    raise PoolDied(
                        f"the ranks of the {self.runtime} pool did not start. They printed:\n{self._printed()}"
                    ) from None
                continue
            rank, pid = connection.recv()
            by_rank[rank] = (connection, pid)
        self._connections = [by_rank[rank][0] for rank in range(self.num_ranks)]
        self.pids = [by_rank[rank][1] for rank in range(self.num_ranks)]

    def _alive(self) -> bool:
        return bool(self.pids) and not any(map(_is_gone, self.pids))

    def _printed(self) -> str:
        path = self._folder / "log" if self._folder else None
        return path.read_text(errors="replace")[-16000:] if path and path.exists() else ""

    def _ask_where(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], WHERE_ARE_YOU)
            time.sleep(0.2)  # they print into one file

    def hang_up(self) -> None:
        """Let the ranks go that wait for work; does not wait for them."""
        for connection in self._connections:
            connection.close()

    def close(self) -> str:
        """End all ranks, those that hang as well, and return what they had printed by then."""
        self.hang_up()
        deadline = time.monotonic() + GRACE_S
        while not all(map(_has_ended, self.pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in self.pids:
            if not _is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        if self._mpiexec is not None:
            try:
                self._mpiexec.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._mpiexec.kill()
                self._mpiexec.wait()
        printed = self._printed()  # mpiexec passes the last lines on after the ranks have ended
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._mpiexec, self._connections, self.pids, self._folder = None, [], [], None
        return printed


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _has_ended(pid: int) -> bool:
    """Or is stopped, and will not end by itself."""
    try:
        return _is_gone(pid) or psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return True


def start_mpi(
    num_ranks: int, more: dict[str, str], log: Path, *, outlives: bool = False, compiler: bool = False
) -> subprocess.Popen[bytes]:
    """An mpiexec with that many ranks that serve."""
    from workbench.clusters.local.mpi_install import find_mpi, mpiexec_command

    argv = [fork_server(compiler).python, "-c", "from tests.distributed.ranks import serve_mpi; serve_mpi()"]
    command, env = mpiexec_command(find_mpi(), num_ranks, argv, outlives=outlives)
    # Open MPI's files of one user lie in one folder, which an mpiexec that ends removes while another starts.
    env = our_environment({**env, **more, "PRTE_MCA_prte_tmpdir_base": str(log.parent)})
    with log.open("wb") as file:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def our_environment(env: dict[str, str]) -> dict[str, str]:
    """One thread a rank, also to compile, and the tests' modules can be imported. No mark of the first test is kept."""
    path = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    one = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": path}
    return {**{name: value for name, value in env.items() if name != "WORKBENCH_TEST_MARK"}, **one}


class ForkServer:
    """A process that has imported everything. It forks ranks, and the processes that stand-ins request.

    Args:
        compiler: it has imported torch's compiler, too, which takes another second of a core.
        begin: starts it: `subprocess.Popen`, or another with its options.
        code: run first, such as imports.

    Attributes:
        python: the program of stand-ins: see `forked`.
    """

    def __init__(
        self, compiler: bool = False, begin: Callable[..., subprocess.Popen[Any]] = subprocess.Popen, code: str = ""
    ) -> None:
        ours, theirs = Pipe()
        self._folder = tempfile.mkdtemp(prefix="fork_server-")
        self.python, address = str(Path(self._folder, "python")), str(Path(self._folder, "socket"))
        write_stand_in(Path(self.python), address)
        code += "\nimport sys; from tests.distributed.ranks import serve_forks; serve_forks(*map(int, sys.argv[1:]))"
        code = f"import torch._dynamo\n{code}" if compiler else code
        env = our_environment(dict(os.environ))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            numbers = theirs.fileno(), listener.fileno()
            command = [sys.executable, "-c", code, *map(str, numbers)]
            self._process = begin(command, env=env, stdin=subprocess.DEVNULL, pass_fds=numbers)
        self._connection = ours
        theirs.close()

    def fork(self, world: dict[str, str]) -> None:
        self._connection.send(world)

    def close(self) -> None:
        self._connection.close()
        self._process.wait()
        shutil.rmtree(self._folder)


_fork_servers: dict[bool, ForkServer] = {}


def fork_server(compiler: bool = False) -> ForkServer:
    """The session's; one with torch's compiler is another."""
    if compiler not in _fork_servers:
        _fork_servers[compiler] = ForkServer(compiler)
    return _fork_servers[compiler]


_shared: dict[tuple[RuntimeName, int, bool], RankPool] = {}


def shared_pool(runtime: RuntimeName, num_ranks: int, *, compiler: bool = False) -> RankPool:
    """The session's pool of that kind and size."""
    kind = runtime, num_ranks, compiler
    if kind not in _shared:
        _shared[kind] = RankPool(runtime, num_ranks, compiler=compiler)
    return _shared[kind]


def left_behind() -> list[str]:
    """What a test left in the ranks of the session's pools that it used."""
    return [line for pool in list(_shared.values()) for line in pool.left_behind()]


def end_torch_ranks() -> None:
    """End the session's pools of torch; the next call starts another.

    What tests left in them, gloo's threads above all, ends too.
    """
    for name in [name for name in _shared if name[0] == "torch"]:
        _shared.pop(name).close()


@atexit.register
def close_all() -> None:
    """End every pool of this session."""
    for pool in _shared.values():
        pool.hang_up()
    for pool in _shared.values():
        pool.close()
    _shared.clear()
    for one in _fork_servers.values():
        one.close()
    _fork_servers.clear()
