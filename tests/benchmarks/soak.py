"""An hour of mixed trainings with a fault a minute; nothing may be lost, and memory must stay as it is.

    python -m tests.benchmarks.soak --minutes 60     # exit status 1 if something was lost, or left, or grew

Algorithms, runtimes and launchers take turns. A fault is a killed rank, a rank stopped for five seconds, an interrupt,
a full file system (a limit on file sizes), or a damaged file of a finished run. Each finished run is read at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import scipy.stats
import torch

import workbench as wb
from tests.distributed.leaks import Snapshot
from workbench.clusters.supervision.reaper import marked
from workbench.errors import WorkbenchError
from workbench.problems.base import Problem
from workbench.program import can_lose

NUM_RANKS = 2
ALGORITHMS: tuple[Any, ...] = (
    wb.SynchronousSGD(),
    wb.PipeSGD(width=2),
    wb.LayerwiseSGD(),
    wb.SynchronousSGD(collective=wb.collectives.Ring()),
    wb.LocalSGD(every=4),
    wb.AsyncSGD(),
)
STEPS = (40, 400)
TIMEOUT_S = 20.0  # longer than a rank is stopped
STOPPED_S = 5.0
FILE_BYTES = 4096  # more than the header of a trace, less than a run
SAMPLE_S = 2.0
NUM_BINS, WARM_UP = 20, 1 / 4  # of the samples of memory
FLAT_BYTES_PER_HOUR = 32e6  # the slope's interval must reach below this
JUDGED_MINUTES = (
    20.0  # a shorter soak tells slopes and judges none: what is imported at its first use would be most of them
)


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Takes 5 ms."""
    time.sleep(0.005)
    return torch.nn.functional.mse_loss(output, target)


def plane() -> Problem:
    """Least squares in three dimensions."""
    x = torch.linspace(-1, 1, 3 * 64).reshape(64, 3).sin()
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]])
    return Problem(
        model=lambda: torch.nn.Linear(3, 1), loss=slow_loss, train=(x, y), name="plane", batch_size=8, correct=None
    )


@dataclass
class Fault:
    """A fault, and its outcome."""

    kind: str
    launcher: str
    recovered: str = ""
    detect_s: float = float("nan")
    recover_s: float = float("nan")


@dataclass
class Soak:
    """The current trainings, and the results so far."""

    chance: random.Random
    end_s: float
    fault_every_s: float
    folder: Path
    clusters: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)  # run -> steps
    num_runs: int = 0
    faults: list[Fault] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Trainings by turns, until the time is over."""
        next_fault_s = time.monotonic() + self.fault_every_s / 2
        kinds: list[str] = []
        number = 0
        while time.monotonic() < self.end_s:
            launcher = list(self.clusters)[number % len(self.clusters)]
            algorithm = ALGORITHMS[number // len(self.clusters) % len(ALGORITHMS)]
            kind = ""
            if time.monotonic() >= next_fault_s:
                next_fault_s += self.fault_every_s
                kinds = kinds or self.chance.sample(list(FAULTS), len(FAULTS))
                kind = kinds.pop()
            try:
                self.one(launcher, algorithm, kind)
            except Exception as error:  # noqa: BLE001 - the next run continues, and the end reports it
                self.wrong.append(f"{launcher}, {algorithm}, {kind or 'no fault'}: {type(error).__name__}: {error}")
                self.mend(launcher)
            number += 1

    def mend(self, launcher: str) -> None:
        """Heal a cluster, or start another one in its place."""
        try:
            self.clusters[launcher].heal()
        except Exception as error:  # noqa: BLE001 - as above
            self.wrong.append(f"{launcher} did not heal: {type(error).__name__}: {error}")
            self.clusters[launcher].stop()
            self.clusters[launcher] = wb.Cluster(NUM_RANKS, launcher=launcher, quiet=True)

    def one(self, launcher: str, algorithm: Any, kind: str) -> None:
        """A training, with a fault or without."""
        cluster = self.clusters[launcher]
        self.num_runs += 1
        if kind:
            fault = Fault(kind, launcher)
            FAULTS[kind](self, cluster, algorithm, fault)
            self.faults.append(fault)
            print(
                f"{kind} ({launcher}, {algorithm}): {fault.recovered}, {fault.detect_s:.1f} s, {fault.recover_s:.1f} s",
                flush=True,
            )
            return
        self.book(train(cluster, algorithm, self.chance.randint(*STEPS)).wait(120))

    def book(self, run: Any) -> None:
        """A run that must be readable at the end."""
        if run.status != "finished":
            self.wrong.append(f"{run.id} is {run.status}, and nothing had happened to it")
        self.finished[run.id] = int(run.run.info["result"]["steps"])

    def proven(self, cluster: Any, fault: Fault, how: str, begin_s: float) -> None:
        """The ranks train again."""
        self.book(train(cluster, wb.SynchronousSGD(), 5).wait(60))
        fault.recovered, fault.recover_s = how, time.monotonic() - begin_s

    def lost(self) -> list[str]:
        """Finished runs that cannot be read completely."""
        found = []
        for name, steps in self.finished.items():
            try:
                run = wb.open_run(self.folder / "runs" / name)
                rows = [sum("evaluation" not in row for row in run.metrics[rank]) for rank in range(NUM_RANKS)]
                if run.info["status"] != "finished" or max(rows) != steps:
                    found.append(f"{name}: {run.info['status']}, {rows} rows of {steps} steps")
            except (WorkbenchError, KeyError) as error:
                found.append(f"{name}: {error}")
        return found


def train(cluster: Any, algorithm: Any, steps: int) -> Any:
    """A training on it."""
    return cluster.train(algorithm, plane(), steps=steps, lr=0.05, evaluate_every=0, timeout_s=TIMEOUT_S)


def begun(cluster: Any, algorithm: Any) -> Any:
    """A long training that has taken some steps."""
    run = train(cluster, algorithm, 100_000)
    until(lambda: sum(map(len, run.run.metrics.values())) > 4 or run.status == "failed", 60)
    return run


def until(condition: Callable[[], Any], limit_s: float) -> None:
    """Wait for it; TimeoutError if it does not come."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition.__name__} was not so after {limit_s:g} s")
        time.sleep(0.02)


