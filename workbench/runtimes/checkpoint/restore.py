"""How the ranks of a new run go on from another run's checkpoint: they agree on which, and on what is different."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.errors import ConfigError, WorkbenchError
from workbench.program import Algorithm, Context
from workbench.replica.local_training import LocalTraining
from workbench.replica.replica import Replica
from workbench.runtimes.checkpoint.files import Checkpoint, Damaged, check_part, complete_checkpoints, run_of
from workbench.runtimes.checkpoint.rank_state import restore_random_state, resume
from workbench.runtimes.checkpoint.reader import leaves, octets_of, read_part, said_by
from workbench.runtimes.checkpoint.replicated import whole_part
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import of_all

Agree = Callable[[Any], list[Any]]  # a plain value of each rank -> those of all, in order of rank


def restore(folder: Path, algorithm: Algorithm, worker: LocalTraining, ctx: Context, interpreter: Interpreter) -> list[str]:
    """Put this rank of a run where another run's newest checkpoint that is whole was taken, its data too. Every rank comes here.

    Returns:
        What the user should know, for the record.

    Raises:
        ConfigError: there is none, or it is of another kind of run.
    """
    saved, words = go_on_from(folder, algorithm, worker.replica, ctx, interpreter)
    words += _deal(saved, worker)
    ctx.num_steps = worker.num_steps
    return words


def go_on_from(
    folder: Path, algorithm: Algorithm, replica: Replica, ctx: Context, interpreter: Interpreter
) -> tuple[dict[str, Any], list[str]]:
    """The same without data: replica, method and randomness. On another number of ranks from what all had in common.

    Returns:
        What this rank's part holds (rank 0's, on another number of ranks), and words for the user.

    Raises:
        ConfigError: as `restore`.
    """
    transport = interpreter.transport

    def agree(value: Any) -> list[Any]:
        deadline = interpreter.clock.deadline("all ranks to find the checkpoint")
        return [json.loads(text) for text in of_all(transport.gather_texts(json.dumps(value), deadline), "the beginning of a run")]

    checkpoint, words, saved = _newest(folder, ctx, agree)
    if saved is not None:
        with fits(checkpoint.part(ctx.rank)):
            resume(saved, algorithm, replica, ctx)
            if "random" in saved:
                restore_random_state(saved["random"], transport.device)
        return saved, words
    saved = _on_other_ranks(checkpoint, algorithm, replica, ctx, agree)
    with fits(checkpoint.part(0)):
        resume(saved, algorithm, replica, ctx)
    words.append(f"resumed on {ctx.num_workers} ranks, {checkpoint.num_ranks} before; the learning rate is what it was")
    return saved, words


@contextmanager
def fits(path: Path) -> Iterator[None]:
    """Around the use of a part: what does not fit is told with the file's name."""
    try:
        yield
    except WorkbenchError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is whole, but does not fit this run's model, optimizer or method ({said_by(error)}). "
            "Resume with those that it was trained with, or train anew"
        ) from error


def _newest(folder: Path, ctx: Context, agree: Agree) -> tuple[Checkpoint, list[str], dict[str, Any] | None]:
    """The newest checkpoint all of whose parts are what was written, of one run. Each rank reads its own share of them.

    Returns:
        It, words, and what this rank's own part holds; None where the ranks are not as many.
    """
    words: list[str] = []
    places = agree([[checkpoint.step, checkpoint.num_ranks] for checkpoint in complete_checkpoints(folder)])[0]
    for step, num_ranks in places:
        checkpoint = Checkpoint(folder, step, num_ranks)
        found: dict[str, list[str]] = {"damaged": [], "words": [], "runs": []}
        saved: dict[str, Any] | None = None
        for rank in range(ctx.rank, num_ranks, ctx.num_workers):
            try:
                word = check_part(checkpoint.part(rank))
                part, other = whole_part(checkpoint, rank)
                found["words"] += filter(None, [word, other])
                found["runs"] += filter(None, [run_of(checkpoint.part(rank))])
                saved = part if num_ranks == ctx.num_workers else None
            except Damaged as error:
                found["damaged"].append(str(error))
        everyone = agree(found)
        damaged = list(dict.fromkeys(word for one in everyone for word in one["damaged"]))  # rank 0's part is read by many
        runs = sorted({run for one in everyone for run in one["runs"]})
        if len(runs) > 1:
            damaged.append(f"its parts are of several runs: {', '.join(runs)}")
        if not damaged:
            return checkpoint, words + [word for one in everyone for word in one["words"]], saved
        words.append(f"the checkpoint {folder.name} kept, {checkpoint}, is damaged and was passed over: {'; '.join(damaged)}")
    if words:
        raise ConfigError(f"{folder} kept no checkpoint that is whole. {' '.join(words)}. Train anew, or restore the files from a copy")
    raise ConfigError(
        f"{folder} kept no checkpoint (neither checkpoint-*.pt nor a complete one in checkpoints): only a stopped run, "
        "one that is trained with checkpoint_every=, or a folder of Trainer.save can be resumed"
    )


