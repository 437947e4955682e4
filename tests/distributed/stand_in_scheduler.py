"""Stand-ins for the commands of PBS, LSF, SGE and HTCondor: a job runs at once, in the background, on this machine.

    stand_in_scheduler.py FOLDER SCHEDULER COMMAND [ARGUMENT ...]

The job's options are read from its script, and all else of the real schedulers is missing: they show only that the
package and commands of this form fit together. In FOLDER: `calls`, all command lines; `hosts`, the nodes; `N.script`,
`N.pid`, of job N; `hold`, while it exists, new jobs wait.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = {
    "pbs": ("qsub", "qstat", "qdel"),
    "lsf": ("bsub", "bjobs", "bkill"),
    "sge": ("qsub", "qstat", "qdel"),
    "htcondor": ("condor_submit", "condor_q", "condor_rm"),
}
REFUSED = {
    "pbs": "qsub: Unknown queue",
    "lsf": "closed: No such queue. Job not submitted.",
    "sge": 'Unable to run job: Job was rejected because job requests unknown queue "closed".',
    "htcondor": "ERROR: Failed to parse command file (line 11).",
}
SUBMITTED = {
    "pbs": "{job}.stand-in\n",
    "lsf": "Job <{job}> is submitted to default queue <normal>.\n",
    "sge": 'Your job {job} ("name") has been submitted\n',
    "htcondor": "Submitting job(s).\n1 job(s) submitted to cluster {job}.\n",
}
STATES = {  # of a job that waits, and of one that runs
    "pbs": ("Job Id: {job}\n    job_state = Q\n    comment = Not Running: no node is free\n", "    job_state = R\n"),
    "lsf": ("PEND\n", "RUN\n"),
    "sge": (
        "     {job} 0.5 name ada   qw   11/26/2026 10:00:00\n",
        "     {job} 0.5 name ada   r   11/26/2026 10:00:00\n",
    ),
    "htcondor": ("1 undefined\n", "2 undefined\n"),
}
GONE = {"pbs": "qstat: Unknown Job Id {job}", "lsf": "Job <{job}> is not found"}


def install(folder: Path, scheduler: str, hosts: Sequence[str] = ("localhost",)) -> Path:
    """Write the commands into `folder`/bin, and return that path."""
    (folder / "bin").mkdir(parents=True)
    (folder / "hosts").write_text("\n".join(hosts))
    (folder / "calls").touch()
    for command in COMMANDS[scheduler]:
        path = folder / "bin" / command
        path.write_text(
            f'#!/bin/sh\nexec {shlex.join([sys.executable, "-S", __file__, str(folder), scheduler, command])} "$@"\n'
        )
        path.chmod(0o755)
    return folder / "bin"


def alive(folder: Path, job: str) -> bool:
    """Whether the job's first process runs."""
    try:
        words = Path("/proc", (folder / f"{job}.pid").read_text(), "stat").read_text()
    except OSError:
        return False
    return words.rpartition(")")[2].split()[0] != "Z"


def start(folder: Path, scheduler: str, job: str) -> None:
    """Start a job: by a shell, or as its submit description says."""
    text, hosts = (folder / f"{job}.script").read_text(), (folder / "hosts").read_text().split()
    env, command, output = dict(os.environ), ["/bin/sh", str(folder / f"{job}.script")], "/dev/null"
    if scheduler == "pbs":
        chunks, cores, ranks = map(int, re.findall(r"^#PBS -l select=(\d+):ncpus=(\d+):mpiprocs=(\d+)$", text, re.M)[0])
        assert cores == ranks
        (folder / "nodes").write_text("".join(f"{host}\n" * ranks for host in hosts[:chunks]))
        env |= {"PBS_JOBID": f"{job}.stand-in", "PBS_NODEFILE": str(folder / "nodes"), "PBS_O_WORKDIR": os.getcwd()}
    elif scheduler == "lsf":
        (folder / "nodes").write_text(f"{hosts[0]}\n" * int(re.findall(r"^#BSUB -n (\d+)$", text, re.M)[0]))
        env |= {"LSB_JOBID": job, "LSB_DJOB_HOSTFILE": str(folder / "nodes")}
    elif scheduler == "sge":
        slots = re.findall(r"^#\$ -pe mpi (\d+)$", text, re.M)[0]
        (folder / "nodes").write_text(f"{hosts[0]} {slots} all.q@{hosts[0]} UNDEFINED\n")
        env |= {"JOB_ID": job, "PE_HOSTFILE": str(folder / "nodes")}
    else:
        values = dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line)
        assert text.endswith("\nqueue\n") and values["getenv"] == "True" and int(values["request_cpus"]) > 0
        command, output = [values["executable"], *shlex.split(values["arguments"][1:-1])], values["output"]
    with open(output, "ab") as out:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd="/" if scheduler == "pbs" else None,
        )
    (folder / f"{job}.pid").write_text(str(process.pid))


def main(folder: Path, scheduler: str, command: str, arguments: list[str]) -> int:
    """Do what the command does; return its exit status."""
    with (folder / "calls").open("a") as calls:
        calls.write(f"{shlex.join([command, *arguments])}\n")
    submit, status, _ = COMMANDS[scheduler]
    if command == submit:
        text = sys.stdin.read()
        if "closed" in text:
            print(REFUSED[scheduler], file=sys.stderr)
            return 1
        job = str(len(list(folder.glob("*.script"))) + 1)
        (folder / f"{job}.script").write_text(text)
        if not (folder / "hold").exists():
            start(folder, scheduler, job)
        sys.stdout.write(SUBMITTED[scheduler].replace("{job}", job))
        return 0
    named = [word.partition(".")[0] for word in arguments if word[0].isdigit()]
    job = named[0] if named else str(len(list(folder.glob("*.script"))))  # SGE's qstat names no job
    pid = folder / f"{job}.pid"
    if command == status:
        if not pid.exists() and not (folder / "hold").exists():
            start(folder, scheduler, job)
        if pid.exists() and not alive(folder, job):
            print(GONE.get(scheduler, "").replace("{job}", job), file=sys.stderr)
            return int(scheduler in GONE)
        sys.stdout.write(STATES[scheduler][pid.exists()].replace("{job}", job))
        return 0
    if alive(folder, job):
        os.kill(int(pid.read_text()), signal.SIGUSR2 if scheduler == "sge" else signal.SIGTERM)
    elif not pid.exists():
        pid.write_text("0")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
