"""Results: every algorithm against one process with the whole batch, and against its definition."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.covering import covering
from tests.laws.reference import ddp, serial
from tests.laws.train import REAL, RUNTIMES, Trained, assert_same, by_turns, on_all_runtimes, train
from tests.laws.variants import in_step, name_of, representatives, variants
from workbench.algorithms import ApplyOrder, DeAR, DelayedSGD, LayerwiseSGD, PartialAllReduce, PipeSGD, SynchronousSGD
from workbench.collectives import Collective, Linear, Native
from workbench.laws.sentences import assert_equal_ranks
from workbench.program import Algorithm, Replicas, settings_of
from workbench.settings import Settings

# The sum of a few float64 numbers, taken in another order, differs by some 1e-16; a dozen tame steps keep it under
# this.
ROUNDING = 1e-12
OPTIMIZERS = pytest.mark.parametrize("optimizer", [tiny.sgd, tiny.momentum, tiny.adam], ids=["sgd", "momentum", "adam"])
SIZES = (0, 100, 200, None)  # of buckets, in bytes
EQUAL = [item for item in variants() if item.replicas != Replicas.NEVER]
LOSSY = [item for item in variants() if getattr(getattr(item, "collective", None), "lossy", False)]
EXACT = [
    item
    for item in in_step(EQUAL)
    if item not in LOSSY and type(item) in (SynchronousSGD, LayerwiseSGD, DeAR, PartialAllReduce)
]
SYNCHRONOUS = [item for item in EXACT if item.max_staleness == 0]

# 23 samples in batches of 3 on 3 workers: 9, 9 and 5 samples, the last shared 2, 2, 1.
settings = partial(Settings, steps=8, batch_size=3, timeout_s=30)


@cache
def real_runs() -> list[tuple[Algorithm, str]]:
    """Each variant in step on a real runtime; each algorithm, and each setting of it that is not a number, on both."""

    def parts(row: tuple[Algorithm, str]) -> list[Hashable]:
        algorithm, runtime = row
        words = {
            name: value for name, value in settings_of(algorithm).items() if not isinstance(value, float | int | None)
        }
        of_both = [(), *words.items()]
        return [algorithm, *((type(algorithm), runtime, repr(part)) for part in of_both)]

    return covering([(algorithm, runtime) for algorithm in in_step(variants()) for runtime in REAL], parts)


def check_equal(algorithm: Algorithm, trained: Trained, num_ranks: int = 3) -> None:
    """Bit-identical after every step, or after the end on the ranks that compute. All ranks have the same error of a codec."""
    num_computing = algorithm.roles(num_ranks).num_computing
    for rank in range(num_computing):
        if algorithm.replicas.equal_parameters:
            law = f"{name_of(algorithm)}: replicas are equal after every step, rank {rank} unlike rank 0"
            assert_same(trained.parameters[rank], trained.parameters[0], 0, law)
    if algorithm.replicas != Replicas.NEVER:
        ends = [trained.parameters[rank][-1] for rank in range(num_computing)]
        assert_equal_ranks(f"{name_of(algorithm)}: replicas are equal at the end", ends, "at the end")
    assert not torch.equal(trained.final, trained.parameters[0][0]), "nothing was learned"


@by_turns([item for item in representatives() if item in EQUAL and item.asynchronous], turn=0)
def test_real_replicas_are_equal_when_they_should_be(algorithm: Algorithm, runtime: str) -> None:
    """Asynchronous ones. The others: `test_every_runtime_takes_the_same_steps`. Simulated replicas: `test_replicas.py`."""
    check_equal(algorithm, train(runtime, 3, algorithm, tiny.problem(), settings(optimizer=tiny.momentum, seed=1)))


def test_replicas_that_never_meet_go_apart() -> None:
    """The law above can fail."""
    for algorithm in [item for item in variants() if item.replicas == Replicas.NEVER]:
        trained = train("simulated", 3, algorithm, tiny.problem(), settings())
        assert not torch.equal(trained.parameters[1][-1], trained.final)


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", in_step(variants()), ids=name_of)
def test_every_runtime_takes_the_same_steps(algorithm: Algorithm) -> None:
    """Simulated workers, gloo and MPI; dropout and a schedule included. What looks at the time has equal replicas.

    Each variant is on one real runtime. Each algorithm, and each of its settings that is not a number, is on both:
    numbers change what is computed, and not what is sent how. Two ranks, too, of one variant of each algorithm, with
    the other optimizer.
    """
    problem = tiny.problem(tiny.dropout_mlp)
    adam, momentum = (settings(optimizer=each, schedule=tiny.step_lr, seed=2) for each in (tiny.adam, tiny.momentum))
    rows = [(3, [runtime for one, runtime in real_runs() if one == algorithm])]
    if algorithm.depends_on_timing:
        check_equal(algorithm, train(rows[0][1][0], 3, algorithm, problem, momentum))
        return
    if algorithm in representatives():
        rows += [(2, REAL[representatives().index(algorithm) % 2 :][:1])]
    for num_ranks, runtimes in rows:
        for runtime in runtimes:
            how = adam if (runtime == "torch") == (num_ranks == 2) else momentum  # Adam hides a wrong factor
            reference = train("simulated", num_ranks, algorithm, problem, how)
            found = train(runtime, num_ranks, algorithm, problem, how)
            law = f"{name_of(algorithm)}: {runtime} takes the steps of the simulator, rank 0 of {num_ranks}"
            assert_same(found.parameters[0], reference.parameters[0], ROUNDING, law)
            check_equal(algorithm, found, num_ranks)
            for rank in range(num_ranks):
                ours, theirs = found.rows(rank), reference.rows(rank)
                for name in ("step", "samples", "num_samples", "staleness", "lr"):
                    assert [row[name] for row in ours] == [row[name] for row in theirs], name
                assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-9)


@OPTIMIZERS
@on_all_runtimes
def test_synchronous_is_one_process_with_the_whole_batch(runtime: str, optimizer: object) -> None:
    """Also where the last batch is short (5 samples on 3 ranks).

    DDP would count its rank of one sample like those of two.
    """
    how = settings(optimizer=optimizer)
    trained = train(runtime, 3, SynchronousSGD(), tiny.problem(), how)
    law = "SynchronousSGD: one process with the whole batch takes the same steps, rank 0 of 3"
    assert_same(trained.parameters[0], serial(tiny.problem(), how, 3), ROUNDING, law)


@by_turns([*SYNCHRONOUS, PipeSGD(width=2)], turn=1, simulated=True)
def test_ranks_without_samples_take_part(algorithm: Algorithm, runtime: str) -> None:
    """11 samples in batches of 9: the second batch holds 2, the third rank none."""
    problem, how = tiny.problem(num_samples=11), settings(optimizer=tiny.momentum)
    trained = train(runtime, 3, algorithm, problem, how)
    assert trained.rows(2)[1]["num_samples"] == 0
    assert trained.rows(2)[1]["loss"] is None
    # An update is read one step later, and at the end
    behind = slice(1, None) if isinstance(algorithm, DeAR) else slice(None)
    expected = serial(problem, how, 3, delay=algorithm.max_staleness)
    law = f"{name_of(algorithm)}: a rank without samples counts nothing, rank 0 of 3"
    assert_same(trained.parameters[0][behind], expected[: len(expected[behind])], ROUNDING, law)
    assert_same(trained.parameters[0][-1:], expected[-1:], ROUNDING, f"{law}, at the end")


@OPTIMIZERS
def test_synchronous_is_ddp(optimizer: object) -> None:
    """Three ways to the same numbers: torch's DDP on gloo, ours on gloo, one process. 24 samples: every share is full."""
    problem, how = tiny.problem(num_samples=24), settings(batch_size=2, optimizer=optimizer)
    theirs = shared_pool("torch", 3).run(ddp, problem, how)
    ours = train("torch", 3, SynchronousSGD(), problem, how)
    assert_same(ours.parameters[0], theirs[0], ROUNDING)
    assert_same(theirs[0], serial(problem, how, 3), ROUNDING)


