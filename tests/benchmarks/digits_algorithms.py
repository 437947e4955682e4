"""Every algorithm on the digits: its margin in loss to the synchronous one over paired seeds, and the runtimes that it
ran on.

    python -m tests.benchmarks.digits_algorithms margins [WORD ...]   # simulated cluster, 10 seeds; writes records/digits-margins.json
    python -m tests.benchmarks.digits_algorithms table [WORD ...]   # and on gloo and MPI ranks; writes records/digits-algorithms.json

With words, only the algorithms whose names contain one of them are run, and the rows of the others stay as recorded.
The margins are those of margins.json, which was committed before. A difference is of two runs of one seed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from scipy.stats import t as student

import workbench as wb
from workbench import algorithms, codecs, collectives, costs
from workbench.algorithms import StaleSGD
from workbench.algorithms.staleness import Constant
from workbench.optimizers import LAMB, LARS, large_batch
from workbench.program import Algorithm, settings_of

HERE = Path(__file__).parent
RECORDS = HERE.parents[1] / "records"
PLAN = json.loads((HERE / "margins.json").read_text())
HOW, MARGINS = PLAN["how"], PLAN["margins"]
SAME, STALE, DROPPED, ASYNC, SELDOM, HALF, BYTE, FEW, INJECTED, NONE, SIGNS, SOME, ADAPTIVE, TERNARY, LAYERS = (
    MARGINS  # in the file's order
)


@dataclass(frozen=True)
class LargeBatch:
    """An optimizer for large batches, and the arguments of `large_batch` with the powers of its paper."""

    name: str
    optimizer: Callable[..., Any]
    lr: float  # chosen as margins.json says
    exponent: float
    power: float
    times: int = PLAN["large_batch"]["times"]

    def settings(self, num_samples: int) -> dict[str, Any]:
        """What differs from the small batch."""
        batch_size = HOW["batch_size"] * self.times
        num_updates = HOW["epochs"] * ceil(num_samples / (batch_size * HOW["workers"]))
        lr, schedule = large_batch(
            self.lr,
            self.times,
            num_updates,
            warmup_updates=num_updates // 10,
            exponent=self.exponent,
            power=self.power,
        )
        return {"batch_size": batch_size, "optimizer": self.optimizer, "lr": lr, "schedule": schedule}


@dataclass(frozen=True)
class Entry:
    """An algorithm in a setting: the margin that it must keep, and the divisor of its learning rate (p for one gradient an update)."""

    algorithm: Algorithm
    margin: str
    divide_lr: int = 1
    workers: int = HOW["workers"]
    large: LargeBatch | None = None

    @property
    def name(self) -> str:
        shown = {
            key: value
            for key, value in settings_of(self.algorithm).items()
            if value != type(self.algorithm).__dataclass_fields__[key].default
        }
        name = f"{type(self.algorithm).__name__}({', '.join(f'{key}={value}' for key, value in shown.items())})"
        return f"{name}, {self.large.name}, {self.large.times} times the batch" if self.large else name


def once(codec: Any, feedback: bool = False) -> collectives.Collective:
    return collectives.Once(codec=codecs.ErrorFeedback(codec=codec) if feedback else codec)


def entries() -> list[Entry]:
    a, c, p = algorithms, collectives, HOW["workers"]
    return [
        Entry(a.SynchronousSGD(), SAME),
        Entry(a.LayerwiseSGD(bucket_bytes=0), SAME),
        Entry(a.LayerwiseSGD(bucket_bytes=16384, lanes=2, apply=a.ApplyOrder.ANY), SAME),
        Entry(a.LayerwiseSGD(bucket_bytes=0, order=a.SendOrder.PRIORITY, collective=c.Ring()), SAME),
        Entry(a.DeAR(bucket_bytes=16384), SAME),
        Entry(a.SynchronousSGD(collective=c.Ring(chunks=4)), SAME),
        Entry(a.SynchronousSGD(collective=c.Tree()), SAME),
        Entry(a.SynchronousSGD(collective=c.HalvingDoubling()), SAME),
        Entry(a.SynchronousSGD(collective=c.Hierarchical(group=2)), SAME),
        Entry(a.SynchronousSGD(collective=c.Auto()), SAME),
        Entry(a.PipeSGD(), STALE),
        Entry(a.PipeSGD(width=3, warmup_steps=12, first=a.FirstSteps.DUPLICATE), STALE),
        Entry(a.AdaptiveDelaySGD(max_delay=2), STALE),
        Entry(a.PartialAllReduce(), DROPPED),
        Entry(a.ParameterServerSGD(), SAME),
        Entry(a.ParameterServerSGD(shards=2, dedicated=True), SAME, workers=p + 2),
        Entry(a.BackupSGD(backups=1), DROPPED),
        Entry(a.BackupSGD(backups=0, timeout_s=0.001), DROPPED),
        Entry(a.OnlineBackupSGD(), DROPPED),
        Entry(a.AsyncSGD(), ASYNC, p),
        Entry(a.AsyncSGD(shards=3), ASYNC, p),
        Entry(a.AsyncSGD(clip_norm=1.0), ASYNC, p),
        Entry(a.AsyncSGD(cutoff=4), ASYNC, p),
        Entry(a.StaleSynchronousSGD(), ASYNC, p),
        Entry(a.SoftsyncSGD(), DROPPED),
        Entry(a.SoftsyncSGD(splits=2), ASYNC, 2),
        Entry(a.DelayCompensatedSGD(), ASYNC, p),
        Entry(a.LocalSGD(every=4), SELDOM),
        Entry(a.LocalSGD(every=4, after=24), SELDOM),
        Entry(a.DiLoCo(every=12), SELDOM),
        Entry(a.StreamingDiLoCo(every=12, fragments=3, delay=2, mix=0.5), SELDOM),
        Entry(a.EagerDiLoCo(every=12), SELDOM),
        Entry(a.EagerDiLoCo(every=12, outer_lr=0.5, outer_momentum=0.3), SELDOM),
        Entry(a.SlowMo(every=4), SELDOM),
        Entry(a.SlowMo(every=4, inner=a.DPSGD()), SELDOM),
        Entry(a.BMUF(every=4), SELDOM),
        Entry(a.FedAvg(every=4), SOME),
        Entry(a.FedProx(every=4), SOME),
        Entry(a.SPARTA(), SELDOM),
        Entry(a.SignSGD(), SIGNS, 100),
        Entry(a.DeMo(), SIGNS, 100),
        Entry(a.DeMo(sign=False), FEW),
        Entry(a.AdasumSGD(), ADAPTIVE),
        Entry(a.DPSGD(), SELDOM),
        Entry(a.DPSGD(overlap=False), SELDOM),
        Entry(a.GradientTracking(), SELDOM),
        Entry(a.StochasticGradientPush(), SELDOM),
        Entry(a.ChocoSGD(), SELDOM),
        Entry(a.ADPSGD(), SELDOM),
        Entry(a.NoLoCo(every=12), SELDOM),
        Entry(StaleSGD(staleness=Constant(4)), INJECTED),
        Entry(a.SynchronousSGD(collective=c.Ring(codec=codecs.Truncate16())), HALF),
        Entry(a.SynchronousSGD(collective=c.Ring(codec=codecs.Truncate16(rounding="nearest"))), HALF),
        Entry(a.SynchronousSGD(collective=c.Ring(codec=codecs.Float16())), HALF),
        Entry(a.PipeSGD(collective=c.Ring(codec=codecs.Truncate16())), STALE),
        Entry(a.SynchronousSGD(collective=c.Ring(codec=codecs.Linear8())), BYTE),
        Entry(a.PipeSGD(collective=c.Ring(codec=codecs.Linear8())), STALE),
        Entry(a.SynchronousSGD(collective=c.Ring(codec=codecs.Linear8(rounding="stochastic"))), BYTE),
        Entry(a.SynchronousSGD(collective=once(codecs.Linear8())), BYTE),
        Entry(a.SynchronousSGD(collective=once(codecs.SharedInt8())), BYTE),
        Entry(a.SynchronousSGD(collective=once(codecs.QSGD())), BYTE),
        Entry(a.SynchronousSGD(collective=once(codecs.NaturalCompression())), BYTE),
        Entry(a.SynchronousSGD(collective=once(codecs.TernGrad())), TERNARY),
        Entry(a.SynchronousSGD(collective=once(codecs.TopK(fraction=0.1), True)), FEW),
        Entry(a.SynchronousSGD(collective=once(codecs.RandomK(fraction=0.1), True)), FEW),
        Entry(a.SynchronousSGD(collective=once(codecs.Sign(), True)), FEW),
        Entry(a.SynchronousSGD(collective=c.PowerSGD(rank=4)), FEW),
        Entry(a.SynchronousSGD(collective=c.PowerSGD(rank=4, alternate=True)), FEW),
        Entry(a.SynchronousSGD(), LAYERS, large=LargeBatch("LARS", partial(LARS, momentum=0.9), 5.0, 1.0, 2.0)),
        Entry(a.SynchronousSGD(), LAYERS, large=LargeBatch("LAMB", LAMB, 0.02, 0.5, 1.0)),
        Entry(a.NoCommunication(), NONE),
        Entry(a.SerialSGD(), SAME, workers=1),
    ]


def settings(entry: Entry, seed: int) -> dict[str, Any]:
    """How an entry is trained, equal on every runtime; the serial reference takes the whole batch."""
    batch = HOW["batch_size"] * (HOW["workers"] if entry.workers == 1 else 1)
    plain = {"epochs": HOW["epochs"], "evaluate_every": 0, "trace_steps": 0, "timeout_s": 60.0}
    how = {**plain, "batch_size": batch, "lr": 0.1 / entry.divide_lr, "seed": seed}
    return how | entry.large.settings(wb.problems.digits_mlp().num_samples()) if entry.large else how


def simulate(entry: Entry, seed: int) -> dict[str, Any]:
    compute = costs.Compute(
        forward_s=0.4e-3, backward_s=0.8e-3, update_s=0.1e-3, stragglers=(costs.Lognormal(sigma=HOW["jitter"]),)
    )
    where: dict[str, Any] = {"workers": entry.workers, "network": costs.ethernet_1g, "compute": compute}
    return outcome(wb.simulate(entry.algorithm, wb.problems.digits_mlp(), **where, **settings(entry, seed)))


def outcome(run: Any) -> dict[str, Any]:
    """What the table says of a run."""
    last = run.evaluations()[-1]
    stale = [value for row in run.updates() for value in row["staleness"]]
    stale += [row["staleness"] for rows in run.metrics.values() for row in rows if row.get("staleness") is not None]
    num_steps = max(len([row for row in rows if "evaluation" not in row]) for rows in run.metrics.values())
    sent = sum(
        max((row["bytes_sent"] for row in rows if "evaluation" not in row), default=0) for rows in run.metrics.values()
    )
    dropped = sum(bool(row.get("dropped")) for rows in run.metrics.values() for row in rows)
    return {
        "loss": last["test_loss"],
        "accuracy": last["accuracy"],
        "staleness_mean": statistics.fmean(stale) if stale else 0.0,
        "staleness_max": max(stale, default=0),
        "dropped": dropped,
        "bytes_per_step": sent / num_steps / len(run.metrics),
    }


def verdict(differences: list[float], margin: float) -> tuple[float, float, str]:
    """Mean, half width of its 95 % interval, and what that says of the margin."""
    mean = statistics.fmean(differences)
    half = float(student.ppf(0.975, len(differences) - 1)) * statistics.stdev(differences) / sqrt(len(differences))
    return mean, half, "met" if mean + half < margin else "not met" if mean - half > margin else "underpowered"


def is_chosen(name: str, words: tuple[str, ...]) -> bool:
    """Whether a name contains one of the words, if there are any."""
    return not words or any(word in name for word in words)


def others(record: str, words: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of a record that stay."""
    if not words:
        return []
    return [row for row in json.loads((RECORDS / record).read_text())["rows"] if not is_chosen(row["algorithm"], words)]


