"""One program for all workers gives the results of one program for each: parameters, losses, times, spans, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import nn

from tests.laws import tiny
from tests.laws.train import NETWORK
from tests.laws.variants import all_variants, name_of
from workbench.algorithms import DeAR, LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.codecs import Truncate16
from workbench.collectives import (
    Auto,
    Direct,
    HalvingDoubling,
    Hierarchical,
    Linear,
    Native,
    Once,
    PowerSGD,
    Ring,
    Tree,
)
from workbench.costs import Compute, Lognormal, Network
from workbench.errors import ConfigError
from workbench.laws.sentences import assert_same_rows
from workbench.ops import Backward, Program, Send
from workbench.program import Algorithm, Card, Context
from workbench.replica.replica import Replica
from workbench.runtimes.simulator.lockstep.worker_group import SINGLE_WORKERS, WorkerGroup
from workbench.runtimes.simulator.simulate import Detail, run_simulation
from workbench.settings import Settings
from workbench.trace.run import Run

COMPUTE = Compute(forward_s=0.3, backward_s=0.7, update_s=0.1, stragglers=(Lognormal(sigma=0.5),))
HOW = Settings(steps=7, batch_size=3, optimizer=tiny.momentum, seed=1, evaluate_every=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone(Algorithm):
    """Says that it is symmetric, and is not."""

    card: ClassVar[Card] = Card(paper="none", staleness="0", bytes_per_step="0", memory="none")

    @property
    def symmetric(self) -> bool:
        return True

    def worker(self, ctx: Context) -> Program:
        yield Send(0, (yield Backward(0)))


def symmetric() -> list[Algorithm]:
    """Every algorithm that sums by the library's all-reduce and is symmetric, and DeAR with its halves."""
    found = [
        item for item in all_variants() if item.symmetric and isinstance(getattr(item, "collective", None), Native)
    ]
    return [*found, DeAR(bucket_bytes=64, collective=Native())]


def run(algorithm: Algorithm, detail: Detail, workers: int = 3, settings: Settings = HOW, **how: Any) -> Run:
    how = {"network": NETWORK, "compute": COMPUTE, **how}
    return run_simulation(algorithm, how.pop("problem", tiny.problem()), settings, workers, detail=detail, **how)


def spans_of(found: Run) -> list[Any]:
    """Without waits of no time, which depend on the order of events at one moment."""
    rows = [row for row in found.spans.table.tolist() if row[4] > row[3]]
    return sorted(rows)


@pytest.mark.parametrize("algorithm", symmetric(), ids=name_of)
@pytest.mark.parametrize("timing_only", [False, True], ids=["gradients", "timing"])
def test_one_program_is_what_many_are(algorithm: Algorithm, timing_only: bool) -> None:
    one, many = (run(algorithm, detail, timing_only=timing_only) for detail in ("auto", "messages"))
    assert any("one program" in note for note in one.info["notes"]) and not any(
        "one program" in note for note in many.info["notes"]
    )
    law = f"{name_of(algorithm)}: one program for all is what each rank's own would have been"
    for rank in range(3):
        assert_same_rows(law, rows_of(one, rank), rows_of(many, rank), f"rank {rank}")
    assert_same_rows(law, spans_of(one), spans_of(many), "spans of (rank, lane, kind, from, to, step, ...)")
    assert_same_rows(
        law, one.evaluations(), many.evaluations(), "evaluations, with the bytes of all workers until then"
    )
    assert one.info["result"]["seconds"] == many.info["result"]["seconds"]
    if not timing_only:
        assert len(one.evaluations()) == 4
        assert one.evaluations()[-1]["bytes_sent"] >= one.steps()[-1]["bytes_sent"] > 0, (
            "what was in flight at the last step counts too"
        )


def rows_of(found: Run, rank: int) -> list[dict[str, Any]]:
    return [row for row in found.metrics[rank] if "evaluation" not in row]


