"""PBS, LSF, SGE and HTCondor: their scripts, commands and states, in one table.

The scripts and commands follow the schedulers' manuals. The tests run them against stand-ins. PBS, LSF and HTCondor
never ran on a real scheduler; SGE was tried by hand on Grid Engine 8.1.9.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from workbench.clusters.schedulers.job import UNKNOWN, Scheduler, State, run_command
from workbench.errors import LaunchError

NEVER = r"(?!)"  # a pattern that nothing matches


@final
@dataclass(frozen=True, kw_only=True)
class Dialect(Scheduler):
    """How one scheduler writes and names jobs.

    "{job}" in a command or pattern stands for the job's number. `job`, `code` and `reason` are searched line by line,
    and their first group is what they find.

    Attributes:
        name: as in messages.
        template: the script of a job, with the placeholders of `request`.
        is_shell: whether the template is a shell script; otherwise it is a submit description.
        required: options that have no default, each with its meaning.
        nodes: number of nodes if none is given; None lets the scheduler choose.
        submit_with: command that reads the script from its standard input.
        job: pattern of the job's number in the output of `submit_with`.
        query_with: command that prints the job's state.
        code, reason: patterns of the state's code and of the reason in the output of `query_with`.
        waiting, running: patterns of all codes of a job that waits or runs. A job with another code has ended.
        gone: pattern in the error message of `query_with` for a job that has ended.
        cancel_with: command.
        hosts: shell commands that set `hosts` to a file with one line for each rank's host; empty for one machine.
    """

    name: str
    template: str
    is_shell: bool = True
    required: tuple[tuple[str, str], ...] = ()
    nodes: int | None = None
    submit_with: tuple[str, ...]
    job: str
    query_with: tuple[str, ...]
    code: str
    reason: str = NEVER
    waiting: str
    running: str
    gone: str = NEVER
    cancel_with: tuple[str, ...]
    hosts: str = ""

    def quote(self, command: Sequence[str]) -> str:
        """Return a command line as the template's language quotes it."""
        return shlex.join(command) if self.is_shell else " ".join(map(_condor_argument, command))

    def submit(self, script: str) -> str:
        try:
            answer = run_command(self.name, self.submit_with, script)
        except LaunchError as error:
            raise LaunchError(f"{self.name} refused the job: {error}") from None
        found = re.search(self.job, answer, re.MULTILINE)
        if found is None:
            raise LaunchError(f"`{self.submit_with[0]}` printed no job number: {answer.strip()!r}")
        return found[1]

    def state(self, job: str) -> State:
        try:
            answer = run_command(self.name, [word.replace("{job}", job) for word in self.query_with])
        except LaunchError as error:
            if not re.search(self.gone, str(error), re.IGNORECASE):
                raise
            answer = ""
        found = re.search(self.code.replace("{job}", re.escape(job)), answer, re.MULTILINE)
        if found is None:
            return State(UNKNOWN, f"{self.name} does not know it any more")
        why = re.search(self.reason, answer, re.MULTILINE)
        reason = why[1].strip() if why else f"state {found[1]}"
        if re.fullmatch(self.waiting, found[1]):
            return State("PENDING", reason)
        return State("RUNNING") if re.fullmatch(self.running, found[1]) else State("ENDED", reason)

    def cancel_command(self, job: str) -> list[str]:
        return [word.replace("{job}", job) for word in self.cancel_with]


def _condor_argument(word: str) -> str:
    """Quote a word for HTCondor's `arguments = "..."`.

    >>> print(_condor_argument("a b"), _condor_argument("it's"), _condor_argument('"'))
    'a b' 'it''s' ""
    """
    word = word.replace('"', '""')
    return "'" + word.replace("'", "''") + "'" if re.search(r"[\s']", word) or not word else word


