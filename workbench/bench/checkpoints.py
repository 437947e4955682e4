"""The cost of checkpoints: the time of steps with a checkpoint at intervals, compared with steps without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.bench import BenchOptions
from workbench.bench.paired import Step, alternate
from workbench.bench.ranks import ranks, world
from workbench.bench.rows import Row, compare
from workbench.machine import num_cores
from workbench.runtimes.rank.main import RuntimeName

RANKS = (2,)
CASES: dict[str, dict[str, Any]] = {"12 MB MLP": {"megabytes": 12}, "50 MB MLP": {"megabytes": 50}}
# steps between checkpoints, which is also the number of steps of a block
INTERVALS: dict[str, tuple[int, ...]] = {"12 MB MLP": (20, 50), "50 MB MLP": (20,)}
BATCH_SIZE = 256  # a step of the larger model takes about 0.2 s on a core
TARGET_RATIO = 1.02


def run(how: BenchOptions) -> Iterator[Row]:
    """Run synchronous SGD with momentum, on gloo."""
    for number in how.ranks or RANKS:
        for case in CASES:
            title = f"{case}, {number} ranks, gloo"
            if not how.wanted(title):
                continue
            how.report(f"{title} ...")
            with ranks(number, "torch") as there:
                for every in INTERVALS[case]:
                    times = there.call(on_rank, case, every, how.rounds)[0]
                    what = f"synchronous, a checkpoint every {every} steps"
                    yield compare(
                        times["kept"], times["not"], case=title, what=what, over="without", below=TARGET_RATIO
                    )
            yield compare(
                times["copied"],
                times["not"],
                case=title,
                what="the copy alone, once a step",
                over="a step",
                kind="peer",
            )


def on_rank(runtime: RuntimeName, folder: str, case: str, every: int, rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of a step, for each way and round.

    A block has one checkpoint and ends when the checkpoint is on the disk.
    """
    from functools import partial

    import torch

    from workbench import problems
    from workbench.algorithms import SynchronousSGD
    from workbench.bench import peers
    from workbench.ops import EndStep
    from workbench.program import Context, lower
    from workbench.replica.local_training import LocalTraining
    from workbench.runtimes.checkpoint.rank_state import take_checkpoint
    from workbench.runtimes.checkpoint.staging import StagingBuffers
    from workbench.runtimes.checkpoint.writer import CheckpointWriter
    from workbench.runtimes.execution.interpreter import Interpreter
    from workbench.settings import Settings
    from workbench.trace.recorder import NullRecorder

    transport = world(runtime, folder)
    torch.set_num_threads(max(1, num_cores() // transport.num_workers))
    meet, slowest = peers.slowest_here(runtime)
    settings = Settings(
        steps=10**9,
        batch_size=BATCH_SIZE,
        optimizer=partial(torch.optim.SGD, lr=peers.LR, momentum=0.9),
        checkpoint_every=every,
    )
    algorithm = SynchronousSGD()
    worker = LocalTraining(
        algorithm,
        problems.get("wide-mlp", **CASES[case]),
        settings,
        transport.rank,
        transport.num_workers,
        transport.device,
    )
    interpreter = Interpreter(transport, worker.replica, NullRecorder(), worker.minibatch, timeout_s=settings.timeout_s)
    writer = CheckpointWriter(worker, interpreter, Path(folder))
    interpreter.context = Context(transport.rank, transport.num_workers, layout=worker.replica.layout)
    program = lower(interpreter.context, algorithm.worker(interpreter.context))
    snapshot = StagingBuffers()
    last = EndStep(-1)

    def step() -> None:
        nonlocal last
        last = interpreter.advance(program) or last

    def block(*, kept: bool) -> None:
        for number in range(every):
            step()
            if kept and number == 0:
                writer.keep(algorithm, last, last.step)
        if kept:
            writer.finish_writing()

    def copy() -> None:
        snapshot.take(take_checkpoint(algorithm, worker.replica, transport.num_workers, last, {}, worker.sampler))

    ways: dict[str, Step] = {"not": partial(block, kept=False), "kept": partial(block, kept=True), "copied": copy}
    times = alternate(ways, rounds, meet=meet, slowest=slowest)
    interpreter.close()
    worker.replica.close()
    transport.close()
    return {
        name: [seconds if name == "copied" else seconds / every for seconds in found] for name, found in times.items()
    }