@pytest.mark.mpi
@pytest.mark.parametrize("order", ApplyOrder)
@pytest.mark.parametrize("bucket_bytes", SIZES)
def test_layerwise_is_synchronous_to_the_last_bit_where_sums_are_in_rank_order(
    bucket_bytes: float | None, order: ApplyOrder
) -> None:
    """Each order and each size of buckets on both real runtimes, in turn."""
    real = REAL[(list(ApplyOrder).index(order) + SIZES.index(bucket_bytes)) % 2]
    for runtime, collective in (("simulated", Native()), (real, Linear())):
        layerwise = LayerwiseSGD(bucket_bytes=bucket_bytes, apply=order, collective=collective)
        found = train(runtime, 3, layerwise, tiny.problem(), settings(optimizer=tiny.momentum))
        assert_same(found.parameters[0], synchronous(runtime, collective), 0)


@cache
def synchronous(runtime: str, collective: Collective) -> list[Tensor]:
    return train(
        runtime, 3, SynchronousSGD(collective=collective), tiny.problem(), settings(optimizer=tiny.momentum)
    ).parameters[0]


@on_all_runtimes
def test_pipe_of_width_one_is_synchronous(runtime: str) -> None:
    how = settings(optimizer=tiny.momentum)
    pipe = train(runtime, 3, PipeSGD(width=1, collective=Linear()), tiny.problem(), how)
    synchronous = train(runtime, 3, SynchronousSGD(collective=Linear()), tiny.problem(), how)
    assert_same(pipe.parameters[0], synchronous.parameters[0], 0)