def _deal(saved: dict[str, Any], worker: LocalTraining) -> list[str]:
    """Let the data go on where they were: as they were dealt, or in these ranks' batches from there on."""
    data, batch = saved.get("data"), worker.sampler.global_batch
    if data is None:
        return []
    if data["global_batch"] == batch:
        worker.redistribute_data(tuple(data["origin"]))
        return []
    worker.redistribute_data((saved["step"] + 1, data["samples"]))
    return [f"a global batch is {batch} samples, {data['global_batch']} before: data are dealt anew from sample {data['samples']} on"]


# -- another number of ranks -----------------------------------------------------------------------------------


def _on_other_ranks(checkpoint: Checkpoint, algorithm: Algorithm, replica: Replica, ctx: Context, agree: Agree) -> dict[str, Any]:
    """What every new rank begins with: rank 0's part, where all old ranks' are one.

    Raises:
        ConfigError: they are not.
    """
    buffers = {name for name, buffer in replica.model.named_buffers() if buffer.dtype.is_floating_point}
    mine = [
        _facts_of(whole_part(checkpoint, rank)[0], algorithm, buffers) for rank in range(ctx.rank, checkpoint.num_ranks, ctx.num_workers)
    ]
    facts = [fact for one in agree(mine) for fact in one]
    reason = next((fact["own"] for fact in facts if fact["own"]), "")
    for what in ("parameters", "optimizer's state", "averages"):
        if not reason and len({fact[what] for fact in facts}) > 1:
            reason = f"the {what} of its ranks differ"
            if what == "parameters":
                reason += " there: keep checkpoints where they have been averaged, with checkpoint_every= a multiple of every="
    if reason:
        raise ConfigError(
            f"{checkpoint.folder.name} was trained on {checkpoint.num_ranks} ranks, and here are {ctx.num_workers}. Another number of "
            f"ranks can go on only from what all ranks have in common, and {reason}. Resume it on {checkpoint.num_ranks} ranks"
        )
    return {**read_part(checkpoint.part(0)), "num_workers": ctx.num_workers}


def _facts_of(saved: dict[str, Any], algorithm: Algorithm, buffers: set[str]) -> dict[str, str]:
    """What of a part is its rank's own, and checksums of what should be all ranks'. Buffers are rank 0's anyway."""
    own = ""
    if algorithm.asynchronous:
        own = f"ranks of {type(algorithm).__name__} are at steps of their own"
    elif saved["program"]:
        own = f"{type(algorithm).__name__} keeps gradients, sums or parameters of each rank from step to step"
    elif saved["memory"]:
        own = "a codec remembers on each rank what it left out"
    replica = saved["replica"]
    parameters = {name: value for name, value in replica["model"].items() if name not in buffers}
    rest = {name: replica[name] for name in ("optimizer", "schedule", "updates", "loss_scale")}
    return {
        "own": own,
        "parameters": _checksum(parameters),
        "optimizer's state": _checksum(rest),
        "averages": _checksum(replica["average"]),
    }


def _checksum(tree: Any) -> str:
    total = hashlib.sha256()
    for leaf in leaves(tree):
        total.update(octets_of(leaf).numpy().tobytes() if isinstance(leaf, Tensor) else leaf)
    return total.hexdigest()