def failed(run: Any, fault: Fault, limit_s: float = 60.0) -> None:
    """Wait for the error that must come."""
    begin = time.monotonic()
    try:
        run.wait(limit_s)
    except WorkbenchError:
        fault.detect_s = time.monotonic() - begin
        return
    raise AssertionError(f"{fault.kind} ended no run: {run}")


# ---------------------------------------------------------------- faults


def killed(soak: Soak, cluster: Any, algorithm: Any, fault: Fault) -> None:
    """A rank's process is gone. A run that continues without it is then stopped by a command."""
    run = begun(cluster, algorithm)
    victim = soak.chance.choice(cluster.ranks)
    psutil.Process(victim["pid"]).kill()
    if cluster.runtime == "torch" and can_lose(algorithm, victim["rank"], NUM_RANKS):
        begin = time.monotonic()
        until(lambda: any(row["state"] == "gone" for row in cluster.status()), 30)
        fault.detect_s, at = time.monotonic() - begin, len(run.run.metrics[0])
        until(lambda: len(run.run.metrics[0]) > at, 30)
        run.stop().wait(60)
    else:
        failed(run, fault)
    begin = time.monotonic()
    until(lambda: cluster.state == "lost", 30)
    soak.proven(cluster.heal(), fault, "healed", begin)


def stopped(soak: Soak, cluster: Any, algorithm: Any, fault: Fault) -> None:
    """A rank is stopped for five seconds, and continues."""
    run = begun(cluster, algorithm)
    rank = psutil.Process(soak.chance.choice(cluster.ranks)["pid"])
    rank.suspend()
    begin = time.monotonic()
    until(lambda: any(row["state"] != "training" or (row["beat_s"] or 0) > 2.5 for row in cluster.status()), 30)
    fault.detect_s = time.monotonic() - begin
    time.sleep(max(0.0, STOPPED_S - fault.detect_s))
    rank.resume()
    begin = time.monotonic()
    before = [len(rows) for rows in run.run.metrics.values()]
    until(lambda: all(len(rows) > old for rows, old in zip(run.run.metrics.values(), before, strict=True)), 30)
    fault.recovered, fault.recover_s = "went on", time.monotonic() - begin
    run.stop().wait(60)


