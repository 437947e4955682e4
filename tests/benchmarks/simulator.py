"""The simulator compared with SimPy, its closed forms, and simulated workers compared with a plain PyTorch loop: one
core.

Blocks of both sides alternate in an order that changes from round to round. A round's ratio is of two blocks that ran
within the same seconds. The table shows the median ratio with its 95 % bootstrap interval. Seconds are processor time,
so other programs on the machine cost neither side anything. Memory is measured in separate processes.

    python -m tests.benchmarks.simulator --rounds 11 --write      (--quick: small sizes, to see that it runs; nothing is written)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import simpy
import torch

import workbench
from tests.benchmarks import simpy_programs
from tests.benchmarks.simulator_cases import (
    COMPUTE,
    MESSAGE_BYTES,
    PEAKS,
    enough_data,
    one_program,
    plain_loop,
    seconds_of,
    simulation,
    train,
)
from workbench import problems
from workbench.algorithms import AsyncSGD, PipeSGD
from workbench.bench.rows import interval
from workbench.collectives import Ring
from workbench.costs import ethernet_10g
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import Detail
from workbench.runtimes.simulator.simulation import collecting_new_objects

RECORD = Path(__file__).parents[2] / "records" / "simulator.json"
Row = dict[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the measurements."""

    rounds: int
    ring_workers: int = 64
    ring_steps: int = 30  # a block
    ring_rounds: int = 7
    ring_steps_whole: int = 100
    server_workers: int = 256
    server_steps: int = 16
    formula_workers: int = 4096
    formula_steps: int = 1000
    gradient_workers: int = 100
    gradient_steps: tuple[int, int] = (20, 6)  # of the MLP and of the CNN
    memory_workers: tuple[int, ...] = (10, 100, 1000)


QUICK = Sizes(
    rounds=2,
    ring_workers=8,
    ring_rounds=2,
    ring_steps=4,
    ring_steps_whole=6,
    server_workers=8,
    server_steps=4,
    formula_workers=64,
    formula_steps=20,
    gradient_workers=4,
    gradient_steps=(2, 2),
    memory_workers=(2, 20),
)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds, and the answer. Garbage of earlier measurements is collected before."""
    gc.collect()
    begin = time.process_time()
    answer = work()
    return time.process_time() - begin, answer


def spread(values: Any) -> Row:
    """Median and the 95 % bootstrap interval of it."""
    found = np.asarray(values, dtype=float)
    low, high = interval(found)
    return {"median": float(np.median(found)), "low": low, "high": high, "rounds": len(found)}


def alternate(blocks: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[tuple[float, Any]]]:
    """(seconds, answer) of each block in each round, after a round to warm up."""
    names = list(blocks)
    found: dict[str, list[tuple[float, Any]]] = {name: [] for name in names}
    for number in range(-1, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            measured = timed(blocks[name])
            if number >= 0:
                found[name].append(measured)
    return found


# -- message by message ----------------------------------------------------------------------------------------


def ours(algorithm: Algorithm, workers: int, steps: int) -> simpy_programs.Counts:
    built = simulation(algorithm, workers, steps)
    with collecting_new_objects():  # as `simulate` runs it
        built.run()
    return simpy_programs.Counts(built.fabric.num_messages, built.clock.num_events, built.seconds)


def beside_simpy(case: str, blocks: dict[str, Callable[[], simpy_programs.Counts]], rounds: int) -> list[Row]:
    """Rates of ours and of SimPy's programs, and ratios in the same round."""
    found = alternate(blocks, rounds)
    rates = {name: np.array([counts.messages / seconds for seconds, counts in rows]) for name, rows in found.items()}
    rows = []
    for name, measured in found.items():
        counts = measured[0][1]
        row: Row = {
            "case": case,
            "what": name,
            "messages": counts.messages,
            "events": counts.events,
            "virtual_s": counts.seconds,
        }
        row["messages_per_s"] = spread(rates[name])
        row["events_per_s"] = spread([counts.events / seconds for seconds, counts in measured])
        if name != "ours":
            # Ours over this one
            row |= {
                "ratio": spread(rates["ours"] / rates[name]),
                "aim": {"ratio": "at least", "value": 1.0},
            }
        rows.append(row)
    return rows


