"""What an algorithm declares is what it does: replicas, staleness, bytes, and whether its result depends on timing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from workbench.costs import Compute, Lognormal, Network, SlowMachines
from workbench.gradients import Layout, build_layout, trainable
from workbench.laws import tiny
from workbench.laws.jitter import Seen, Situation, run
from workbench.laws.means import pulled
from workbench.laws.sentences import NotTried, assert_equal_ranks, assert_holds, assert_near, name_of
from workbench.laws.training import NETWORK, Trained, train_simulated
from workbench.program import Algorithm, Replicas
from workbench.runtimes.reference import ReferenceRuntime
from workbench.settings import Settings

SETTINGS = Settings(steps=8, batch_size=3, optimizer=tiny.momentum, evaluate_every=0)
TIMINGS = (  # (latency, spread of the steps' times): sums are fast and late, ranks are equal and unequal
    (1e-6, 0.0),
    (0.1, 1.5),
    (1.0, 0.3),
)


# -- replicas --------------------------------------------------------------------------------------------------


def check_equal(algorithm: Algorithm, situation: Situation, ranks: list[Seen]) -> None:
    """Raise unless ranks are equal when the algorithm says so; `ranks` are the values of `run(algorithm, situation)`."""
    law = f"{name_of(algorithm)}: replicas are equal"
    if algorithm.replicas.equal_parameters:
        for step, held in enumerate(zip(*(rank.steps for rank in ranks), strict=True)):
            when = f"after step {step}" if step < situation.steps else "at the end"
            assert_equal_ranks(f"{law} after every step", held, when)
    if algorithm.replicas != Replicas.NEVER:
        assert_equal_ranks(
            f"{law} at the end", [rank.steps[-1] for rank in ranks], f"after step {situation.steps - 1}, at the end"
        )


def check_replicas(algorithm: Algorithm, num_ranks: int) -> None:
    """Replicas are equal when the algorithm declares it, if background work is late and if it is not."""
    if algorithm.replicas == Replicas.NEVER:
        raise NotTried("replicas is NEVER: ranks may differ")
    for seed, pause_s in enumerate((3.0, 0.5, 0.0)):
        situation = Situation(num_ranks=num_ranks, steps=11, pause_s=pause_s, seed=seed)
        check_equal(algorithm, situation, run(algorithm, situation))


# -- staleness -------------------------------------------------------------------------------------------------


def check_staleness(algorithm: Algorithm, num_ranks: int) -> None:
    """No gradient is later than `max_staleness`."""
    if algorithm.max_staleness is None:
        raise NotTried("max_staleness is None: no bound is declared")
    trained = train_simulated(num_ranks, algorithm, tiny.problem(test=None), replace(SETTINGS, steps=20))
    law = f"{name_of(algorithm)}: staleness is at most the declared {algorithm.max_staleness}"
    for update in trained.run.updates():
        for source, late in zip(update["sources"], update["staleness"], strict=True):
            where = f"in update {update['update']} of a server, a gradient of rank {source}: it is {late} updates late"
            assert_holds(law, late <= algorithm.max_staleness, where)
    for rank in range(algorithm.roles(num_ranks).num_computing):
        for row in trained.rows(rank):
            late = row["staleness"] or 0
            where = f"on rank {rank} in step {row['step']}: its gradient is {late} updates late"
            assert_holds(law, late <= algorithm.max_staleness, where)


# -- traffic ---------------------------------------------------------------------------------------------------


def layout_of(algorithm: Algorithm) -> Layout:
    """Return the layout of the tiny model's gradients."""
    buckets = algorithm.requires.buckets
    return build_layout(trainable(tiny.mlp()), buckets.max_bytes, buckets.count)


def bytes_of(trained: Trained, rank: int) -> int:
    """Return the bytes that a rank sent in a run."""
    sent = trained.run.spans.select(kinds=["send", "all_reduce", "broadcast", "reduce_scatter", "all_gather"]).table
    return int(sent[sent["rank"] == rank]["bytes"].sum())


def check_traffic(algorithm: Algorithm, num_ranks: int) -> None:
    """A run sends `bytes_per_step` more for each step more. What it sends at its end, such as a last mean, cancels."""
    if algorithm.bytes_per_step(0, num_ranks, layout_of(algorithm)) is None:
        raise NotTried("bytes_per_step is None: it depends on the step or on chance")
    short, long = (
        train_simulated(num_ranks, algorithm, tiny.problem(test=None), replace(SETTINGS, steps=steps))
        for steps in (6, 12)
    )
    law = f"{name_of(algorithm)}: a rank sends the declared bytes in each step"
    for rank in range(num_ranks):
        declared = algorithm.bytes_per_step(rank, num_ranks, layout_of(algorithm))
        assert declared is not None
        sent = (bytes_of(long, rank) - bytes_of(short, rank)) / 6
        num_spans = int((long.run.spans.table["rank"] == rank).sum())
        where = f"on rank {rank} of {num_ranks}, in steps 6 to 11: {sent:.0f} bytes a step, declared {declared:.0f}"
        assert_holds(law, abs(sent - declared) <= num_spans / 6, where)  # each span's bytes are whole numbers


