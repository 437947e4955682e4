"""The ranks behind a notebook: started by its first cell that runs on them, and the commands that steer them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

from IPython.core.inputtransformer2 import cell_magic

from workbench.clusters.waiting import Waiting
from workbench.errors import ConfigError, LaunchError, WorkbenchError
from workbench.kernel.cells import COMMANDS, INSTALLERS, Cell, parse_cell, parse_ranks
from workbench.kernel.execution import Execution, stuck

DEFAULT_RANKS = 4
PREPARE_S = 60.0
FETCH_S = 600.0  # of one variable
PREPARE = """
import workbench as wb
rank, world_size = {rank}, {world_size}
"""


@final
class Ranks:
    """What a notebook's cells run on.

    Args:
        shell: the notebook's IPython shell.
    """

    _of: dict[int, Ranks] = {}  # id of a shell -> its ranks  # noqa: RUF012 - one for the whole process on purpose

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.cluster: Any = None
        self.num_ranks = _from_environment()
        self.launcher = os.environ.get("WORKBENCH_LAUNCHER") or os.environ.get("WORKBENCH_KERNEL_LAUNCHER") or "local"
        self._last: Execution | None = None
        self._owns = True

    @classmethod
    def attach_to(cls, shell: Any) -> Ranks:
        """The ranks of a shell, whose cells run on them from now on."""
        if id(shell) not in cls._of:
            ranks = cls._of[id(shell)] = cls(shell)
            shell.input_transformers_cleanup.append(ranks.transform)
            shell.user_ns["__ranks__"] = ranks
            shell.user_ns_hidden["__ranks__"] = ranks
        return cls._of[id(shell)]

    @classmethod
    def detach_from(cls, shell: Any) -> None:
        """End the ranks of a shell, whose cells run in it again."""
        ranks = cls._of.pop(id(shell), None)
        if ranks is not None:
            shell.input_transformers_cleanup.remove(ranks.transform)
            ranks.stop()

    # -- cells -----------------------------------------------------------------------------------------------------

    def transform(self, lines: list[str]) -> list[str]:
        """A cell as IPython is to run it: `%%local` ones as they are, behind a call of `prepare`, all others as a call of `run`."""
        text = "".join(lines)
        if not text.strip() or text.startswith("__ranks__."):
            return lines
        try:
            cell = parse_cell(text)
        except ConfigError:
            cell = Cell(body=text)  # `run` says what is wrong with it
        if cell.local:
            before = [f"__ranks__.prepare({cell.commands!r}, {cell.names!r})\n"] if cell.commands or cell.names else []
            return [*before, *cell_magic(cell.body.splitlines(keepends=True))]  # type: ignore[no-untyped-call]
        return [f"__ranks__.run({text!r})\n"]

    def run(self, text: str) -> None:
        """Run a cell on the ranks it is for.

        Raises:
            WorkbenchError: it cannot run, or failed on a rank.
        """
        with _without_frames():
            cell = parse_cell(text)
            assert not cell.local, "runs in the notebook's own process"
            for name, argument in cell.commands:
                self.command(name, argument)
            if not cell.body.strip():
                return
            self.start()
            self._check_free()
            self._last = Execution(self.cluster.client, parse_ranks(cell.ranks, self.num_ranks), self.num_ranks)
            self._last.run(cell.body)

    def prepare(self, commands: Iterable[tuple[str, str]], names: tuple[str, ...]) -> None:
        """What a local cell needs: its commands carried out, and copies of rank 0's variables of these names.

        Raises:
            WorkbenchError: one of them cannot be.
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
            except Exception as error:  # noqa: BLE001 - whatever the object's own pickling raises
                why = f"{getattr(error, 'ename', type(error).__name__)}: {getattr(error, 'evalue', error)}"
                raise ConfigError(f"%%local {name}: rank 0 cannot give it ({why})") from None

    def ask(self, function: Any, *arguments: Any, timeout_s: float = 3.0) -> Any:
        """What a function answers on rank 0; None if there are no ranks yet, it is busy or training, or takes longer."""
        if self.cluster is None or self.cluster.state != "ready" or self.busy():
            return None
        with suppress(Exception):  # an answer that does not come, whatever the reason, is none
            return self.cluster.client[0].apply_async(function, *arguments).get(timeout_s)
        return None

    def busy(self) -> list[int]:
        """Ranks that still run an earlier cell."""
        return self._last.busy if self._last is not None else []

    def _check_free(self) -> None:
        state = self.cluster.state
        if state == "training":
            raise ConfigError("the ranks are training: wait for the run or stop it, or look at it from a %%local cell")
        if state in ("lost", "stopped"):
            raise LaunchError(f"the ranks are gone ({state}): %restart_ranks begins with new ones; their variables are lost")
        if self.busy():
            raise LaunchError(stuck(self.busy()))

    # -- the ranks -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Have ranks; they start when there are none."""
        if self.cluster is not None:
            return
        from workbench.clusters import Cluster

        options: dict[str, Any] = {} if self.launcher != "torch" else {"runtime": "torch"}
        self._use(Cluster(self.num_ranks, launcher=self.launcher, **options), owns=True)

    def _use(self, cluster: Any, owns: bool) -> None:
        self.cluster, self.num_ranks, self._owns, self._last = cluster, cluster.num_ranks, owns, None
        self.shell.user_ns["cluster"] = cluster
        pending = [
            cluster.client[rank].execute(PREPARE.format(rank=rank, world_size=self.num_ranks), silent=True, block=False)
            for rank in range(self.num_ranks)
        ]
        if cluster.state == "training":
            return  # they take it up behind the training
        try:
            with Waiting(f"the ranks of {cluster.id} to be free") as waiting:
                waiting.until(lambda seconds: all(result.wait(seconds) or result.done() for result in pending), PREPARE_S)
            for result in pending:
                result.result(0)
        except TimeoutError:
            raise LaunchError(
                f"the ranks of {cluster.id} do not answer: they run something that another notebook gave them. Wait for it, "
                "or interrupt it there; %restart_ranks begins with new ones"
            ) from None

    def stop(self) -> None:
        """End the ranks that this notebook started; those it attached to go on."""
        cluster, self.cluster = self.cluster, None
        self.shell.user_ns.pop("cluster", None)
        if cluster is not None:
            cluster.stop() if self._owns else cluster.detach()

    def _make_room(self) -> None:
        """`stop`, and say what becomes of the ranks there are."""
        if self.cluster is None:
            return
        if self._owns:
            print(f"the {self.num_ranks} ranks end, and their variables with them", file=sys.stderr)
        else:
            print(f"the {self.num_ranks} ranks are let go: %attach {self.cluster.id} goes on with them", file=sys.stderr)
        self.stop()

    # -- commands --------------------------------------------------------------------------------------------------

    def command(self, name: str, argument: str) -> None:
        """One of the commands that may stand above a cell, or an installer, which runs here, once.

        Raises:
            ConfigError: it does not go like that.
        """
        if name in INSTALLERS:
            self.shell.run_line_magic(name, argument)
            return
        assert name in COMMANDS
        getattr(self, f"_command_{name}")(argument)

    def _command_ranks(self, argument: str) -> None:
        """%ranks N: have so many."""
        if argument:
            number = _number(argument)
            if number != self.num_ranks:
                self._make_room()
            self.num_ranks = number
        self.start()

    def _command_launcher(self, argument: str) -> None:
        """%launcher WORDS: where ranks are from now on, as `launcher=` of Cluster."""
        if not argument:
            raise ConfigError("%launcher wants words, as Cluster(launcher=...) does: local, emulated:1gbit, slurm:partition=debug")
        if argument != self.launcher:
            self._make_room()
        self.launcher = argument

    def _command_attach(self, argument: str) -> None:
        """%attach NAME: go on with the ranks of a detached cluster."""
        from workbench import clusters

        if not argument:
            raise ConfigError("%attach wants the name of a cluster: `workbench cluster list` shows those there are")
        taken = clusters.attach(argument)  # before those there are go: there may be none of that name
        self.stop()
        self._use(taken, owns=False)

    def _command_detach(self, _: str) -> None:
        """%detach: let the ranks go on without this notebook."""
        if self.cluster is None:
            raise ConfigError("there are no ranks to detach")
        print(f"%attach {self.cluster.id} goes on with these ranks")
        self._owns = False
        self.stop()

    def _command_status(self, _: str) -> None:
        """%status: who the ranks are."""
        from IPython.display import display

        if self.cluster is None:
            print(f"no ranks yet: the next cell starts {self.num_ranks} ({self.launcher})")
            return
        display(self.cluster.status())  # type: ignore[no-untyped-call]

    def _command_restart_ranks(self, _: str) -> None:
        """%restart_ranks: end the ranks, also those that were attached, and have new ones; their variables are lost."""
        self._owns = True
        self.stop()
        self.start()

    def _command_stop_ranks(self, _: str) -> None:
        """%stop_ranks: end them, also those that were attached; the next cell starts new ones."""
        self._owns = True
        self.stop()


