"""`workbench record`: runs a command, and records the training loops of its processes."""

from __future__ import annotations

import argparse
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.analysis import Table
    from workbench.trace import Run

EXAMPLES = """
The script is not changed. Each Python process of the command is recorded from its first backward pass to its end, if its
optimizer takes a step. Ranks of one process group are one run.

  workbench record -- torchrun --nproc-per-node 2 mine.py
  workbench record --name baseline --steps 200 -- mpiexec -n 2 python mine.py
  workbench record -- workbench emulate --hosts 2 --rate 1gbit --each -- python mine.py

On several hosts, the launcher must pass PYTHONPATH, WORKBENCH_RUNS and WORKBENCH_RECORD to the ranks, such as
`mpiexec -x PYTHONPATH -x WORKBENCH_RUNS -x WORKBENCH_RECORD`. Clocks of several hosts are compared once, at the beginning.
"""


def add_record_options(record: argparse.ArgumentParser) -> None:
    """Add the options of `workbench record`, and set its function."""
    record.epilog = EXAMPLES
    record.add_argument("--name", help="a name for the run, in tables and legends")
    record.add_argument("--steps", type=int, help="how many steps to record; all by default")
    record.add_argument("argv", nargs="*", metavar="COMMAND", help="command to run, after --")
    record.set_defaults(command=_record)


def _record(options: argparse.Namespace) -> int:
    from workbench.runtimes.user_loop.record_command import environment

    if not options.argv:
        raise ConfigError("give a command after --: workbench record -- torchrun --nproc-per-node 2 mine.py")
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps}: give the number of steps to record, 1 or more")
    with tempfile.TemporaryDirectory(prefix="workbench-record-") as folder:
        names_file = Path(folder) / "runs"
        status = _run(options.argv, environment(names_file, options.name, options.steps))
        names = names_file.read_text().splitlines() if names_file.exists() else []
    runs = [run for name in names if name and (run := _ended(Path(name), status)) is not None]
    if not runs and (any(names) or not names):  # otherwise the command was other ranks than 0, which reports
        print("workbench record: nothing was recorded: no Python process of the command stepped a torch optimizer")
    for run in runs:
        print(f"\n{_report(run)}")
    return status


def _run(argv: list[str], environment: dict[str, str]) -> int:
    """Run the command and return its exit status. SIGINT and SIGTERM end the command first."""
    try:
        process = subprocess.Popen(argv, env=environment)
    except OSError as error:
        raise ConfigError(f"{argv[0]} cannot be started ({error.strerror}): check the command after --") from error
    before = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        while True:
            with suppress(KeyboardInterrupt):  # a terminal sends it to the command too
                status = process.wait()
                return status if status >= 0 else 128 - status
    finally:
        signal.signal(signal.SIGTERM, before)


def _ended(folder: Path, status: int) -> Run | None:
    """Return the run with its state at the end; None if its ranks have removed it, because it has no step."""
    from workbench.trace import Run, update_run
    from workbench.trace.info import read_info

    if not (folder / "run.json").exists():
        return None
    if read_info(folder).get("status") == "running":  # rank 0 was killed, or has left without its last functions
        if status:
            update_run(folder, status="failed", error=f"the command ended with status {status}")
        else:
            update_run(folder, status="finished")
    return Run.load(folder)


def _report(run: Run) -> str:
    """Return the run's row, and what a step is made of."""
    from workbench.analysis import compare
    from workbench.analysis.table import percent

    lines = [str(compare([run])), "", str(_step_table(run))]
    means = _steady(run).per_step()
    if means.get("communication_s"):
        exposed, hidden = means["exposed_s"] / means["window_s"], means["hidden_s"] / means["communication_s"]
        lines.append(
            f"\nExposed communication is {percent(exposed)} of a step. {percent(hidden)} of the communication is "
            "hidden."
        )
    lines.append(f'\n{run.folder}\nTimeline, in Python: workbench.open_run("{run.id}").timeline()')
    return "\n".join(lines)


def _steady(run: Run) -> Any:
    from workbench.analysis.summary import steady_overlap

    return steady_overlap(run)


def _step_table(run: Run) -> Table:
    """Return the mean seconds of each kind of span on the loop's thread, for each step and rank."""
    from workbench.analysis.table import Column, Table, percent, seconds

    found = _steady(run)
    if not found.num_steps:
        return Table([], (), caption="No step is complete")
    chosen = run.spans.select(steps=slice(int(found.step.min()), int(found.step.max()) + 1))
    on_thread = chosen.table["lane"] == (chosen.lanes.index("compute") if "compute" in chosen.lanes else -1)
    kinds, lengths_s = chosen.kind_names[on_thread], (chosen.table["end_s"] - chosen.table["start_s"])[on_thread]
    step_s = found.per_step()["window_s"]
    parts = {str(kind): float(lengths_s[kinds == kind].sum()) / found.num_steps for kind in dict.fromkeys(kinds)}
    parts.pop("evaluate", None)  # it belongs to no step
    parts["other"] = max(step_s - sum(parts.values()), 0.0)
    rows = [{"what": kind, "a_step": part_s, "share": part_s / step_s} for kind, part_s in parts.items()]
    columns = (Column("what", "a step"), Column("a_step", "time", seconds), Column("share", "share", percent))
    steps = f"{int(found.step.min())} to {int(found.step.max())}"
    return Table(rows, columns, caption=f"The loop's thread, mean over ranks and steps {steps}")