def message_rows(sizes: Sizes) -> list[Row]:
    p, steps = sizes.ring_workers, sizes.ring_steps
    compute_s, block_s = seconds_of(p, steps), ethernet_10g.send_s(MESSAGE_BYTES / p)
    pipe = PipeSGD(width=2, collective=Ring())
    blocks: dict[str, Callable[[], simpy_programs.Counts]] = {
        "ours": lambda: ours(pipe, p, steps),
        "SimPy, bare": lambda: simpy_programs.ring(compute_s, block_s),
        "SimPy, interfaces": lambda: simpy_programs.ring(compute_s, block_s, interfaces=True),
    }
    rows = beside_simpy(f"Pipe-SGD, ring of {p}, {steps} steps", blocks, sizes.ring_rounds)
    workers, whole_s = sizes.server_workers, ethernet_10g.send_s(MESSAGE_BYTES + 8)
    server_s = seconds_of(workers, sizes.server_steps)
    algorithm = AsyncSGD(dedicated=True)
    blocks = {
        "ours": lambda: ours(algorithm, workers + 1, sizes.server_steps),
        "SimPy, bare": lambda: simpy_programs.server(server_s, whole_s, COMPUTE.update_s),
        "SimPy, interfaces": lambda: simpy_programs.server(server_s, whole_s, COMPUTE.update_s, interfaces=True),
    }
    rows += beside_simpy(f"async-sgd, {workers} workers, {sizes.server_steps} steps", blocks, sizes.rounds)
    return rows


def whole_rows(sizes: Sizes) -> list[Row]:
    """Every message of many steps."""
    p, steps, pipe = sizes.ring_workers, sizes.ring_steps_whole, PipeSGD(width=2, collective=Ring())
    found = [timed(lambda: ours(pipe, p, steps)) for _ in range(min(3, sizes.rounds))]
    counts = found[0][1]
    row: Row = {
        "case": f"Pipe-SGD, ring of {p}, {steps} steps",
        "what": "ours",
        "messages": counts.messages,
        "events": counts.events,
    }
    return [{**row, "seconds": spread([seconds for seconds, _ in found]), "aim": {"seconds": "at most", "value": 20.0}}]


# -- closed forms ----------------------------------------------------------------------------------------------


def formula_rows(sizes: Sizes, simpy_messages_per_s: float) -> list[Row]:
    """SimPy's worker-steps a second: its messages a second, divided by the 2 (p - 1) messages of a worker's step in a ring of p."""
    p, steps, rows = sizes.formula_workers, sizes.formula_steps, []
    theirs = simpy_messages_per_s / (2 * (p - 1))
    choices: tuple[tuple[Detail, Algorithm], ...] = (
        ("auto", PipeSGD(width=2)),
        ("formula", PipeSGD(width=2, collective=Ring())),
    )
    for detail, algorithm in choices:
        seconds = [timed(partial(one_program, algorithm, p, steps, detail))[0] for _ in range(min(3, sizes.rounds))]
        rate = np.array([p * steps / took for took in seconds])
        row = {
            "case": f"Pipe-SGD, {p} workers, {steps} steps, detail={detail}",
            "what": "ours",
            "seconds": spread(seconds),
        }
        row |= {
            "worker_steps_per_s": spread(rate),
            "ratio": spread(rate / theirs),
            "aim": {"seconds": "at most", "value": 10.0},
        }
        rows.append(row)
    return rows


# -- real gradients --------------------------------------------------------------------------------------------