@contextmanager
def _without_frames() -> Iterator[None]:
    """IPython shows what `_render_traceback_` gives; frames of this package tell nobody anything."""
    try:
        yield
    except (WorkbenchError, KeyboardInterrupt) as error:
        if not hasattr(error, "_render_traceback_"):
            words = f"{type(error).__name__}: {error}" if isinstance(error, WorkbenchError) else "KeyboardInterrupt"
            shown: Any = error  # a name that outlives the clause
            shown._render_traceback_ = lambda: [words, *getattr(shown, "__notes__", ())]
        raise


def _pulled(engine: Any, name: str) -> Any:
    """A variable; by `result`, for an answer is there a moment before ipyparallel's `wait` and `get` know of it."""
    pending = engine.pull(name, block=False)
    with Waiting(f"rank 0 to give {name}") as waiting:
        waiting.until(lambda seconds: pending.wait(seconds) or pending.done(), FETCH_S)
    return pending.result(0)


def _number(words: str) -> int:
    if not words.isdigit() or int(words) < 1:
        raise ConfigError(f"%ranks {words}: a whole number, 1 or more")
    return int(words)


def _from_environment() -> int:
    words = os.environ.get("WORKBENCH_RANKS", "")
    if not words:
        return DEFAULT_RANKS
    try:
        return _number(words)
    except ConfigError:
        raise ConfigError(f"WORKBENCH_RANKS={words!r}: a whole number, 1 or more") from None
