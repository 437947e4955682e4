"""`workbench train`: one run on real or simulated ranks."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, RunNotFound
from workbench.logs import LOG, is_quiet
from workbench.run_spec import add_train_options, report, resolve, run_simulated

WAITS = "workbench: waiting "  # how a rank's report of a long wait begins (`Deadline`)
NEWEST_ROWS = 2  # that the progress line needs of each rank: the last one may be an evaluation
EXAMPLES = """
  workbench train pipe-sgd --problem digits-mlp --workers 2 --epochs 5 --width 2
  workbench train pipe-sgd --problem mine.py:problem --workers 4 --checkpoint-every 100
  workbench train backup-sgd --runtime simulated --workers 16 --stragglers lognormal:0.3 --steps 100
"""


def add_train_command(train: argparse.ArgumentParser) -> None:
    """Add the options of `workbench train`, and set its function."""
    train.epilog = EXAMPLES
    train.usage = "workbench train ALGORITHM [options]"
    add_train_options(train)
    train.set_defaults(command=_train)


def _train(options: argparse.Namespace) -> int:
    if "RANK" not in os.environ and options.runtime == "torch":
        _check_ranks_here(options)  # before the fork server starts
    fork_server = _fork_server(options)
    here, algorithm, problem, settings = resolve(options)
    if options.runtime == "simulated":
        return report(run_simulated(options, algorithm, problem, settings), options)

    from workbench.clusters.local.mpi_install import find_mpi
    from workbench.clusters.local.spawn import spawn_ranks
    from workbench.replica.local_training import run_info
    from workbench.runtimes.checkpoint.files import find_source
    from workbench.runtimes.control.job import record_run
    from workbench.runtimes.elastic.policy import check_shrinks, ranks_to_replace, tolerates_loss, why_all_end
    from workbench.trace.store import new_run, read_info, update_run

    resume = find_source(options.resume) if options.resume else None
    if here is not None:
        return _join(options, algorithm, problem, settings, resume)
    _check_ranks_here(options)
    algorithm.check(options.workers)
    check_shrinks(algorithm, settings.on_failure)
    replaced = (
        ranks_to_replace(algorithm, settings.on_failure, options.workers, options.runtime) if options.replace else []
    )
    problem.train_source()  # raises for a missing folder once, here, and not on every rank
    folder = new_run(run_info(algorithm, problem, settings, options.runtime, options.workers))
    record_run(folder)
    resolved = ["--resume", resume] if resume else []  # for ranks, `last` would be the new run
    arguments = [*options.given, *resolved]
    try:
        outlives = tolerates_loss(algorithm, settings.on_failure, options.workers)
        if outlives and settings.on_failure != "shrink" and options.runtime == "mpi" and not find_mpi().tolerates_loss:
            LOG.warning("%s", why_all_end(algorithm, str(find_mpi())))
            outlives = False
        how: dict[str, Any] = {"outlives": outlives, "fork_server": fork_server}
        with _progress(folder, options) as watch:
            spawn_ranks(options.runtime, options.workers, arguments, folder, watch, replaced, **how)
    except BaseException as error:
        if read_info(folder).get("status") == "starting":  # no rank has recorded the error
            update_run(folder, status="failed", error=f"{type(error).__name__}: {error}")
        _print_checkpoint(folder)
        raise
    return report(folder, options)


def _check_ranks_here(options: argparse.Namespace) -> None:
    """Check that this machine, or this job, can start this number of ranks, before anything is written."""
    from workbench.clusters.local.mpi_install import check_num_ranks

    check_num_ranks(options.workers, by_mpiexec=options.runtime == "mpi")


def _fork_server(options: argparse.Namespace) -> Any:
    """Return a fork server for ranks of torch, if this process starts any. It must be made before anything else."""
    if options.runtime != "torch" or options.workers < 1 or "RANK" in os.environ:
        return None
    from workbench.clusters.local.spawn import fork_server_for

    return fork_server_for(options.workers)


def _print_checkpoint(folder: Path) -> None:
    """Print how to continue a failed run, if it has a checkpoint."""
    from workbench.runtimes.checkpoint.files import complete_checkpoints

    for checkpoint in complete_checkpoints(folder)[:1]:
        LOG.warning(
            "there is a checkpoint, %s: the same command with --resume %s continues from it", checkpoint, folder.name
        )


def _join(options: argparse.Namespace, algorithm: Any, problem: Any, settings: Any, resume: str | None) -> int:
    """Run as one rank, started by `workbench train` or by the user's own torchrun or mpiexec."""
    from workbench.clusters.local.spawn import FOLDER_VARIABLE, PLACE_VARIABLE
    from workbench.clusters.supervision.sigterm import terminated_as_exit
    from workbench.replica.local_training import run_info
    from workbench.runtimes.control.job import record_run
    from workbench.runtimes.liveness.membership import num_spares
    from workbench.runtimes.rank.join import rejoin
    from workbench.runtimes.rank.main import Job, leave_world, make_transport, run_rank, world_here
    from workbench.runtimes.transport.base import Deadline
    from workbench.trace.store import new_run

    spawned = os.environ.get(FOLDER_VARIABLE)
    if options.replace and not spawned:
        raise ConfigError("--replace starts new processes, but here your launcher starts them: leave it out")
    how: dict[str, Any] = {
        "algorithm": algorithm,
        "problem": problem,
        "settings": settings,
        "runtime": options.runtime,
        "resume": resume,
    }
    if spawned and PLACE_VARIABLE in os.environ:
        rejoin(Job(**how, folder=spawned), int(os.environ["RANK"]))
        return 0
    if spawned and num_spares() and world_here()[0] >= world_here()[1]:
        from workbench.runtimes.rank.spare import stand_by

        stand_by(Job(**how, folder=spawned))
        return 0
    transport = make_transport(options.runtime, options.timeout, Path(spawned) if spawned else None)
    folder = spawned or ""
    if not spawned:
        if transport.rank == 0:
            folder = str(
                new_run(run_info(algorithm, problem, settings, options.runtime, transport.num_workers)).resolve()
            )
            record_run(Path(folder))
        folder = transport.gather_texts(
            folder, Deadline("rank 0 to open the run", transport.peer_failure, options.timeout)
        )[0]
    with nullcontext() if spawned else terminated_as_exit(partial(signal.signal, signal.SIGTERM, signal.SIG_IGN)):
        result = run_rank(
            Job(**how, folder=folder), transport
        )  # a batch system ends ranks by SIGTERM: recorded as such
    leave_world()
    if not spawned and result["rank"] == 0:
        return report(Path(folder), options)
    return 0