def gradient_rows(sizes: Sizes) -> list[Row]:
    p, rows = sizes.gradient_workers, []
    for name, steps in zip(("digits-mlp", "digits-cnn"), sizes.gradient_steps, strict=True):
        problem = enough_data(problems.get(name), p)
        blocks = {"ours": partial(train, problem, p, steps), "plain loop": partial(plain_loop, problem, p, steps)}
        found = alternate(blocks, sizes.rounds)
        times = {what: np.array([seconds for seconds, _ in measured]) / steps for what, measured in found.items()}
        case = f"{name}, synchronous step of {p} workers, batch {problem.batch_size}"
        rows.append({"case": case, "what": "plain loop", "seconds": spread(times["plain loop"])})
        ratio = {"ratio": spread(times["ours"] / times["plain loop"]), "aim": {"ratio": "at most", "value": 1.2}}
        rows.append({"case": case, "what": "ours", "seconds": spread(times["ours"]), **ratio})
    return rows


# -- memory ----------------------------------------------------------------------------------------------------


def memory_rows(sizes: Sizes) -> list[Row]:
    rows = []
    for kind in PEAKS:
        found = {}
        # Of these each worker costs more
        most = 128 if "ring" in kind or "replica" in kind else max(sizes.memory_workers)
        for workers in dict.fromkeys(min(number, most) for number in sizes.memory_workers):
            command = [sys.executable, "-m", "tests.benchmarks.simulator_cases", kind, str(workers)]
            found[workers] = int(
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
            )
        first, last = min(found), max(found)
        slope = (found[last] - found[first]) / (last - first)
        rows.append({"case": f"memory: {kind}", "what": "ours", "peak_bytes": found, "bytes_per_worker": slope})
    return rows


# -- all of it -------------------------------------------------------------------------------------------------


def verdict(row: Row) -> str:
    """Return "met" if the whole interval meets the target, "not met" if none of it does, else "undecided"; "" without one."""
    if "aim" not in row:
        return ""
    (name, side), value = next(iter(row["aim"].items())), row["aim"]["value"]
    inside = [row[name][end] >= value if side == "at least" else row[name][end] <= value for end in ("low", "high")]
    said = "met" if all(inside) else "undecided" if any(inside) else "not met"
    return f"{side} {value:g}: {said}"


def show(row: Row) -> str:
    """One line of the table."""
    parts = [f"{row['case']:52} {row['what']:18}"]
    for name, unit, scale in (
        ("messages_per_s", "k messages/s", 1e-3),
        ("events_per_s", "k events/s", 1e-3),
        ("seconds", "s", 1.0),
    ):
        if name in row:
            parts.append(
                f"{row[name]['median'] * scale:9.4g} [{row[name]['low'] * scale:.4g}, {row[name]['high'] * scale:.4g}] {unit}"
            )
    if "ratio" in row:
        parts.append(f"ratio {row['ratio']['median']:.3g} [{row['ratio']['low']:.3g}, {row['ratio']['high']:.3g}]")
    if "peak_bytes" in row:
        peaks = ", ".join(f"{workers}: {peak / 1e6:.3g} MB" for workers, peak in row["peak_bytes"].items())
        parts.append(f"{peaks}; {row['bytes_per_worker']:.0f} bytes a worker")
    return "  ".join([*parts, verdict(row)])


def measure(sizes: Sizes) -> list[Row]:
    """Every row, printed as it comes."""
    torch.set_num_threads(1)
    rows: list[Row] = []

    def add(found: list[Row]) -> None:
        for row in found:
            rows.append({**row, "verdict": verdict(row)})
            print(show(row), flush=True)

    add(message_rows(sizes))
    add(whole_rows(sizes))
    bare = next(row for row in rows if row["what"] == "SimPy, bare")
    add(formula_rows(sizes, bare["messages_per_s"]["median"]))
    add(gradient_rows(sizes))
    add(memory_rows(sizes))
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick and options.write:
        parser.error("small sizes are no evidence: --write without --quick")
    rows = measure(QUICK if options.quick else Sizes(rounds=options.rounds))
    if options.write:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        versions = {
            "workbench": workbench.__version__,
            "torch": torch.__version__,
            "simpy": simpy.__version__,
            "numpy": np.__version__,
        }
        RECORD.write_text(json.dumps({"machine": machine, "versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
