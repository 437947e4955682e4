"""The ranks of a notebook: the first cell that runs on ranks starts them, and commands control them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

from IPython.core.inputtransformer2 import cell_magic

from workbench.clusters.waiting import Waiting
from workbench.config import value_of
from workbench.errors import ConfigError, LaunchError, WorkbenchError
from workbench.kernel.cells import COMMANDS, INSTALLERS, Cell, parse_cell, parse_ranks
from workbench.kernel.debugger import NotebookDebugger
from workbench.kernel.execution import Execution, RanksFailed, stuck_message
from workbench.kernel.link import Link
from workbench.kernel.magics import register_commands, unregister_commands
from workbench.kernel.outputs import label
from workbench.kernel.questions import Questions
from workbench.kernel.screen import MergedScreen, TabbedScreen
from workbench.kernel.variables import VariablesTable, rank_variables
from workbench.trace.store import runs_root

DEFAULT_RANKS = 4
SHOWN = frozenset({"stream", "display_data", "execute_result", "update_display_data", "error"})
PREPARE_S = 60.0
FETCH_S = 600.0  # limit for the copy of one variable
PREPARE = """
import workbench as wb
__import__("workbench.kernel.on_rank", fromlist=["prepare"]).prepare({rank})
rank, world_size = {rank}, {world_size}
"""


@final
class Ranks:
    """The ranks on which a notebook's cells run.

    Args:
        shell: the notebook's IPython shell.
    """

    _of: dict[int, Ranks] = {}  # id of a shell -> its ranks  # noqa: RUF012 - shared by the whole process on purpose

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.cluster: Any = None
        self.num_ranks = _from_environment()
        self.launcher = (
            os.environ.get("WORKBENCH_LAUNCHER")
            or os.environ.get("WORKBENCH_KERNEL_LAUNCHER")
            or value_of("launcher")
            or "local"
        )
        self.debugger: NotebookDebugger | None = None  # in the kernels for ranks
        self._link: Link | None = None
        self._client: Any = None  # whose engines are prepared
        self._num_cells = 0
        self._parent: dict[str, Any] = {}  # the front end's request of the last cell
        self._last: Execution | None = None
        self._owns = True

    @classmethod
    def attach_to(cls, shell: Any) -> Ranks:
        """Return the ranks of a shell. From now on its cells run on them."""
        if id(shell) not in cls._of:
            ranks = cls._of[id(shell)] = cls(shell)
            shell.input_transformers_cleanup.append(ranks.transform)
            register_commands(shell, ranks.command)
            shell.user_ns["__ranks__"] = ranks
            shell.user_ns_hidden["__ranks__"] = ranks
        return cls._of[id(shell)]

    @classmethod
    def detach_from(cls, shell: Any) -> None:
        """End the ranks of a shell. Its cells run in the shell's process again."""
        ranks = cls._of.pop(id(shell), None)
        if ranks is not None:
            shell.input_transformers_cleanup.remove(ranks.transform)
            unregister_commands(shell)
            ranks.stop()

    # -- cells -----------------------------------------------------------------------------------------------------

    def transform(self, lines: list[str]) -> list[str]:
        """Return the code for IPython: a call of `prepare` and a `%%local` cell, or a call of `run` with another cell."""
        text = "".join(lines)
        if not text.strip() or text.startswith("__ranks__."):
            return lines
        try:
            cell = parse_cell(text)
        except ConfigError:
            cell = Cell(body=text)  # `run` raises the error
        if cell.local:
            before = [f"__ranks__.prepare({cell.commands!r}, {cell.names!r})\n"] if cell.commands or cell.names else []
            return [*before, *cell_magic(cell.body.splitlines(keepends=True))]  # type: ignore[no-untyped-call]
        return [f"__ranks__.run({text!r})\n"]

    def run(self, text: str) -> None:
        """Run a cell on its ranks.

        Raises:
            WorkbenchError: the cell cannot run, or it failed on a rank.
        """
        with _without_frames():
            cell = parse_cell(text)
            assert not cell.local, "a local cell runs in the notebook's own process"
            for name, argument in cell.commands:
                self.command(name, argument)
            if not cell.body.strip():
                return
            self.start()
            self._check_free()
            self._parent = self.shell.get_parent()
            ranks = parse_ranks(cell.ranks, self.num_ranks)
            self._last = self._execution(ranks, cell.tabs)
            self._last.run(self._as_typed(text))
            for payload in self._last.payload:
                self.shell.payload_manager.write_payload(payload)

    def _execution(self, ranks: list[int], tabs: bool) -> Execution:
        """Return the execution of a new cell. The ranks are free."""
        if self._client is not self.cluster.client:  # heal() and scale() start other engines
            self._prepare()
        if self._link is None:
            self._link = Link(self.cluster.client, self._heard)
        self._num_cells += 1
        log = runs_root() / "cell-output" / f"{self.cluster.id}-{self._num_cells}.log"
        if self.debugger is not None:
            self.debugger.attach(self._link, self.num_ranks)
        return Execution(
            self.cluster.client,
            ranks,
            self.num_ranks,
            screen=TabbedScreen(ranks, log) if tabs else MergedScreen(self.num_ranks, log),
            questions=Questions(self.num_ranks, self._ask, self._link.answer),
            debugger=self.debugger,
            is_stopped=lambda: self.cluster.state == "stopped",
        )

    def _as_typed(self, text: str) -> str:
        """Return the whole cell as the front end has it, if this is its text: the debugger knows a cell by its text."""
        typed = str(self.shell.get_parent().get("content", {}).get("code", "")) if self.shell else ""
        return typed if typed.split() == text.split() else text

    def _ask(self, prompt: str, secret: bool) -> str:
        """Ask the user. The front end of the cell that runs shows the prompt."""
        kernel = self.shell.kernel
        return str(kernel.getpass(prompt) if secret else kernel.raw_input(prompt))

    def _heard(self, rank: int, message: dict[str, Any]) -> None:
        """Take what a rank says outside of a cell. Called on the thread of ipyparallel's client."""
        kind, content, kernel = message["header"]["msg_type"], message["content"], self.shell.kernel
        if kind == "debug_event" and self.debugger is not None:
            self.debugger.heard(rank, content)
        elif kind == "question" and self._link is not None:
            reason = "A widget's callback cannot ask: the notebook may run another cell."
            self._link.answer(rank, content["number"], {"status": "error", "message": reason})
        elif kind in SHOWN:
            if kind == "stream":
                content = {**content, "text": label([rank], self.num_ranks) + content["text"]}
            kernel.session.send(kernel.iopub_socket, kind, content, parent=self._parent)

    def prepare(self, commands: Iterable[tuple[str, str]], names: tuple[str, ...]) -> None:
        """Prepare a local cell: run its commands, and copy variables from rank 0.

        Args:
            commands: (name, argument) of each command.
            names: names of the variables.

        Raises:
            WorkbenchError: a command or a copy failed.
        """
        with _without_frames():
            for name, argument in commands:
                self.command(name, argument)
            if names:
                self._fetch(names)

    def _fetch(self, names: tuple[str, ...]) -> None:
        self.start()
        self._check_free()
        for name in names:
            try:
                self.shell.user_ns[name] = _pulled(self.cluster.client[0], name)
            except Exception as error:  # noqa: BLE001 - an object's own pickling may raise anything
                reason = f"{getattr(error, 'ename', type(error).__name__)}: {getattr(error, 'evalue', error)}"
                raise ConfigError(f"%%local {name}: it cannot be copied from rank 0 ({reason})") from None

    def call_on_rank0(self, function: Any, *arguments: Any, timeout_s: float = 3.0) -> Any:
        """Call a function on rank 0 and return its result.

        None if there are no ranks yet, if rank 0 is busy or training, or if it takes longer than `timeout_s` seconds.
        """
        if not self.free():
            return None
        with suppress(Exception):  # without a result, for any reason, the caller uses its own
            return self.cluster.client[0].apply_async(function, *arguments).get(timeout_s)
        return None

    def free(self) -> bool:
        """Return True if there are ranks, and they run neither a cell nor a training."""
        return self.cluster is not None and self.cluster.state == "ready" and not self.busy()

    def busy(self) -> list[int]:
        """Ranks that still run an earlier cell."""
        return self._last.busy if self._last is not None else []

    def _check_free(self) -> None:
        state = self.cluster.state
        if state == "training":
            raise ConfigError("the ranks are training: wait for the run or stop it, or inspect it from a %%local cell")
        if state in ("lost", "stopped"):
            raise LaunchError(
                f"the ranks have ended ({state}): %restart_ranks starts new ones; their variables are lost"
            )
        if self.busy():
            raise LaunchError(stuck_message(self.busy()))

    # -- the ranks -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the ranks, if there are none."""
        if self.cluster is not None:
            return
        from workbench.clusters import Cluster

        options: dict[str, Any] = {} if self.launcher != "torch" else {"runtime": "torch"}
        self._use(Cluster(self.num_ranks, launcher=self.launcher, **options), owns=True)

    def _use(self, cluster: Any, owns: bool) -> None:
        self.cluster, self._owns = cluster, owns
        self.shell.user_ns["cluster"] = cluster
        self._prepare()

    def _prepare(self) -> None:
        """Give the ranks their names. The ranks of a training receive them when it has ended."""
        cluster = self.cluster
        self.num_ranks, self._client, self._last, self._link = cluster.num_ranks, cluster.client, None, None
        pending = [
            cluster.client[rank].execute(PREPARE.format(rank=rank, world_size=self.num_ranks), silent=True, block=False)
            for rank in range(self.num_ranks)
        ]
        if cluster.state == "training":
            return  # the ranks run `PREPARE` after the training
        try:
            with Waiting(f"the ranks of {cluster.id} to be free") as waiting:
                waiting.until(
                    lambda seconds: all(result.wait(seconds) or result.done() for result in pending), PREPARE_S
                )
            for result in pending:
                result.result(0)
        except TimeoutError:
            raise LaunchError(
                f"the ranks of {cluster.id} do not answer: they run code of another notebook. Wait for its end, "
                "or interrupt it there; %restart_ranks starts new ranks"
            ) from None

    def stop(self) -> None:
        """End the ranks that this notebook started. Ranks that it attached to are detached and continue."""
        cluster, self.cluster = self.cluster, None
        self._link = self._client = None
        if self.debugger is not None:
            self.debugger.detach()
        self.shell.user_ns.pop("cluster", None)
        if cluster is None:
            return
        if self._owns:
            cluster.stop()
        else:
            cluster.detach()

    def _leave_ranks(self) -> None:
        """Stop or detach the ranks, and print which."""
        if self.cluster is None:
            return
        if self._owns:
            print(f"the {self.num_ranks} ranks end, and their variables are lost", file=sys.stderr)
        else:
            print(
                f"the {self.num_ranks} ranks are detached: %attach {self.cluster.id} continues with them",
                file=sys.stderr,
            )
        self.stop()

    # -- commands --------------------------------------------------------------------------------------------------

    def command(self, name: str, argument: str) -> None:
        """Run a kernel command that is written above a cell. An installer runs once, in the notebook's own process.

        Raises:
            ConfigError: the argument is not valid.
        """
        if name in INSTALLERS:
            self.shell.run_line_magic(name, argument)
            return
        assert name in COMMANDS
        getattr(self, f"_command_{name}")(argument)

    def _command_ranks(self, argument: str) -> None:
        if argument:
            number = _number(argument)
            if number != self.num_ranks:
                self._leave_ranks()
            self.num_ranks = number
        self.start()

    def _command_launcher(self, argument: str) -> None:
        if not argument:
            raise ConfigError(
                "%launcher needs the argument of Cluster(launcher=...): local, emulated:1gbit, slurm:partition=debug"
            )
        if argument != self.launcher:
            self._leave_ranks()
        self.launcher = argument

    def _command_attach(self, argument: str) -> None:
        from workbench import clusters

        if not argument:
            raise ConfigError("%attach needs the name of a cluster: `workbench cluster list` shows all clusters")
        cluster = clusters.attach(argument)  # raises for an unknown name, before the present ranks end
        self.stop()
        self._use(cluster, owns=False)

    def _command_detach(self, _: str) -> None:
        if self.cluster is None:
            raise ConfigError("there are no ranks to detach: the next cell starts some")
        print(f"%attach {self.cluster.id} continues with these ranks")
        self._owns = False
        self.stop()

    def _command_status(self, _: str) -> None:
        from IPython.display import display

        if self.cluster is None:
            print(f"no ranks yet: the next cell starts {self.num_ranks} ({self.launcher})")
            return
        display(self.cluster.status())  # type: ignore[no-untyped-call]

    def _command_debug_rank(self, argument: str) -> None:
        if self.debugger is None:
            raise ConfigError("%debug_rank works in the kernels Workbench MPI and Workbench Slurm only")
        if not argument:
            raise ConfigError("%debug_rank needs numbers of ranks: %debug_rank 1, %debug_rank 0,2 or %debug_rank all")
        self.debugger.choose(parse_ranks(argument, self.num_ranks, "%debug_rank"), at_once=self.free())

    def _command_variables(self, argument: str) -> None:
        from IPython.display import display

        self.start()
        self._check_free()
        names = tuple(filter(None, re.split(r"[,\s]+", argument)))
        pending = [self.cluster.client[rank].apply_async(rank_variables, names) for rank in range(self.num_ranks)]
        with Waiting("the variables of the ranks") as waiting:
            if not waiting.until(lambda seconds: all(each.wait(seconds) or each.done() for each in pending), FETCH_S):
                raise LaunchError(
                    f"the ranks do not give their variables in {FETCH_S:g} s: name a few, %variables x, y"
                )
        display(VariablesTable([each.result(0) for each in pending]))  # type: ignore[no-untyped-call]

    def _command_restart_ranks(self, _: str) -> None:
        self._owns = True
        self.stop()
        self.start()

    def _command_stop_ranks(self, _: str) -> None:
        self._owns = True
        self.stop()


