"""The program of a batch job, on its first node: it starts the ranks and ends with them.

    batch_job.py JOB.json

At Slurm's warning before the time limit, it asks the training to stop with a checkpoint. It ends the ranks when the
cluster's folder is removed, because then no process controls them. On request, it puts the job back into the queue.
It imports nothing of the package, so it is small and starts quickly.

JOB.json:
    command: starts the ranks.
    environment: variables to add to the job's environment.
    folder: the cluster's folder, with its record.
    controller: command of a controller that runs in the job, or null.
    warn_after_s: seconds after which the job warns itself, if its scheduler does not; null or missing for never.
    connection: file that the controller writes, or null.
    on_warning: "command": write a command into the control file of the run that the record names.
        "interrupt": interrupt the process that starts the ranks.
    requeue: whether the job goes back into the queue.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

JOB_NUMBERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")  # the last is SGE's
POLL_S = 0.25
GRACE_S = 5.0
REQUEUE_S = 60.0  # limit for `scontrol requeue`
MISSED = 12  # consecutive failed checks of a shared folder before it counts as removed
CONTROLLER_S = 60.0
RECORD, RESUME = "cluster.json", "resume"
RUN = re.compile(r"run: +(.+)")


class Job:
    """The processes of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec: dict[str, Any] = json.loads(path.read_text())
        self.folder = Path(self.spec["folder"])
        self.env = {**os.environ, **for_steps(os.environ, self.spec["command"]), **self.spec["environment"]}
        self.processes: list[subprocess.Popen[str]] = []
        self.warned = False  # Slurm has sent its warning
        self.asked_to_stop = False  # the training was asked to stop
        self.ended = False  # Slurm ends the job
        self.run: Path | None = None  # the run that the command line printed
        self.stopped: str | None = None  # the cluster's run that was asked to stop
        for number, handler in ((signal.SIGUSR1, self._warn), (signal.SIGTERM, self._end), (signal.SIGINT, self._end)):
            signal.signal(number, handler)
        signal.signal(signal.SIGUSR2, self._end)  # SGE's, before its SIGKILL
        signal.signal(signal.SIGALRM, self._warn)
        signal.setitimer(signal.ITIMER_REAL, self.spec.get("warn_after_s") or 0)

    def _warn(self, *_: object) -> None:
        self.warned = True

    def _end(self, *_: object) -> None:
        self.ended = True

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process in its own session: signals to the job do not reach it, and `close` ends it."""
        process = subprocess.Popen(
            command, env=self.env, stdin=subprocess.DEVNULL, start_new_session=True, text=True, **options
        )
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

    def forward_output(self, ranks: subprocess.Popen[str]) -> None:
        """Print the command's output, and remember the run that it names."""
        assert ranks.stdout is not None
        for line in ranks.stdout:
            print(line, end="", flush=True)
            if found := RUN.match(line):
                self.run = Path(found[1].strip()).resolve()

    def ask_to_stop(self, ranks: subprocess.Popen[str]) -> None:
        """Ask the training to stop, or one that begins later. A cluster's record names its training."""
        if not self.asked_to_stop:
            self.asked_to_stop = True
            log("the time limit is near: the training is asked to stop, with a checkpoint")
            if self.spec["on_warning"] == "interrupt":
                ranks.send_signal(signal.SIGINT)
        if self.spec["on_warning"] == "command":
            with contextlib.suppress(OSError, ValueError):  # there was no training yet
                run = json.loads((self.folder / RECORD).read_text()).get("run")
                if run and run != self.stopped:
                    with open(Path(run) / "control.jsonl", "a") as control:
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
        return ranks.wait(GRACE_S) if ranks.poll() is not None else 1

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

    def requeue(self) -> None:
        """Put the job back into the queue, if the warning stopped a training that has a checkpoint."""
        if not (self.asked_to_stop and self.run and list(self.run.glob("checkpoint-*.pt"))):
            return
        (self.folder / RESUME).write_text(str(self.run))  # also needed if Slurm itself requeues the job
        if self.spec["requeue"] and not self.ended:
            log(f"back into the queue, to continue with {self.run.name}")
            with contextlib.suppress(subprocess.TimeoutExpired):  # Slurm may still have requeued the job
                subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False, timeout=REQUEUE_S)

    def main(self) -> int:
        """Run the whole job. Return its exit status."""
        try:
            if self.spec["controller"]:
                self.start_controller()
            forwards = self.spec["on_warning"] == "interrupt"
            ranks = self.start(self.command(), **({"stdout": subprocess.PIPE} if forwards else {}))
            thread = threading.Thread(target=self.forward_output, args=(ranks,), daemon=True)
            if forwards:
                thread.start()
            code = self.watch(ranks)
            if forwards:
                thread.join(GRACE_S)
            return code
        finally:
            self.close()
            self.requeue()


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


def log(message: str) -> None:
    """Print a line of the job's output."""
    number = next((os.environ[name] for name in JOB_NUMBERS if name in os.environ), "?")
    print(f"[job {number}] {message}", flush=True)


if __name__ == "__main__":
    sys.exit(Job(Path(sys.argv[1])).main())
