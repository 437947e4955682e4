"""The program of a batch job, on its first node: it starts the ranks and ends with them.

    batch_job.py JOB.json

At Slurm's warning before the time limit, it asks the training to stop with a checkpoint. It ends the ranks when the
job's folder is removed, because then no process controls them. On request, it puts the job back into the queue.
It imports nothing of the package, so it is small and starts quickly.

JOB.json:
    command: starts the ranks.
    environment: variables to add to the job's environment.
    folder: the job's or cluster's folder. Its record, cluster.json, names the training that runs.
    controller: command of a controller that runs in the job, or null.
    warn_after_s: seconds after which the job warns itself, if its scheduler does not; null or missing for never.
    connection: file that the controller writes, or null.
    on_warning: "command": write a command into the control file of the run that the record names.
        "interrupt": interrupt the process that starts the ranks.
        "signal": write the job's `stop` file, and send SIGUSR1 to all ranks, through srun.
    rendezvous: whether the ranks get MASTER_ADDR and MASTER_PORT; false if it is left out.
    requeue: false; "checkpoint": put the job back into the queue if its training has stopped with a checkpoint, and
        then resume from it; "again": put it back if its command has ended with status 0 after the warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

JOB_NUMBERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")  # the last is SGE's
POLL_S = 0.25
GRACE_S = 15.0  # after SIGTERM: `workbench train` gives its ranks 10 s; Slurm's own limit (KillWait) is 30 s by default
REQUEUE_S = 60.0  # limit for `scontrol requeue`
MISSED = 12  # consecutive failed checks of a shared folder before it counts as removed
CONTROLLER_S = 60.0
RECORD, RESUME, STOP = (
    "cluster.json",
    "resume",
    "stop",
)  # `runtimes.control.job` writes and reads the first and the last
FIRST_PORT, NUM_PORTS = 10_000, 20_000  # below the ports that systems give to outgoing connections


class Job:
    """The processes of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec: dict[str, Any] = json.loads(path.read_text())
        self.folder = Path(self.spec["folder"])
        self.env = {**os.environ, **for_steps(os.environ, self.spec["command"]), **self.spec["environment"]}
        if self.spec.get("rendezvous"):
            self.env |= rendezvous(os.environ)
        self.processes: list[subprocess.Popen[str]] = []
        self.warned = False  # Slurm has sent its warning
        self.asked_to_stop = False  # the training was asked to stop
        self.ended = False  # Slurm ends the job
        self.stopped: str | None = None  # the run that was asked to stop
        for number, handler in ((signal.SIGUSR1, self._warn), (signal.SIGTERM, self._end), (signal.SIGINT, self._end)):
            signal.signal(number, handler)
        signal.signal(signal.SIGUSR2, self._end)  # SGE's, before its SIGKILL
        signal.signal(signal.SIGALRM, self._warn)
        signal.setitimer(signal.ITIMER_REAL, self.spec.get("warn_after_s") or 0)

    def _warn(self, *_: object) -> None:
        self.warned = True

    def _end(self, *_: object) -> None:
        self.ended = True

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a process in its own session: signals to the job do not reach it, and `close` ends it."""
        process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, start_new_session=True, text=True)
        self.processes.append(process)
        return process

    def start_controller(self) -> None:
        """Start the controller and wait until it listens."""
        log(f"controller on {os.uname().nodename}")
        controller = self.start(self.spec["controller"])
        deadline = time.monotonic() + CONTROLLER_S
        while not os.path.exists(self.spec["connection"]) and not self.ended:
            if controller.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the controller did not start (exit status {controller.poll()})")
            time.sleep(POLL_S)

    def command(self) -> list[str]:
        """Return the command that starts the ranks. It resumes a run that stopped before the job was requeued."""
        left = self.folder / RESUME
        return [*self.spec["command"], *(["--resume", left.read_text().strip()] if left.exists() else [])]

    def recorded_run(self) -> str | None:
        """Return the folder of the training that the record names; None before there is one."""
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads((self.folder / RECORD).read_text())["run"] or "") or None
        return None

    def ask_to_stop(self, ranks: subprocess.Popen[str]) -> None:
        """Ask the training to stop, or one that begins later."""
        how = self.spec["on_warning"]
        if not self.asked_to_stop:
            self.asked_to_stop = True
            if how == "signal":
                log("the time limit is near: all ranks get SIGUSR1, and stop_requested(trainer) is True")
                with contextlib.suppress(OSError):  # the folder was removed
                    (self.folder / STOP).write_text("1")
                ranks.send_signal(signal.SIGUSR1)
            else:
                log("the time limit is near: the training is asked to stop, with a checkpoint")
            if how == "interrupt":
                ranks.send_signal(signal.SIGINT)
        if how == "command":
            run = self.recorded_run()
            if run and run != self.stopped:
                with contextlib.suppress(OSError), open(Path(run) / "control.jsonl", "a") as control:
                    control.write(json.dumps({"stop": True}) + "\n")
                self.stopped = run

    def watch(self, ranks: subprocess.Popen[str]) -> int:
        """Wait until the ranks have ended, or the job must end. Return their exit status."""
        missed = 0
        while ranks.poll() is None and not self.ended:
            if self.warned:
                self.ask_to_stop(ranks)
            missed = 0 if self.path.exists() else missed + 1
            if missed == MISSED:
                log("the cluster's folder was removed, so the cluster has ended: the ranks end too")
                break
            if any(process.poll() is not None for process in self.processes):
                break  # the controller has ended
            time.sleep(POLL_S)
        return 1 if (status := ranks.poll()) is None else status

    def close(self) -> None:
        """End all processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + GRACE_S
            for process in self.processes:
                if process.poll() is None:
                    with contextlib.suppress(OSError):
                        os.killpg(process.pid, number)
            while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
                time.sleep(0.02)

    def requeue(self, status: int) -> None:
        """Put the job back into the queue, if the warning has stopped a command that can continue.

        Args:
            status: the command's exit status.
        """
        if not self.asked_to_stop or not self.spec["requeue"]:
            return
        if self.spec["requeue"] == "checkpoint":
            run = self.recorded_run()
            if run is None or not has_stopped(Path(run)):
                return
            (self.folder / RESUME).write_text(run)  # also needed if Slurm itself requeues the job
        elif status != 0:
            log(f"the command has ended with status {status}, so the job does not go back into the queue")
            return
        if not self.ended:
            log("back into the queue, to continue")
            with contextlib.suppress(subprocess.TimeoutExpired):  # Slurm may still have requeued the job
                subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False, timeout=REQUEUE_S)

    def main(self) -> int:
        """Run the whole job. Return its exit status."""
        status = 1
        try:
            if self.spec["controller"]:
                self.start_controller()
            if self.spec["on_warning"] == "signal":
                (self.folder / STOP).write_text("")
            status = self.watch(self.start(self.command()))
            return status
        finally:
            self.close()
            self.requeue(status)