def interrupted(soak: Soak, cluster: Any, algorithm: Any, fault: Fault) -> None:
    """Ranks are interrupted, one or all."""
    run = begun(cluster, algorithm)
    run.interrupt(soak.chance.choice([0, 1, None]))
    failed(run, fault)
    begin = time.monotonic()
    try:
        until(lambda: run.done, 10)
        soak.proven(cluster, fault, "trained again", begin)
    except (WorkbenchError, TimeoutError):
        soak.proven(cluster.heal(), fault, "healed", begin)


def full(soak: Soak, cluster: Any, algorithm: Any, fault: Fault) -> None:
    """A rank can write no more."""
    rank = soak.chance.randrange(NUM_RANKS)
    cluster.client[rank].apply_async(limit_files, FILE_BYTES).get(30)
    try:
        failed(train(cluster, algorithm, 2000), fault)
    finally:
        until(lambda: cluster.run.done, 30)
        cluster.client[rank].apply_async(limit_files, None).get(30)
    soak.proven(cluster, fault, "trained again", time.monotonic())


def limit_files(num_bytes: int | None) -> None:
    """On a rank, which is sent this text alone: how large a file may be."""
    import resource

    resource.setrlimit(
        resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if num_bytes is None else num_bytes, resource.RLIM_INFINITY)
    )


def damaged(soak: Soak, cluster: Any, algorithm: Any, fault: Fault) -> None:
    """A file of a finished run is cut, or has other bytes in it.

    The store still works: it names the file, or reads its complete lines.
    """
    run = train(cluster, algorithm, 60).wait(60)
    twin = run.folder.with_name(run.folder.name + "-damaged")
    shutil.copytree(run.folder, twin)
    files = sorted(path for path in twin.iterdir() if path.suffix in (".json", ".jsonl") and path.stat().st_size)
    path = soak.chance.choice(files)
    content = path.read_bytes()
    place = soak.chance.randrange(len(content))
    path.write_bytes(
        content[:place] if soak.chance.random() < 0.5 else content[:place] + b"\x00\xff{" + content[place + 3 :]
    )
    begin = time.monotonic()
    try:
        wb.open_run(twin).steps()
        fault.recovered = "read what is whole"
    except WorkbenchError:
        fault.recovered = "named"
    # In a process of its own: a table of all runs takes memory as they become more, and this process's is to stay as it
    # is.
    subprocess.run(
        [sys.executable, "-m", "workbench", "runs", "--json"], check=True, stdout=subprocess.DEVNULL, timeout=60
    )
    fault.detect_s = time.monotonic() - begin
    shutil.rmtree(twin)
    begin = time.monotonic()
    soak.book(run)
    fault.recover_s = time.monotonic() - begin


FAULTS: dict[str, Callable[[Soak, Any, Any, Fault], None]] = {
    "rank killed": killed,
    "rank stopped for 5 s": stopped,
    "interrupt": interrupted,
    "file system full": full,
    "damaged file": damaged,
}


# ---------------------------------------------------------------- memory


@dataclass
class Memory:
    """Bytes of the client and the controllers, looked at all the time."""

    clusters: dict[str, Any]
    # (what, process) -> seconds, bytes
    samples: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def follow(self) -> None:
        """Sample in a separate thread."""
        while not self.over.wait(SAMPLE_S):
            self.take("client", psutil.Process())
            for cluster in list(self.clusters.values()):
                for process in marked(cluster.mark):
                    try:
                        if "ipyparallel.controller" in " ".join(process.cmdline()):
                            self.take("controllers", process)
                    except psutil.Error:
                        continue

    def take(self, what: str, process: psutil.Process) -> None:
        """One sample."""
        self.samples.setdefault((what, process.pid), []).append((time.monotonic(), float(process.memory_info().rss)))

    def slope(self, what: str) -> tuple[float, float, float]:
        """Bytes an hour with a 95 % interval: within processes, of means over bins, each process's beginning left out."""
        times, sizes, num_processes = [], [], 0
        for (name, _), samples in self.samples.items():
            kept = np.array(samples[int(len(samples) * WARM_UP) :])
            if name == what and len(kept) >= 2 * NUM_BINS:
                bins = np.array([part.mean(axis=0) for part in np.array_split(kept, NUM_BINS)])
                times.append(bins[:, 0] - bins[:, 0].mean())
                sizes.append(bins[:, 1] - bins[:, 1].mean())
                num_processes += 1
        if not times:
            return float("nan"), float("nan"), float("nan")
        t, y = np.concatenate(times), np.concatenate(sizes)
        slope = float(t @ y / (t @ t))
        free = len(t) - num_processes - 1
        error = float(np.sqrt(((y - slope * t) ** 2).sum() / free / (t @ t))) * float(scipy.stats.t.ppf(0.975, free))
        return slope * 3600, (slope - error) * 3600, (slope + error) * 3600