def _read_from(path: Path, offset: int) -> bytes:
    """Return what a file has after that many bytes, without an incomplete last line."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(offset)
        text = file.read()
        return text[: text.rfind(b"\n") + 1]
    return b""


@contextmanager
def _progress(folder: Path, options: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """Give a function that updates a progress line from the run's folder, and warns of ranks that left or wait long.

    The line begins with the first step.
    """
    from workbench.progress import progress_line
    from workbench.trace.follow import Follower
    from workbench.trace.info import format_departures
    from workbench.trace.store import read_info

    follower, shown, line = Follower(folder, most_rows=NEWEST_ROWS), not options.json and not is_quiet(), None
    departures, num_read = "", 0

    def show() -> None:
        nonlocal line, departures, num_read
        with suppress(RunNotFound):  # another process removed it
            before, departures = departures, format_departures(read_info(folder))
            if departures and departures != before:
                LOG.warning("the run continues with %s", departures)
        new = _read_from(folder / "ranks.log", num_read)
        num_read += len(new)
        waits = [text for text in new.decode(errors="replace").splitlines() if text.startswith(WAITS)]
        if waits:  # one line, because many ranks wait for the same one
            LOG.warning("a rank is %s", waits[-1].removeprefix("workbench: "))
        run = follower.poll() if shown else None
        rows = [row for rows in run.metrics.values() for row in rows if "evaluation" not in row] if run else []
        if run is None or not rows:
            return
        last = max(rows, key=lambda row: row["step"])
        line = line or progress_line(run.info.get("num_steps"), "steps", done=min(row["step"] for row in rows))
        if last["loss"] is not None:
            line.set_postfix_str(f"loss {last['loss']:.4f}", refresh=False)
        line.update(max(0, last["step"] + 1 - line.n))

    try:
        yield show
    finally:
        if line is not None:
            line.close()