@contextmanager
def _without_frames() -> Iterator[None]:
    """Let IPython show an error without this package's frames, by `_render_traceback_`."""
    try:
        yield
    except (WorkbenchError, KeyboardInterrupt) as error:
        if not isinstance(error, RanksFailed):
            message = f"{type(error).__name__}: {error}" if isinstance(error, WorkbenchError) else "KeyboardInterrupt"
            shown: Any = error  # `error` is deleted at the end of the clause
            shown._render_traceback_ = lambda: [message, *getattr(shown, "__notes__", ())]
        raise


def _pulled(engine: Any, name: str) -> Any:
    """Return the value of a variable on an engine.

    It is read by `result`, because ipyparallel's `wait` and `get` may see a result a moment later.
    """
    pending = engine.pull(name, block=False)
    with Waiting(f"rank 0 to give {name}") as waiting:
        waiting.until(lambda seconds: pending.wait(seconds) or pending.done(), FETCH_S)
    return pending.result(0)


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"%ranks {text}: give a whole number, 1 or more")
    return int(text)


def _from_environment() -> int:
    text = os.environ.get("WORKBENCH_RANKS", "")
    if not text:
        return DEFAULT_RANKS
    try:
        return _number(text)
    except ConfigError:
        raise ConfigError(f"WORKBENCH_RANKS={text!r}: give a whole number, 1 or more") from None
