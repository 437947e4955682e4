"""Step time without a network, compared with torch DDP and hand-written loops; on CPUs or GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.bench import BenchOptions
from workbench.bench.paired import Step, alternate
from workbench.bench.ranks import ranks, world
from workbench.bench.rows import Row, compare
from workbench.machine import num_cores
from workbench.runtimes.rank.main import RuntimeName
from workbench.units import MIB

if TYPE_CHECKING:
    import torch

RANKS = (2, 4)
# problem, its options, samples of a rank in a step, steps of a block
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "50 MB MLP": ("wide-mlp", {"megabytes": 50}, 64, 1),
    "ResNet-18": ("resnet18-synthetic", {"image": (3, 32, 32), "classes": 10}, 8, 1),
    "transformer": ("text-transformer", {"width": 128, "layers": 2}, 8, 2),
}
GPU_BLOCK = 20  # steps of a block on a GPU, where a step takes milliseconds
BUCKETS_MIB = (1, 5, 25, 100)  # DDP's default is 25; 100 is larger than each model
TARGET_RATIO = 1.02
AUTO, AUTO_OF_DDP, AUTO_OF_SWEEP = "layer-wise, chosen buckets", 1.0, 1.03


def run(how: BenchOptions) -> Iterator[Row]:
    """Measure synchronous and layer-wise SGD and their peers, on gloo, NCCL and MPI."""
    for number in how.ranks or _ranks_here():
        for runtime in ("torch", "mpi"):
            title = f"{number} ranks, {_library(runtime, number)}"
            cases = [case for case in CASES if how.wanted(f"{case}, {title}")]
            if not cases:
                continue
            with ranks(number, runtime) as there:
                for case in cases:
                    how.report(f"{case}, {title} ...")
                    times = there.call(on_rank, case, how.rounds)[0]
                    yield from rows_of(f"{case}, {title}", times)


def on_rank(runtime: RuntimeName, folder: str, case: str, rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of a step, for each way and round."""
    import torch

    from workbench import problems
    from workbench.algorithms import LayerwiseSGD, SynchronousSGD
    from workbench.algorithms.bucket_plans import TRIAL_STEPS
    from workbench.bench import peers
    from workbench.problems.loading import fetch
    from workbench.runtimes.user_loop.trainer import Trainer

    transport = world(runtime, folder)
    torch.set_num_threads(max(1, num_cores() // transport.num_workers))
    name, options, batch_size, block = CASES[case]
    problem = problems.get(name, **options)
    device = transport.device
    batch = tuple(values.to(device) for values in fetch(problem.train_data(), list(range(batch_size))))
    meet, slowest = peers.slowest_here(runtime, device)
    trainers: list[Trainer] = []

    def loss(model: Any) -> torch.Tensor:
        return problem.batch_loss(model, batch)

    def fresh() -> torch.nn.Module:
        torch.manual_seed(0)
        return problem.model().to(device)

    def ours(algorithm: Any) -> Step:
        model = fresh()
        trainers.append(Trainer(model, torch.optim.SGD(model.parameters(), lr=peers.LR), algorithm))
        return partial(trainers[-1].step, partial(loss, model))

    def theirs(make: Callable[..., Step], *more: Any) -> Step:
        return make(fresh(), loss, *more)

    steps: dict[str, Step] = {"synchronous": ours(SynchronousSGD())}
    if runtime == "mpi":
        steps["mpi4py Allreduce after backward"] = theirs(peers.flat_step, peers.mpi_mean())
    else:
        steps["flat all_reduce after backward"] = theirs(peers.flat_step, peers.gloo_mean)
        for mib in BUCKETS_MIB:
            steps[f"layer-wise, {mib} MiB"] = ours(LayerwiseSGD(bucket_bytes=mib * MIB))
            steps[f"torch DDP, {mib} MiB"] = theirs(peers.ddp_step, mib)
        steps[AUTO] = ours(LayerwiseSGD(bucket_bytes="auto"))
        _in_a_row(steps[AUTO], TRIAL_STEPS, device)
    if device.type == "cuda":
        block = GPU_BLOCK
    in_a_row = {name: partial(_in_a_row, step, block, device) for name, step in steps.items()}
    times = alternate(in_a_row, rounds, meet=meet, slowest=lambda seconds: slowest(seconds / block))
    for trainer in trainers:
        trainer.finish()
    transport.close()
    return times


def _ranks_here() -> tuple[int, ...]:
    """Return the numbers of ranks to measure; if there are GPUs, also a rank for each, because NCCL needs that."""
    import torch

    gpus = torch.cuda.device_count()
    return RANKS if gpus in (0, *RANKS) else (gpus, *RANKS)


def _library(runtime: RuntimeName, number: int) -> str:
    """Name what sums: NCCL needs a GPU for each rank."""
    import torch

    if runtime == "mpi":
        return "MPI"
    return "NCCL" if number <= torch.cuda.device_count() else "gloo"


def _in_a_row(step: Step, times: int, device: torch.device) -> None:
    """Take several steps, to the end of the last on the device: a GPU works on one while the host prepares the next."""
    for _ in range(times):
        step()
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def rows_of(case: str, times: dict[str, list[float]]) -> Iterator[Row]:
    """Yield the ratio of each of our ways to its peer.

    Layer-wise SGD is compared with torch DDP at the best bucket size of each, and at each common bucket size.
    """
    from statistics import median

    by_hand = next(name for name in times if name.endswith("after backward"))
    yield compare(times["synchronous"], times[by_hand], case=case, what="synchronous", over=by_hand, below=TARGET_RATIO)
    bucketed = {
        word: [name for name in times if name.startswith(word) and name != AUTO] for word in ("layer-wise", "torch DDP")
    }
    if not bucketed["torch DDP"]:
        return
    mine, its = (min(names, key=lambda name: median(times[name])) for names in bucketed.values())
    yield compare(
        times[mine],
        times[its],
        case=case,
        what="layer-wise, its best bucket size",
        over="torch DDP, its best",
        below=TARGET_RATIO,
    )
    if AUTO in times:
        chosen = partial(compare, times[AUTO], case=case, what=AUTO)
        yield chosen(times[its], over="torch DDP, its best", below=AUTO_OF_DDP)
        yield chosen(times[mine], over="layer-wise, its best bucket size", below=AUTO_OF_SWEEP)
    for name in bucketed["layer-wise"]:
        other = name.replace("layer-wise", "torch DDP")
        yield compare(times[name], times[other], case=case, what=name, over=other)
