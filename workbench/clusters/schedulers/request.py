"""`BatchJob`: the resources of a job of PBS, LSF, SGE or HTCondor, from a text or as an object, and its script."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, final, get_args

from workbench.clusters.local.mpi_install import OPEN_MPI, MPIInstall
from workbench.clusters.schedulers.dialects import DIALECTS, Dialect
from workbench.errors import ConfigError
from workbench.naming import did_you_mean

Place = Literal["here", "job"]
WALLTIME = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")
WARN_S = 60.0  # seconds between the request to stop and the time limit
FORM = "'pbs:queue=gpu,walltime=01:00:00,nodes=2'"
PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")  # ${NAME} is the shell's
NAME_LENGTH = 15  # PBS refuses longer names of jobs
USES = {  # of each option, the placeholders that use it
    "queue": ("queue",),
    "account": ("account",),
    "walltime": ("walltime", "walltime_minutes", "walltime_seconds"),
    "nodes": ("nodes", "ranks_per_node"),
    "pe": ("pe",),
    "extra": ("extra",),
}
PLACEHOLDERS = ("command", "name", "log", "num_ranks", *(name for names in USES.values() for name in names))


@final
@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job for a cluster's ranks under PBS, LSF, SGE or HTCondor. Options that are not given have the site's defaults.

    The tests run stand-ins for the schedulers' commands. PBS, LSF and HTCondor never ran on a real scheduler; SGE was
    tried by hand on Grid Engine 8.1.9. Slurm has `Slurm`.

    One minute before `walltime`, the training is asked to stop, so that it ends with a checkpoint.

    Args:
        scheduler: "pbs", "lsf", "sge" or "htcondor".
        queue, account: in the scheduler's words; the account is SGE's and LSF's project.
        walltime: time limit, "HH:MM:SS".
        nodes: number of nodes; the ranks are spread evenly over them. PBS has one node by default, LSF chooses. SGE's
            parallel environment decides, and HTCondor uses one machine: they refuse this option.
        pe: SGE's parallel environment, which SGE needs.
        template: file with your own script and its placeholders, instead of the built-in script.
        controller: where the controller of the ranks runs: "here", on the notebook's machine, or "job".
        address: address at which the nodes reach a controller here; by default that of this machine's host name.
        extra: other lines of the script, without the prefix such as "#PBS": ["-l mem=16gb"].

    Raises:
        ConfigError: a value is not valid, the script does not use it, or the template cannot be read.

    Example:
        Cluster(8, launcher=BatchJob("pbs", queue="gpu", walltime="02:00:00", nodes=2, extra=["-W group_list=physics"]))
    """

    scheduler: str
    queue: str | None = None
    account: str | None = None
    walltime: str | None = None
    nodes: int | None = None
    pe: str | None = None
    template: str | Path | None = None
    controller: Place = "here"
    address: str | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scheduler not in DIALECTS:
            raise ConfigError(f"scheduler={self.scheduler!r}: give one of {', '.join(map(repr, DIALECTS))}")
        for name in ("queue", "account", "pe", "address"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value or re.search(r"\s", value)):
                raise ConfigError(f"{name}={value!r}: give a name without blanks")
        if self.walltime is not None and not (isinstance(self.walltime, str) and WALLTIME.fullmatch(self.walltime)):
            raise ConfigError(f"walltime={self.walltime!r}: give 'HH:MM:SS', such as '01:30:00'")
        nodes: Any = self.nodes
        if nodes is not None and (not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1):
            raise ConfigError(f"nodes={nodes!r}: give a whole number, 1 or more")
        if self.controller not in get_args(Place):
            raise ConfigError(f"controller={self.controller!r}: give one of {', '.join(map(repr, get_args(Place)))}")
        extra: Any = self.extra
        if isinstance(extra, str) or not all(isinstance(line, str) and len(line.splitlines()) == 1 for line in extra):
            raise ConfigError(f"extra={extra!r}: give a list of lines, such as ['-l mem=16gb']")
        object.__setattr__(self, "extra", tuple(extra))
        self._check_script()

    @classmethod
    def parse(cls, text: str) -> BatchJob:
        """Parse "pbs:queue=gpu,walltime=01:00:00,nodes=2". `extra=LINE` may be repeated.

        >>> BatchJob.parse("lsf:queue=normal,nodes=2,extra=-M 16G")
        BatchJob(scheduler='lsf', queue='normal', ..., nodes=2, ..., extra=('-M 16G',))

        Raises:
            ConfigError: there is no such option; the message names the nearest one.
        """
        scheduler, _, rest = text.partition(":")
        values: dict[str, Any] = {}
        extra: list[str] = []
        known = [field.name for field in fields(cls)][1:]
        for pair in filter(None, (part.strip() for part in rest.split(","))):
            name, equals, value = (part.strip() for part in pair.partition("="))
            if name not in known or not equals or not value:
                raise ConfigError(
                    f"launcher={text!r}: {pair!r} is no option of it: {did_you_mean(name, known, cutoff=0.6)}There are "
                    f"{', '.join(known)}; write it like {FORM}"
                )
            if name in values:
                raise ConfigError(f"launcher={text!r}: {name} is given twice")
            if name == "extra":
                extra.append(value)
            else:
                values[name] = int(value) if name == "nodes" and value.isdecimal() else value
        return cls(scheduler.strip(), **values, extra=tuple(extra))

    @property
    def dialect(self) -> Dialect:
        """The row of the table of schedulers."""
        return DIALECTS[self.scheduler]

    @property
    def warn_after_s(self) -> float | None:
        """Seconds of the job after which the training is asked to stop; None without a time limit."""
        seconds = self._walltime_s
        return None if seconds is None else max(seconds - WARN_S, seconds / 2)

    @property
    def _walltime_s(self) -> int | None:
        found = WALLTIME.fullmatch(self.walltime or "")
        return None if found is None else int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3])

    def _template(self) -> str:
        """Return the text of the script with its placeholders."""
        if self.template is None:
            return self.dialect.template
        try:
            return Path(self.template).expanduser().read_text()
        except (OSError, ValueError, RuntimeError) as error:  # no such file, no text, no such user
            raise ConfigError(f"template={str(self.template)!r} cannot be read: {error}") from None

    def _check_script(self) -> None:
        """Check that the script has what it needs, and that it uses all options."""
        used = set(PLACEHOLDER.findall(self._template()))
        where = f"the {self.dialect.name} script" if self.template is None else f"template {str(self.template)!r}"
        for name in sorted(used - set(PLACEHOLDERS)):
            raise ConfigError(
                f"{where}: {{{name}}} is no placeholder: {did_you_mean(name, PLACEHOLDERS)}There are "
                f"{', '.join(PLACEHOLDERS)}. In braces of the shell, add blanks: {{ {name} }}"
            )
        if "command" not in used:
            raise ConfigError(f"{where} has no {{command}}, so it would start nothing: add a line `exec {{command}}`")
        for name, placeholders in USES.items():
            if getattr(self, name) and used.isdisjoint(placeholders):
                fix = "leave it out" + ("" if self.template is None else f", or write {{{placeholders[0]}}} into it")
                raise ConfigError(f"{where} does not use {name}: {fix}")
        for name, meaning in self.dialect.required:
            if name in used and not getattr(self, name):
                raise ConfigError(f"{self.dialect.name} needs {name}=NAME, {meaning}")

    def check_num_ranks(self, num_ranks: int) -> None:
        """Check that a job for `num_ranks` ranks can be submitted from this machine.

        Raises:
            ConfigError: there are fewer ranks than nodes, or the scheduler's command is missing.
        """
        if self.nodes is not None and num_ranks < self.nodes:
            raise ConfigError(
                f"{num_ranks} ranks on {self.nodes} nodes: each node needs a rank; set nodes={num_ranks}, or use more "
                "ranks"
            )
        command, name = self.dialect.submit_with[0], self.dialect.name
        if shutil.which(command) is None:
            raise ConfigError(
                f"there is no {command} on this machine: log in where {name} is, or put its folder on PATH; "
                "launcher='local' starts ranks here"
            )

    def script(self, num_ranks: int, *, name: str, output: str, command: Sequence[str]) -> str:
        """Return the script of a job that runs `command` once, on its first node.

        A line with a placeholder that has no value is left out. A line with {extra} appears once for each extra line.

        Args:
            num_ranks: number of ranks.
            name: name of the job.
            output: path of the job's output, which its nodes and this machine share.
            command: the command line.
        """
        nodes, seconds = self.nodes or self.dialect.nodes, self._walltime_s
        values = {
            "command": self.dialect.quote(command),
            "name": name[:NAME_LENGTH],
            "log": self.dialect.quote([output]) if self.dialect.is_shell else output,
            "num_ranks": num_ranks,
            "nodes": nodes,
            "ranks_per_node": -(-num_ranks // nodes) if nodes else None,
            "queue": self.queue,
            "account": self.account,
            "walltime": self.walltime,
            "walltime_minutes": -(-seconds // 60) if seconds is not None else None,
            "walltime_seconds": seconds,
            "pe": self.pe,
        }
        lines = []
        for line in self._template().splitlines():
            for extra in self.extra if "{extra}" in line else ("",):
                lines += _filled(line, {**values, "extra": extra})
        return "\n".join([*lines, ""])

    def start_command(self, num_ranks: int, install: MPIInstall, exports: Iterable[str]) -> list[str]:
        """Return the beginning of the command that starts ranks on the job's nodes; the ranks' own command follows.

        Args:
            num_ranks: number of ranks.
            install: the MPI.
            exports: arguments of mpiexec that give variables to ranks on other nodes.
        """
        mpiexec = [install.mpiexec, "-n", str(num_ranks), *install.args, *exports]
        if not self.dialect.hosts:
            return mpiexec
        option = "--hostfile" if install.name == OPEN_MPI else "-f"
        return ["sh", "-c", f'{self.dialect.hosts}; exec "$0" ${{hosts:+{option} "$hosts"}} "$@"', *mpiexec]


def _filled(line: str, values: Mapping[str, object]) -> list[str]:
    """Return a line of a script with its placeholders filled; no line if one of them has no value."""
    if any(values[name] is None for name in PLACEHOLDER.findall(line)):
        return []
    return [PLACEHOLDER.sub(lambda found: str(values[found[1]]), line)]