PBS = Dialect(
    name="PBS",
    template="""\
#!/bin/sh
#PBS -N {name}
#PBS -V
#PBS -j oe
#PBS -o /dev/null
#PBS -r n
#PBS -q {queue}
#PBS -A {account}
#PBS -l walltime={walltime}
#PBS -l select={nodes}:ncpus={ranks_per_node}:mpiprocs={ranks_per_node}
#PBS -l place=scatter
#PBS {extra}
exec >> {log} 2>&1
cd "$PBS_O_WORKDIR"
exec {command}
""",
    nodes=1,
    submit_with=("qsub",),
    job=r"^(\d+[\w.\[\]-]*)\s*$",
    query_with=("qstat", "-f", "{job}"),
    code=r"^\s*job_state = (\w)",
    reason=r"^\s*comment = (.+)",
    waiting="[QHWTSU]",
    running="[RBEM]",
    gone="unknown job|has finished",
    cancel_with=("qdel", "{job}"),
    hosts='hosts="$PBS_NODEFILE"',
)
LSF = Dialect(
    name="LSF",
    template="""\
#!/bin/sh
#BSUB -J {name}
#BSUB -o /dev/null
#BSUB -rn
#BSUB -q {queue}
#BSUB -P {account}
#BSUB -W {walltime_minutes}
#BSUB -n {num_ranks}
#BSUB -R "span[ptile={ranks_per_node}]"
#BSUB {extra}
exec >> {log} 2>&1
exec {command}
""",
    submit_with=("bsub",),
    job=r"^Job <(\d+)>",
    query_with=("bjobs", "-noheader", "-o", "stat", "{job}"),
    code=r"^\s*([A-Z]+)\s*$",
    waiting="PEND|PROV|WAIT|PSUSP|USUSP|SSUSP",
    running="RUN|UNKWN",
    gone="is not found",
    cancel_with=("bkill", "{job}"),
    hosts='hosts="$LSB_DJOB_HOSTFILE"',
)
SGE = Dialect(
    name="SGE",
    template="""\
#!/bin/sh
#$ -N {name}
#$ -S /bin/sh
#$ -V
#$ -cwd
#$ -j y
#$ -o /dev/null
#$ -r n
#$ -notify
#$ -q {queue}
#$ -P {account}
#$ -l h_rt={walltime}
#$ -pe {pe} {num_ranks}
#$ {extra}
exec >> {log} 2>&1
exec {command}
""",
    required=(("pe", "a parallel environment; `qconf -spl` lists them"),),
    submit_with=("qsub",),
    job=r"^Your job (\d+) ",
    query_with=("qstat",),
    code=r"^\s*{job}\s+\S+\s+\S+\s+\S+\s+(\S+)",
    waiting="[^E]*[wsST][^E]*",
    running="[^E]+",
    cancel_with=("qdel", "{job}"),
    # a line of SGE's file has a host, its number of ranks, a queue and processors
    hosts=('hosts="$IPP_PROFILE_DIR/hosts"; awk "{ for (i = 0; i < \\$2; i++) print \\$1 }" "$PE_HOSTFILE" > "$hosts"'),
)
HTCONDOR = Dialect(
    name="HTCondor",
    template="""\
batch_name = {name}
universe = vanilla
executable = /usr/bin/env
arguments = "{command}"
transfer_executable = False
should_transfer_files = NO
getenv = True
output = {log}
error = {log}
accounting_group = {account}
allowed_execute_duration = {walltime_seconds}
request_cpus = {num_ranks}
{extra}
queue
""",
    is_shell=False,
    submit_with=("condor_submit", "-"),
    job=r"submitted to cluster (\d+)",
    query_with=("condor_q", "{job}", "-af", "JobStatus", "HoldReason"),
    code=r"^(\d)\b",
    reason=r"^\d (?!undefined)(.+)",
    waiting="[17]",
    running="[26]",
    cancel_with=("condor_rm", "{job}"),
)
DIALECTS = {"pbs": PBS, "lsf": LSF, "sge": SGE, "htcondor": HTCONDOR}