def has_stopped(run: Path) -> bool:
    """Return True if a run was stopped before its end, and has a checkpoint."""
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((run / "run.json").read_text())["status"]
        return bool(status == "stopped" and list(run.glob("checkpoint-*.pt")))
    return False


def for_steps(environment: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """Return the variables that a step of this job needs.

    A step gets all GPUs of its nodes; by default, Slurm would give it only those of the first task. It also gets the
    number of CPUs per rank, which srun does not inherit from sbatch.

    Args:
        environment: the job's environment.
        command: the command that starts the ranks.
    """
    cpus, gpus = environment.get("SLURM_CPUS_PER_TASK"), environment.get("SLURM_GPUS_ON_NODE")
    variables = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or cpus or "1"}
    if gpus and "SLURM_GPUS_PER_TASK" in environment:
        variables["SLURM_GPUS_PER_NODE"] = gpus
    if cpus and "srun" in command:
        variables["SRUN_CPUS_PER_TASK"] = cpus
    return variables


def rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT: this node, on which rank 0 runs too, and a free port of it.

    The job's number says which port is tried first. So jobs on one node get different ports, although the ranks listen
    only some seconds later.
    """
    job = int(environment.get("SLURM_JOB_ID") or os.getpid())
    for port in (FIRST_PORT + (job + offset) % NUM_PORTS for offset in range(NUM_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            node = environment.get("SLURMD_NODENAME") or os.uname().nodename
            return {"MASTER_ADDR": node, "MASTER_PORT": str(port)}
    sys.exit(f"no port from {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} is free on this node")


def log(message: str) -> None:
    """Print a line of the job's output."""
    number = next((os.environ[name] for name in JOB_NUMBERS if name in os.environ), "?")
    print(f"[job {number}] {message}", flush=True)


if __name__ == "__main__":
    sys.exit(Job(Path(sys.argv[1])).main())