def margins(*words: str) -> None:
    """All algorithms, or those that the words choose."""
    seeds = range(HOW["seeds"])
    reference = [simulate(entries()[0], seed)["loss"] for seed in seeds]
    rows = others("digits-margins.json", words)
    for entry in entries():
        if not is_chosen(entry.name, words):
            continue
        runs = [simulate(entry, seed) for seed in seeds]
        differences = [run["loss"] - base for run, base in zip(runs, reference, strict=True)]
        mean, half, said = verdict(differences, MARGINS[entry.margin])
        means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        row = {
            "algorithm": entry.name,
            "margin": MARGINS[entry.margin],
            "difference": mean,
            "half_width": half,
            "verdict": said,
        }
        rows.append({**row, **means, "losses": [run["loss"] for run in runs]})
        print(
            f"{entry.name[:78]:78} {means['loss']:.4f} {100 * means['accuracy']:.2f}% {mean:+.4f} ± {half:.4f} < {row['margin']}: {said}",
            flush=True,
        )
    write("digits-margins.json", rows)


def table(*words: str) -> None:
    """Three seeds on each runtime."""
    from tests.distributed.pool import close_all
    from tests.laws.train import make_job, run_job, run_on_ranks
    from workbench.trace.run import Run

    rows = others("digits-algorithms.json", words)
    for entry in entries():
        if not is_chosen(entry.name, words):
            continue
        found: dict[str, Any] = {"simulated": [simulate(entry, seed) for seed in range(3)]}
        for runtime in ("torch", "mpi"):
            found[runtime] = []
            for seed in range(3):
                how = wb.Settings(**settings(entry, seed))
                job = make_job(runtime, entry.workers, entry.algorithm, wb.problems.digits_mlp(), how)
                run_on_ranks(run_job, job, entry.workers)
                found[runtime].append(outcome(Run.load(job.folder)))
        row = {
            "algorithm": entry.name,
            **{
                name: {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
                for name, runs in found.items()
            },
        }
        rows.append(row)
        shown = "  ".join(f"{name} {row[name]['loss']:.3f} {100 * row[name]['accuracy']:.1f}%" for name in found)
        last = row["mpi"]
        print(
            f"{entry.name[:70]:70} {shown}  stale {last['staleness_mean']:.2f} bytes {last['bytes_per_step']:.0f}",
            flush=True,
        )
        write("digits-algorithms.json", rows)
    close_all()


def write(name: str, rows: list[dict[str, Any]]) -> None:
    RECORDS.mkdir(exist_ok=True)
    versions = {"workbench": wb.__version__, "torch": __import__("torch").__version__}
    (RECORDS / name).write_text(json.dumps({"how": HOW, "versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    {"margins": margins, "table": table}[sys.argv[1]](*sys.argv[2:])