# -- timing ----------------------------------------------------------------------------------------------------


def check_timing(algorithm: Algorithm, num_ranks: int) -> None:
    """Any timing, and any order of events, gives the same numbers: to the bit, or up to rounding with servers."""
    if algorithm.depends_on_timing:
        raise NotTried("depends_on_timing is declared")
    law = f"{name_of(algorithm)}: any timing gives the same numbers (else declare depends_on_timing)"
    tolerance = 1e-13 if algorithm.requires.servers else 0.0
    ends: list[list[list[Tensor]]] = []
    for latency_s, spread in TIMINGS:
        compute = Compute(forward_s=0.3, backward_s=0.7, update_s=0.1, stragglers=(Lognormal(sigma=spread),))
        network = Network(latency_s=latency_s, bandwidth_bytes_per_s=1e6)
        trained = train_simulated(
            num_ranks, algorithm, tiny.problem(test=None), SETTINGS, network=network, compute=compute
        )
        ends.append(trained.parameters)
        where = f"with a latency of {latency_s:g} s and a spread of {spread:g}"
        _check_same_numbers(law, ends[-1], ends[0], where, tolerance)
    in_order = _shuffled(algorithm, num_ranks, None)
    for seed in range(3):
        found = _shuffled(algorithm, num_ranks, seed)
        _check_same_numbers(law, found, in_order, f"with events in the random order {seed}", max(tolerance, 1e-13))


def _shuffled(algorithm: Algorithm, num_ranks: int, seed: int | None) -> list[list[Tensor]]:
    driver = ReferenceRuntime(algorithm, num_ranks, pulled, lr=0.2, shuffle=seed).run(8)
    return [[*rank.seen, rank.parameters] for rank in driver.ranks]


def _check_same_numbers(
    law: str, found: list[list[Tensor]], expected: list[list[Tensor]], where: str, tolerance: float
) -> None:
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for step, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
            when = f"after step {step}" if step + 1 < len(theirs) else "at the end"
            assert_near(law, mine, its, tolerance, f"{where}, on rank {rank} {when}")


# -- a late rank --------------------------------------------------------------------------------------------------


def check_late_rank(algorithm: Algorithm, num_ranks: int) -> None:
    """With one rank that is 30 times slower, the run ends, and each rank takes its steps once and in order."""
    last = algorithm.roles(num_ranks).num_computing - 1
    compute = Compute(
        forward_s=0.3, backward_s=0.7, update_s=0.1, stragglers=(SlowMachines(factor_of=((last, 30.0),)),)
    )
    trained = train_simulated(num_ranks, algorithm, tiny.problem(test=None), SETTINGS, network=NETWORK, compute=compute)
    law = f"{name_of(algorithm)}: a slow rank changes no step"
    for rank in range(last + 1):
        steps = [row["step"] for row in trained.rows(rank)]
        assert_holds(law, steps == sorted(set(steps)), f"on rank {rank}: it took the steps {steps}")
        complete = steps == list(range(8)) or algorithm.requires.servers
        assert_holds(law, complete, f"on rank {rank}: it took the steps {steps} of 0 to 7")
        ended = trained.parameters[rank][-1]
        assert_holds(law, bool(ended.isfinite().all()), f"on rank {rank} at the end: a parameter is not finite")
    if algorithm.replicas != Replicas.NEVER:
        ends = [steps[-1] for steps in trained.parameters[: last + 1]]
        assert_equal_ranks(f"{name_of(algorithm)}: replicas are equal at the end", ends, "with a slow rank, at the end")


# -- buffers ---------------------------------------------------------------------------------------------------


def check_buffers(algorithm: Algorithm, num_ranks: int) -> None:
    """No value is written while it is sent or summed, and no gradient is used after it was applied.

    The simulator compares a checksum at each message. The reference runtime makes a consumed gradient NaN.
    """
    train_simulated(num_ranks, algorithm, tiny.problem(test=None), SETTINGS, network=NETWORK)
    law = f"{name_of(algorithm)}: every gradient is applied or discarded once"
    driver = ReferenceRuntime(algorithm, num_ranks, pulled, lr=0.2).run(8)
    for number, rank in enumerate(driver.ranks):
        assert_holds(law, bool(rank.parameters.isfinite().all()), f"on rank {number}: a consumed one was used again")
        assert_holds(law, not rank.out, f"on rank {number}: {len(rank.out)} were neither applied nor discarded")


def grouped(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with two parameter groups of different rates and momenta."""
    named = list(parameters)
    groups = [
        {"params": named[::2], "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
        {"params": named[1::2], "lr": 0.02, "momentum": 0.45},
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.05)