@OPTIMIZERS
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_pipe_is_serial_sgd_with_late_gradients(width: int, optimizer: object) -> None:
    """w[t] = w[t-1] - lr * g(w[t-K]), and the K - 1 gradients in flight at the end are applied.

    Real ranks take the same steps with each of these widths: `test_every_runtime_takes_the_same_steps`.
    """
    how = settings(optimizer=optimizer)
    expected = serial(tiny.problem(), how, 3, delay=width - 1)
    assert_same(train("simulated", 3, PipeSGD(width=width), tiny.problem(), how).parameters[0], expected, ROUNDING)


@pytest.mark.mpi
def test_pipe_longer_than_the_run_applies_everything_at_the_end() -> None:
    how = settings(steps=3)
    for runtime in RUNTIMES:
        trained = train(runtime, 2, PipeSGD(width=5), tiny.problem(), how)
        assert_same(trained.parameters[0], serial(tiny.problem(), how, 2, delay=4), ROUNDING)
        assert torch.equal(trained.parameters[0][0], trained.parameters[0][2]), "nothing is due before the end"


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_delay_is_a_width_less_one(delay: int) -> None:
    how = settings(optimizer=tiny.adam)
    assert_same(
        train("simulated", 2, DelayedSGD(delay=delay), tiny.problem(), how).parameters[0],
        train("simulated", 2, PipeSGD(width=delay + 1), tiny.problem(), how).parameters[0],
        0,
    )


@pytest.mark.parametrize(
    "algorithm",
    [*SYNCHRONOUS, *(PipeSGD(width=width) for width in (1, 2, 3, 4))],
    ids=lambda algorithm: f"{name_of(algorithm)}-simulated",
)
def test_measured_staleness_is_that_of_the_definition(algorithm: Algorithm) -> None:
    """Nothing is applied while the pipeline fills; the first gradient is not stale, the last ones are by K - 1 updates.

    DeAR applies a step's gradient under the next step's forward. Real ranks measure the same:
    `test_every_runtime_takes_the_same_steps`.
    """
    trained = train("simulated", 2, algorithm, tiny.problem(), settings())
    if isinstance(algorithm, DeAR):
        assert [row["staleness"] for row in trained.rows(0)] == [None] + [0] * 7
        return
    late = algorithm.max_staleness
    for rank in range(2):
        assert [row["staleness"] for row in trained.rows(rank)] == [None] * late + [
            min(step, late) for step in range(8 - late)
        ]
