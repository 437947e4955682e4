"""Resume: the ranks of a new run agree on another run's checkpoint and load it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.collectives.memory import of_all_ranks
from workbench.errors import ConfigError, WorkbenchError
from workbench.problems.loading import ENDLESS
from workbench.program import Algorithm, Context
from workbench.replica.local_training import LocalTraining
from workbench.replica.replica import Replica
from workbench.runtimes.checkpoint.files import (
    Checkpoint,
    CorruptFile,
    choose_checkpoint,
    lacks_record,
    places_of,
    run_name_of,
    split_source,
    verify_rank_file,
)
from workbench.runtimes.checkpoint.rank_state import holds_state, restore_random_state, resume
from workbench.runtimes.checkpoint.reader import as_bytes, brief_error, leaves, read_rank_file
from workbench.runtimes.checkpoint.replicated import read_whole_state
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import require_all

Agree = Callable[[Any], list[Any]]  # a plain value of this rank -> the values of all ranks


def restore(
    folder: Path, algorithm: Algorithm, worker: LocalTraining, ctx: Context, interpreter: Interpreter
) -> list[str]:
    """Continue from another run's newest complete checkpoint, and from its position in the data.

    Every rank must call it.

    Args:
        folder: the run's folder; `folder@200` for its checkpoint after 200 steps.

    Returns:
        Notes for the user; they go into the record.

    Raises:
        ConfigError: there is no complete checkpoint, or it is of another kind of run.
    """
    given = _rates(worker.replica)
    saved, notes = restore_state(folder, algorithm, worker.replica, ctx, interpreter)
    kept = _rates(worker.replica)
    if kept != given:
        notes.append(
            f"the learning rate continues from the checkpoint's {_format_rates(kept)}, and not from "
            f"{_format_rates(given)}: change it while the run trains, by set(lr=...) or `workbench steer`"
        )
    with fits(folder):
        notes += _deal(saved, worker)
    ctx.num_steps = worker.num_steps
    return notes


def _rates(replica: Replica) -> list[float]:
    """Return the learning rate of each parameter group, before a schedule if there is one."""
    groups = replica.optimizer_wrapper.optimizer.param_groups
    return [float(group.get("initial_lr", group.get("lr", 0.0))) for group in groups]


def _format_rates(rates: list[float]) -> str:
    return " and ".join(dict.fromkeys(f"{rate:g}" for rate in rates))


def restore_state(
    folder: Path, algorithm: Algorithm, replica: Replica, ctx: Context, interpreter: Interpreter
) -> tuple[dict[str, Any], list[str]]:
    """Restore replica, algorithm and random generators from a checkpoint, but not its position in the data.

    If the number of ranks differs, continue from the state that was equal on all ranks.

    Returns:
        The contents of this rank's file, and notes for the user. If the number of ranks differs: of rank 0's file.

    Raises:
        ConfigError: as `restore`.
    """
    transport = interpreter.transport

    def agree(value: Any) -> list[Any]:
        deadline = interpreter.clock.deadline("all ranks to find the checkpoint")
        return [
            json.loads(text)
            for text in require_all(transport.gather_texts(json.dumps(value), deadline), "the beginning of a run")
        ]

    checkpoint, notes, saved = _newest(folder, ctx, agree)
    if saved is not None:
        with fits(checkpoint.rank_file(ctx.rank)):
            resume(saved, algorithm, replica, ctx)
            if "random" in saved:
                restore_random_state(saved["random"], transport.device)
        return saved, notes
    saved = _on_other_ranks(checkpoint, algorithm, replica, ctx, agree)
    with fits(checkpoint.rank_file(0)):
        resume(saved, algorithm, replica, ctx)
    notes.append(f"resumed on {ctx.num_workers} ranks, {checkpoint.num_ranks} before; the learning rate is unchanged")
    return saved, notes


@contextmanager
def fits(path: Path) -> Iterator[None]:
    """Turn an error in the use of a rank file into a `ConfigError` that names the file."""
    try:
        yield
    except WorkbenchError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is undamaged, but does not fit this run's model, optimizer or algorithm ({brief_error(error)}). "
            "Resume with those that it was trained with, or train again from the start"
        ) from error


def _newest(folder: Path, ctx: Context, agree: Agree) -> tuple[Checkpoint, list[str], dict[str, Any] | None]:
    """The newest undamaged checkpoint of one run. Each rank reads its share of the files.

    Returns:
        The checkpoint, notes, and this rank's state; None in place of the state if the number of ranks differs.
    """
    notes: list[str] = []
    source, num_steps = split_source(str(folder))
    folder = Path(source)
    places = choose_checkpoint(agree(places_of(folder))[0], folder.name, num_steps)
    for step, num_ranks, _ in places:
        checkpoint = Checkpoint(folder, step, num_ranks)
        found: dict[str, list[str]] = {"damaged": [], "notes": [], "runs": []}
        saved: dict[str, Any] | None = None
        for rank in range(ctx.rank, num_ranks, ctx.num_workers):
            try:
                verify_rank_file(checkpoint.rank_file(rank))
                part, note = read_whole_state(checkpoint, rank)
                found["notes"] += filter(None, [note])
                found["runs"] += filter(None, [run_name_of(checkpoint.rank_file(rank))])
                saved = part if num_ranks == ctx.num_workers else None
            except CorruptFile as error:
                found["damaged"].append(str(error))
        everyone = agree(found)
        # Several ranks read rank 0's file.
        damaged = list(dict.fromkeys(note for one in everyone for note in one["damaged"]))
        runs = sorted({run for one in everyone for run in one["runs"]})
        if len(runs) > 1:
            damaged.append(f"its files are of several runs: {', '.join(runs)}")
        if not damaged:
            return checkpoint, notes + [note for one in everyone for note in one["notes"]], saved
        notes.append(f"the checkpoint in {folder.name}, {checkpoint}, is damaged and was skipped: {'; '.join(damaged)}")
    if notes:
        raise ConfigError(
            f"{folder} has no undamaged checkpoint. {' '.join(notes)}. Train again from the start, or restore the "
            "files from a copy"
        )
    without_record = next(filter(lacks_record, sorted(folder.glob("checkpoint-*.pt"))), None)
    more = (
        f". {without_record.name} has no record: an earlier version wrote it, or its writer was killed"
        if without_record
        else ""
    )
    raise ConfigError(
        f"{folder} has no complete checkpoint (neither checkpoint-*.pt nor in checkpoints/): only a stopped run, "
        f"one trained with checkpoint_every=, or a folder of Trainer.save can be resumed{more}"
    )


def _deal(saved: dict[str, Any], worker: LocalTraining) -> list[str]:
    """Set the position in the data, and return notes. With another global batch size, later batches differ."""
    data, batch = saved.get("data"), worker.sampler.global_batch
    if data is None:
        return []
    if data["global_batch"] == batch:
        step, sample = data["origin"]
        worker.redistribute_data((step, sample))
        return []
    worker.redistribute_data((saved["step"] + 1, data["samples"]))
    if worker.data[0].num_samples == ENDLESS:
        how = "The stream is read from its beginning, so some samples are used twice or not at all"
    else:
        how = f"Batches differ from sample {data['samples']} on"
    return [f"a global batch has {batch} samples; it had {data['global_batch']}. {how}"]


# -- another number of ranks -----------------------------------------------------------------------------------


def _on_other_ranks(
    checkpoint: Checkpoint, algorithm: Algorithm, replica: Replica, ctx: Context, agree: Agree
) -> dict[str, Any]:
    """Return the state for every new rank: rank 0's, if the state of all old ranks is equal.

    Raises:
        ConfigError: the states differ.
    """
    parameters = set(dict(replica.model.named_parameters(remove_duplicate=False)))
    mine = [
        _facts_of(read_whole_state(checkpoint, rank)[0], algorithm, parameters)
        for rank in range(ctx.rank, checkpoint.num_ranks, ctx.num_workers)
    ]
    facts = [fact for one in agree(mine) for fact in one]
    reason = next((fact["own"] for fact in facts if fact["own"]), "")
    for what in ("parameters", "optimizer's state", "averages"):
        if not reason and len({fact[what] for fact in facts}) > 1:
            reason = f"the {what} of its ranks differ"
            if what == "parameters":
                reason += (
                    " there: write checkpoints where they have been averaged, with checkpoint_every= a multiple "
                    "of every="
                )
    if reason:
        raise ConfigError(
            f"{checkpoint.folder.name} was trained on {checkpoint.num_ranks} ranks, and this run has "
            f"{ctx.num_workers}. Another number of "
            f"ranks can continue only from state that is equal on all ranks, and {reason}. Resume it on "
            f"{checkpoint.num_ranks} ranks"
        )
    return {**read_rank_file(checkpoint.rank_file(0)), "num_workers": ctx.num_workers}


def _facts_of(saved: dict[str, Any], algorithm: Algorithm, parameters: set[str]) -> dict[str, str]:
    """Return the state that only this rank has, and checksums of what must be equal.

    Buffers and extra state are always rank 0's.
    """
    own = ""
    if algorithm.asynchronous:
        own = f"ranks of {type(algorithm).__name__} are at different steps"
    elif holds_state(saved["program"]):
        own = f"{type(algorithm).__name__} keeps gradients, sums or parameters of each rank between steps"
    elif saved["memory"].keys() - of_all_ranks(saved["memory"]).keys():
        own = "a codec keeps a residual on each rank, or the algorithm a momentum"
    replica = saved["replica"]
    values = {name: value for name, value in replica["model"].items() if name in parameters}
    rest = {name: replica[name] for name in ("optimizer", "schedule", "updates", "loss_scale")}
    return {
        "own": own,
        "parameters": _checksum(values),
        "optimizer's state": _checksum(rest),
        "averages": _checksum(replica["average"]),
    }


def _checksum(tree: Any) -> str:
    total = hashlib.sha256()
    for leaf in leaves(tree):
        total.update(as_bytes(leaf).numpy().tobytes() if isinstance(leaf, Tensor) else leaf)
    return total.hexdigest()