def test_of_many_workers_one_row_stands_for_all() -> None:
    """The steps of a run are the same either way: seconds of the last, bytes of all, the mean loss over samples."""
    settings = Settings(steps=4, batch_size=2, seed=3, evaluate_every=0)
    problem = tiny.problem(num_samples=250)  # in every other step some have two samples and some one
    how = {"workers": SINGLE_WORKERS + 6, "settings": settings, "problem": problem}
    one, many = (run(PipeSGD(width=2), detail, **how) for detail in ("auto", "messages"))
    assert list(one.metrics) == list(range(SINGLE_WORKERS)) and len(rows_of(one, 0)) == 4 and not one.metrics[1]
    for mine, theirs in zip(one.steps(), many.steps(), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("model", [tiny.batchnorm_mlp, tiny.dropout_mlp, tiny.PartlyUsed])
def test_a_modules_other_state_is_rank_0s(model: Any, num_micro: int) -> None:
    """BatchNorm's statistics and dropout's masks are those that rank 0, and each rank, would have had."""
    problem = tiny.problem(model=model, num_samples=24)
    settings = Settings(steps=5, batch_size=4, seed=2, num_micro=num_micro, evaluate_every=2)
    one, many = (run(PipeSGD(width=2), detail, settings=settings, problem=problem) for detail in ("auto", "messages"))
    law = f"{model.__name__}: its other state is that of rank 0"
    assert_same_rows(law, [row["loss"] for row in one.steps()], [row["loss"] for row in many.steps()], "losses by step")
    tested = [[row["test_loss"] for row in found.evaluations()] for found in (one, many)]
    assert_same_rows(law, *tested, "losses by evaluation")


@pytest.mark.parametrize("collective", [Ring(), HalvingDoubling(), Tree(), Linear(), Auto()], ids=repr)
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_closed_forms_are_the_messages(collective: Any, workers: int) -> None:
    """Where all come at once; where they do not, the formula begins with the last and so is never the quicker one."""
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6, sum_s_per_byte=1e-8)
    settings = Settings(steps=4, batch_size=2)
    problem = tiny.problem(model=partial(nn.Linear, 64, 64), test=None)
    for algorithm in (SynchronousSGD(collective=collective), PipeSGD(width=2, collective=collective)):
        how = {"network": network, "settings": settings, "problem": problem, "timing_only": True, "workers": workers}
        equal = Compute(forward_s=1e-3, backward_s=2e-3)
        formula, messages = (
            run(algorithm, detail, compute=equal, **how).info["result"]["seconds"] for detail in ("formula", "messages")
        )
        assert formula == pytest.approx(messages, rel=0.002), "blocks differ by an element"
        skewed = Compute(forward_s=1e-3, backward_s=2e-3, stragglers=(Lognormal(sigma=1.0),))
        formula, messages = (
            run(algorithm, detail, compute=skewed, **how).info["result"]["seconds"]
            for detail in ("formula", "messages")
        )
        assert formula >= messages * 0.998


@pytest.mark.parametrize(
    "collective",
    [Ring(), Ring(chunks=3), Direct(chunks=2), Linear(), Tree(), HalvingDoubling(), Hierarchical(group=2)],
    ids=repr,
)
def test_a_formula_sends_the_bytes_of_the_messages(collective: Any) -> None:
    """All workers together; a root, a leaf and a worker that is folded into another send very different numbers."""
    problem = tiny.problem(model=partial(nn.Linear, 40, 60), test=None)
    for workers in (1, 5, 6):
        how = {"settings": Settings(steps=3, batch_size=2), "problem": problem, "timing_only": True, "workers": workers}
        formula, messages = (
            run(SynchronousSGD(collective=collective), detail, **how).steps() for detail in ("formula", "messages")
        )
        sent = [row["bytes_sent"] for row in messages]
        assert [row["bytes_sent"] for row in formula] == pytest.approx(sent, rel=1e-3), (
            "of one kind ranks differ by an element"
        )


def test_what_does_not_ask_the_same_of_all_says_so() -> None:
    with pytest.raises(ConfigError, match=r"Send: .* use detail='messages'"):
        run(Alone(), "formula", timing_only=True)


def test_formulas_are_refused_where_there_are_none() -> None:
    for algorithm, timing_only, fix in (
        (SynchronousSGD(collective=Ring()), False, "timing_only=True"),
        (LayerwiseSGD(collective=Ring(), order="priority"), True, "messages"),
        (DeAR(collective=Ring(chunks=2)), True, "messages"),
        (SynchronousSGD(collective=Once(codec=Truncate16())), True, "messages"),
        (PipeSGD(collective=PowerSGD(rank=1)), True, "messages"),
        (LayerwiseSGD(collective=Ring(), lanes=2), True, "lanes=1"),
    ):
        with pytest.raises(ConfigError, match=fix):
            run(algorithm, "formula", timing_only=timing_only)


@pytest.mark.parametrize("num_micro", [1, 2])
def test_memory_does_not_grow_with_workers(num_micro: int) -> None:
    """At most two gradient buffers for any number of workers: the sum, and one that is added to it."""
    settings = Settings(steps=1, batch_size=4, num_micro=num_micro)
    for workers in (2, 32):
        group = WorkerGroup(
            SynchronousSGD(), tiny.problem(num_samples=256), settings, workers, COMPUTE, timing_only=False
        )
        gradient, _, _ = group.backward(0, np.zeros(workers))
        assert isinstance(group.replica, Replica) and group.replica.pool.num_allocated == num_micro
        group.replica.discard(gradient)
