"""What a Slurm job runs, on its first node: it starts the ranks, and ends with them.

    batch_job.py JOB.json

It hands the warning before the time limit on to the training, as a word that lets it end with a checkpoint; ends the ranks
when the cluster's folder is gone, for then nobody is there who could speak to them; and puts the job back into the queue
where that was asked for. It imports nothing of the package, to be small and quick to start.

JOB.json: {"command": what starts the ranks, "environment": added to the job's, "folder": the cluster's, with its record,
"controller": the controller's command where it lives in the job, "connection": the file that it writes,
"on_warning": "word" (into the control file of the run that the record names) or "interrupt" (of the command), "requeue": bool}
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

POLL_S = 0.25
GRACE_S = 5.0
REQUEUE_S = 60.0  # how long Slurm may take to say that it does
MISSED = 12  # looks at a shared folder that may fail one after the other before it counts as gone
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
        self.warned = self.told = self.ended = False
        self.run: Path | None = None  # that a command line said it made
        self.stopped: str | None = None  # a cluster's, that was asked to stop
        for sign, act in ((signal.SIGUSR1, self._warn), (signal.SIGTERM, self._end), (signal.SIGINT, self._end)):
            signal.signal(sign, act)

    def _warn(self, *_: object) -> None:
        self.warned = True

    def _end(self, *_: object) -> None:
        self.ended = True

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """A process that gets our end by us, and no signal of its own."""
        process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, start_new_session=True, text=True, **options)
        self.processes.append(process)
        return process

    def start_controller(self) -> None:
        """The controller, and wait until it listens."""
        say(f"controller on {os.uname().nodename}")
        controller = self.start(self.spec["controller"])
        deadline = time.monotonic() + CONTROLLER_S
        while not os.path.exists(self.spec["connection"]) and not self.ended:
            if controller.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the controller did not start (exit status {controller.poll()})")
            time.sleep(POLL_S)

    def command(self) -> list[str]:
        """What starts the ranks; a run that was stopped goes on."""
        left = self.folder / RESUME
        return [*self.spec["command"], *(["--resume", left.read_text().strip()] if left.exists() else [])]

    def listen(self, ranks: subprocess.Popen[str]) -> None:
        """Hand on what a command line says, and mark which run it made."""
        assert ranks.stdout is not None
        for line in ranks.stdout:
            print(line, end="", flush=True)
            if found := RUN.match(line):
                self.run = Path(found[1].strip()).resolve()

    def tell(self, ranks: subprocess.Popen[str]) -> None:
        """What the warning means to the training, and to one that begins after it: a cluster's is found by its record."""
        if not self.told:
            self.told = True
            say("the time limit is near: the training is asked to stop, with a checkpoint")
            if self.spec["on_warning"] == "interrupt":
                ranks.send_signal(signal.SIGINT)
        if self.spec["on_warning"] == "word":
            with contextlib.suppress(OSError, ValueError):  # nothing was trained yet
                run = json.loads((self.folder / RECORD).read_text()).get("run")
                if run and run != self.stopped:
                    with open(Path(run) / "control.jsonl", "a") as control:
                        control.write(json.dumps({"stop": True}) + "\n")
                    self.stopped = run

    def watch(self, ranks: subprocess.Popen[str]) -> int:
        """Until the ranks have ended, or must; their exit status."""
        missed = 0
        while ranks.poll() is None and not self.ended:  # Slurm has told the end to all processes of the job
            if self.warned:
                self.tell(ranks)
            missed = 0 if self.path.exists() else missed + 1
            if missed == MISSED:
                say("the cluster's folder is gone, and its notebook with it: the ranks end")
                break
            if any(process.poll() is not None for process in self.processes):
                break  # a controller
            time.sleep(POLL_S)
        return ranks.wait(GRACE_S) if ranks.poll() is not None else 1

    def close(self) -> None:
        """End what runs."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + GRACE_S
            for process in self.processes:
                if process.poll() is None:
                    with contextlib.suppress(OSError):
                        os.killpg(process.pid, sign)
            while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
                time.sleep(0.02)

    def requeue(self) -> None:
        """Back into the queue, if a training was stopped by the warning and left a checkpoint."""
        if not (self.told and self.run and list(self.run.glob("checkpoint-*.pt"))):
            return
        (self.folder / RESUME).write_text(str(self.run))  # also for a job that Slurm itself puts back
        if self.spec["requeue"] and not self.ended:
            say(f"back into the queue, to go on with {self.run.name}")
            with contextlib.suppress(subprocess.TimeoutExpired):  # Slurm may have taken it all the same
                subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False, timeout=REQUEUE_S)

    def main(self) -> int:
        """The whole job."""
        try:
            if self.spec["controller"]:
                self.start_controller()
            listens = self.spec["on_warning"] == "interrupt"
            ranks = self.start(self.command(), **({"stdout": subprocess.PIPE} if listens else {}))
            thread = threading.Thread(target=self.listen, args=(ranks,), daemon=True)
            if listens:
                thread.start()
            code = self.watch(ranks)
            if listens:
                thread.join(GRACE_S)
            return code
        finally:
            self.close()
            self.requeue()


def for_steps(environment: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """What a step of this job must be told: that it has all GPUs of its nodes, where the first task's alone would be the rule for what

    starts their ranks; and how many CPUs a rank has, which srun does not take over from sbatch.
    """
    cpus, gpus = environment.get("SLURM_CPUS_PER_TASK"), environment.get("SLURM_GPUS_ON_NODE")
    told = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or cpus or "1"}
    if gpus and "SLURM_GPUS_PER_TASK" in environment:
        told["SLURM_GPUS_PER_NODE"] = gpus
    if cpus and "srun" in command:
        told["SRUN_CPUS_PER_TASK"] = cpus
    return told


def say(words: str) -> None:
    """A line of the job's output."""
    print(f"[job {os.environ.get('SLURM_JOB_ID', '?')}] {words}", flush=True)


if __name__ == "__main__":
    sys.exit(Job(Path(sys.argv[1])).main())