# ---------------------------------------------------------------- the whole


def launchers() -> list[str]:
    """Facts about this machine."""
    found = ["local", "torch"]
    if os.geteuid() == 0 and shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin"):
        found.append("emulated:1gbit")
    return found


def report(soak: Soak, memory: Memory, left: list[str], minutes: float) -> bool:
    """Print the table. Return True if nothing was lost, left or grew."""
    print(
        f"\n{soak.num_runs} runs and {len(soak.faults)} faults in {minutes:.1f} minutes on {', '.join(soak.clusters)}"
    )
    print(f"{'fault':24}{'number':>7}  {'recovered':40}{'detected, s':>18}{'recovered, s':>18}")
    for kind in FAULTS:
        of_kind = [fault for fault in soak.faults if fault.kind == kind]
        if of_kind:
            ways = [fault.recovered for fault in of_kind]
            how = ", ".join(f"{way or 'NOT'} {ways.count(way)}" for way in dict.fromkeys(ways))
            print(
                f"{kind:24}{len(of_kind):7}  {how:40}{spread([f.detect_s for f in of_kind])}{spread([f.recover_s for f in of_kind])}"
            )
    lost = soak.lost()
    print(f"finished runs: {len(soak.finished)}, all read whole" if not lost else "LOST: " + "; ".join(lost))
    flat = True
    for what in ("client", "controllers"):
        slope, low, high = memory.slope(what)
        grows = low > FLAT_BYTES_PER_HOUR and minutes >= JUDGED_MINUTES
        flat = flat and not grows
        judged = "GROWS" if grows else "flat" if minutes >= JUDGED_MINUTES else "too short to be judged"
        print(f"memory of {what}: {slope / 1e6:+.1f} MB an hour ({low / 1e6:+.1f} to {high / 1e6:+.1f}), {judged}")
    print("left behind: " + ("; ".join(left) or "nothing"))
    for words in soak.wrong:
        print(f"WRONG: {words}")
    return not lost and flat and not left and not soak.wrong and all(fault.recovered for fault in soak.faults)


def spread(values: list[float]) -> str:
    """Median, and the largest."""
    return f"{f'{statistics.median(values):.1f} (max {max(values):.1f})':>18}"


def main(words: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--fault-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="wb-"))
    place = folder / "t"  # short: there will be sockets in it
    place.mkdir()
    os.environ |= {
        "WORKBENCH_RUNS": str(folder / "runs"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TMPDIR": str(place),
    }
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache" / "inductor")  # of torch's own
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tempfile.tempdir = str(place)
    before, took, marks = Snapshot.now(), 0.0, list[str]()
    soak = Soak(random.Random(options.seed), 0.0, options.fault_every, folder)
    memory = Memory(soak.clusters)
    try:
        for launcher in launchers():
            soak.clusters[launcher] = wb.Cluster(NUM_RANKS, launcher=launcher, quiet=True)
            marks.append(soak.clusters[launcher].mark)
            soak.book(train(soak.clusters[launcher], wb.SynchronousSGD(), 5).wait(60))
            soak.clusters[launcher].status()
        wb.runs_table()
        sampler = threading.Thread(target=memory.follow, daemon=True)
        sampler.start()
        begin = time.monotonic()
        soak.end_s = begin + 60 * options.minutes
        soak.run()
        took = time.monotonic() - begin
        memory.over.set()
        sampler.join(30)
    finally:
        for cluster in soak.clusters.values():
            cluster.stop()
    marks += [cluster.mark for cluster in soak.clusters.values()]
    left = before.left(place, more_files=64) + [
        f"process {process.pid}" for mark in set(marks) for process in marked(mark)
    ]
    well = report(soak, memory, left, took / 60)
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
