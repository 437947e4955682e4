"""One of several synchronous ranks is killed: with `on_failure="shrink"`, or by the algorithm's rule, the others continue as fewer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.distributed.killing import DiesAt, Late, outcomes, rank_here
from tests.distributed.test_survivors import AT_STEP, HOW, NUM_RANKS
from tests.laws import reference, tiny
from tests.laws.train import Wrapper, by_turns, make_job
from tests.waiting import within
from workbench.algorithms import (
    ADPSGD,
    DPSGD,
    SPARTA,
    AsyncSGD,
    ChocoSGD,
    DiLoCo,
    FedAvg,
    FedProx,
    GradientTracking,
    LayerwiseSGD,
    LocalSGD,
    NoCommunication,
    NoLoCo,
    PartialAllReduce,
    PipeSGD,
    SlowMo,
    StochasticGradientPush,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.codecs import Truncate16
from workbench.collectives import Auto, Ring
from workbench.errors import ConfigError, PeerFailed
from workbench.gradients import WEIGHT, Gradient
from workbench.ops import Apply, Backward, Discard, EndStep, Program, ReadParameters, WriteParameters
from workbench.problems.base import Sampler
from workbench.problems.loading import fetch
from workbench.program import Algorithm, Context
from workbench.replica.backward import MicroBatch
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.checkpoint.files import complete_checkpoints
from workbench.runtimes.elastic import shrink
from workbench.runtimes.liveness.membership import FOLDER, Membership, left_name
from workbench.runtimes.rank.main import Job, RuntimeName, run_rank
from workbench.runtimes.transport import torch_distributed as torch_dist
from workbench.settings import Settings
from workbench.trace.run import Run

SHRINKING = replace(HOW, on_failure="shrink", optimizer=tiny.momentum, checkpoint_every=2)
PROBLEM = tiny.problem(partial(tiny.FailsAt, None, 0))
RUNTIMES: tuple[RuntimeName, ...] = ("torch", "mpi")  # MPI under an mpiexec that was asked for it
_seen: dict[
    int, Tensor
] = {}  # step -> parameters at its end, in this process; of a step that is taken again, the later


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shown(Wrapper):
    """Another algorithm, whose parameters are read at each `EndStep`; those of rank `drifts` go astray two steps before the death."""

    drifts: int = -1

    def worker(self, ctx: Context) -> Program:
        program, answer = self.inner.worker(ctx), None
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                return
            if isinstance(request, EndStep):
                _seen[request.step] = now = yield ReadParameters()
                if ctx.rank == self.drifts and request.step == AT_STEP - 2:
                    yield WriteParameters(now + 1.0)
            answer = yield request


def train_shown(job: Job) -> dict[int, Tensor]:
    run_rank(job)
    return _seen


def train(
    algorithm: Algorithm, victim: int, how: Settings = SHRINKING, drifts: int = -1, runtime: RuntimeName = "torch"
) -> tuple[dict[int, Any], Run]:
    """The outcomes of the others, and the record."""
    job = make_job(runtime, NUM_RANKS, Shown(inner=algorithm, drifts=drifts), PROBLEM, how)
    dying = replace(job, problem=tiny.problem(partial(DiesAt, AT_STEP)))
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (train_shown, (dying if rank == victim else job,)) for rank in range(NUM_RANKS)
    ]
    found = outcomes(calls, runtime=runtime)
    assert set(found) == set(range(NUM_RANKS)) - {victim}
    assert not (Path(job.folder) / "members").exists(), "the first of those that remain clears up"
    return found, Run.load(job.folder)


def expected(first_of_two: int) -> list[Tensor]:
    """Parameters after each step of one process that takes the samples of three ranks, and from that step on those of two."""
    model, optimizer, _ = reference.begin(PROBLEM, SHRINKING)
    found = []
    three, two = (
        Sampler(PROBLEM.num_samples(), (SHRINKING.batch_size or 0) * workers, 1, SHRINKING.seed)
        for workers in (NUM_RANKS, NUM_RANKS - 1)
    )
    two = replace(two, origin=(first_of_two, three.samples_before(first_of_two)))
    for step in range(SHRINKING.steps or 0):
        sampler = three if step < first_of_two else two
        optimizer.zero_grad()
        PROBLEM.batch_loss(model, fetch(PROBLEM.train_data(), sampler.share(step, 0))).backward()
        optimizer.step()
        found.append(torch.cat([param.detach().reshape(-1) for param in model.parameters()]))
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("algorithm", "victim"),
    [(SynchronousSGD(), 1), (SynchronousSGD(collective=Ring()), 0), (LayerwiseSGD(), 2), (PipeSGD(width=2), 1)],
    ids=str,
)
def test_those_that_remain_go_on_as_fewer(algorithm: Algorithm, victim: int, runtime: RuntimeName) -> None:
    """From there on the synchronous algorithm equals its run on two ranks, with momentum. Rank 0 may leave, too."""
    found, run = train(algorithm, victim, runtime=runtime)
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
    remain = [rank for rank in range(NUM_RANKS) if rank != victim]
    assert run.info["status"] == "finished"
    assert [row["ranks"] for row in run.info["shrunk"]] == [remain]
    assert [row["rank"] for row in run.info["departures"]] == [victim]
    first, steps = run.info["shrunk"][0]["step"], range(SHRINKING.steps or 0)
    # A pipeline ends that many more steps without the dead rank's sum, or lacks one that it had begun
    late = algorithm.max_staleness
    assert late is not None and AT_STEP - late <= first <= AT_STEP + late
    one, other = (found[rank].value for rank in remain)
    # In a pipeline one rank may have ended a step more than the other when the third left
    both = one.keys() & other.keys()
    assert len(both) >= len(steps) - late
    assert all(torch.equal(one[step], other[step]) for step in both), "replicas are equal at every step"
    assert run.folder is not None
    newest = complete_checkpoints(run.folder)[0]
    assert (newest.step, newest.num_ranks) == (steps[-3], 2), "they go on keeping what two ranks need"
    if isinstance(algorithm, SynchronousSGD):
        for step, parameters in enumerate(expected(first)):
            assert torch.allclose(one[step], parameters, rtol=1e-11, atol=1e-13), f"step {step}"


def test_the_lowest_rank_that_remains_is_the_model() -> None:
    """The others may have a step that they had not finished, or had half applied."""
    found, run = train(SynchronousSGD(), 1, replace(SHRINKING, check_replicas=0), drifts=2)
    assert run.info["shrunk"] == [{"step": AT_STEP, "ranks": [0, 2], "weights_of": 0}]
    one, other = (found[rank].value for rank in (0, 2))
    assert not torch.equal(one[AT_STEP - 1], other[AT_STEP - 1]), "it did not go astray"
    assert all(torch.equal(one[step], other[step]) for step in range(AT_STEP, SHRINKING.steps or 0))


# So that a rank that is late for rounds computes enough steps to be killed
LONGER = replace(SHRINKING, on_failure="stop", steps=60)


def final_of(outcome: Any) -> Tensor:
    assert outcome.error is None, outcome.trace
    final: Tensor = outcome.value[max(outcome.value)]
    return final


@pytest.mark.parametrize(("quorum", "victim"), [("majority", 0), ("solo", 1)])
def test_a_quorum_goes_on_without_a_rank_unasked(quorum: Any, victim: int) -> None:
    """Rank 0 too, which counts the ranks that are ready."""
    found, run = train(PartialAllReduce(quorum=quorum), victim, LONGER)
    one, other = found.values()
    assert torch.equal(final_of(one), final_of(other)), "each round is applied by both"
    assert (run.info["status"], [row["rank"] for row in run.info["departures"]]) == ("finished", [victim])
    assert [len(row["ranks"]) for row in run.info["shrunk"]] == [2]


# In this process; what is applied, by round
_weighed: dict[str, dict[int, float]] = {
    "computed": {},
    "applied": {},
    "left over": {},
}


def samples(gradient: Gradient, ctx: Context) -> float:
    """Number of minibatches in a gradient: its weight is their share of a global batch."""
    return float(gradient.tail()[WEIGHT]) * ctx.num_workers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed(Wrapper):
    """Another algorithm, whose gradients are weighed: how many samples are in what it computes, applies and discards."""

    def worker(self, ctx: Context) -> Program:
        program, answer, weight = self.inner.worker(ctx), None, 0.0
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                return
            match request:
                case Apply(gradient):
                    weight = samples(gradient, ctx)
                case EndStep(step):
                    _weighed["applied"][step] = weight  # of a round that is held again, the later
                case Discard(gradient) if (ctx.num_steps or 0) - 1 in _weighed["applied"]:  # else it was merged
                    _weighed["left over"][len(_weighed["left over"])] = samples(gradient, ctx)
            answer = yield request
            if isinstance(request, Backward):
                _weighed["computed"][len(_weighed["computed"])] = samples(answer, ctx)
                _dealt.extend(_begun)


_begun: list[int] = []  # places in the order of the data of this process's newest minibatch
_dealt: list[int] = []  # and of all whose gradients it has computed


def train_weighed(job: Job) -> tuple[dict[str, dict[int, float]], list[int]]:
    minibatch = LocalTraining.minibatch

    def noting(self: LocalTraining, step: int, rank: int | None = None) -> list[MicroBatch]:
        sampler, mine = self.sampler, self.rank if rank is None else rank
        first = sampler.samples_before(step) + sum(sampler.share_size(step, other) for other in range(mine))
        _begun[:] = range(first, first + sampler.share_size(step, mine))
        return minibatch(self, step, rank)

    LocalTraining.minibatch = noting  # type: ignore[method-assign]
    run_rank(job)
    return _weighed, _dealt


ROUNDS, BEFORE_DEATH = 40, 10


class LateAndCounted(Late):
    """The MLP, late on odd ranks; a file says that rank 0 has taken some steps."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        if self.count == BEFORE_DEATH and rank_here() == 0:
            self.path.touch()
        return super().forward(x)


class DiesAtFirst(tiny.FailsAt):
    """The MLP, whose process is killed in its first minibatch, when the others have taken some steps."""

    def __init__(self, path: Path) -> None:
        super().__init__(None, 0)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            within(30, self.path.exists)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


@pytest.mark.parametrize("quorum", ["solo", "majority"])
def test_those_who_remain_of_a_quorum_lose_no_gradient(quorum: Any, tmp_path: Path) -> None:
    """Rank 2 never has one: every sample that the others compute is in one round, also in the round that its death broke."""
    how, path = replace(LONGER, steps=ROUNDS, optimizer=tiny.sgd, checkpoint_every=None), tmp_path / "on the way"
    problem = tiny.problem(partial(LateAndCounted, path))
    job = make_job("torch", 4, Weighed(inner=PartialAllReduce(quorum=quorum)), problem, how)
    dying = replace(job, problem=tiny.problem(partial(DiesAtFirst, path)))
    found = outcomes([(train_weighed, (dying if rank == 2 else job,)) for rank in range(4)])
    assert set(found) == {0, 1, 3}
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
    rounds: dict[int, float] = {}
    for outcome in found.values():
        assert all(
            rounds.setdefault(step, weight) == pytest.approx(weight)
            for step, weight in outcome.value[0]["applied"].items()
        )
    assert len(rounds) == how.steps
    computed, left = (
        sum(sum(outcome.value[0][name].values()) for outcome in found.values()) for name in ("computed", "left over")
    )
    assert sum(rounds.values()) + left == pytest.approx(computed)
    places = [place for outcome in found.values() for place in outcome.value[1]]
    assert len(places) == len(set(places)) == round(computed * (HOW.batch_size or 0)), (
        "no sample of an epoch is dealt twice"
    )
    assert Run.load(job.folder).info["shrunk"][0]["step"] > 0, "they had gone on for a while"


class WaitsForADeath(tiny.FailsAt):
    """The MLP, whose first minibatch lasts until a file exists."""

    def __init__(self, path: str) -> None:
        super().__init__(None, 0)
        self.path = Path(path)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            within(30, self.path.exists)
        return super().forward(x)


def dies_measuring(job: Job) -> None:
    """Train, and be killed when the remaining ranks measure their network again."""
    shrink.measure_link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    run_rank(job)


def test_a_second_death_while_links_are_measured_costs_no_gradient(tmp_path: Path) -> None:
    """Neither of the killed ranks has given one."""
    how, path = replace(LONGER, steps=ROUNDS, optimizer=tiny.sgd, checkpoint_every=None), tmp_path / "on the way"
    problem = tiny.problem(partial(LateAndCounted, path))
    measured = Auto(candidates=(Ring(codec=Truncate16()),))  # with a codec it never takes the library's own sum
    job = make_job("torch", 4, Weighed(inner=PartialAllReduce(quorum="solo", collective=measured)), problem, how)
    first = replace(job, problem=tiny.problem(partial(DiesAtFirst, path)))
    second = replace(
        job, problem=tiny.problem(partial(WaitsForADeath, str(Path(job.folder) / FOLDER / left_name(2, 0))))
    )
    found = outcomes(
        [(train_weighed, (job,)), (train_weighed, (job,)), (train_weighed, (first,)), (dies_measuring, (second,))]
    )
    assert set(found) == {0, 1}
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
    assert [row["ranks"] for row in Run.load(job.folder).info["shrunk"]] == [[0, 1]]
    computed, left = (
        sum(sum(outcome.value[0][name].values()) for outcome in found.values()) for name in ("computed", "left over")
    )
    assert sum(found[0].value[0]["applied"].values()) + left == pytest.approx(computed)


def test_a_quorum_that_those_who_remain_are_not_is_told() -> None:
    found, _ = train(PartialAllReduce(quorum=3), 2, LONGER)
    for outcome in found.values():
        assert isinstance(outcome.error, ConfigError), outcome.trace
        assert "rank 2 has left" in str(outcome.error)
        assert "cannot continue with 2 ranks: quorum=3 of 2 ranks" in str(outcome.error)


def test_a_quorum_of_all_ends_as_the_synchronous_algorithm() -> None:
    found, run = train(PartialAllReduce(quorum="all"), 1, replace(SHRINKING, on_failure="stop", timeout_s=3.0))
    assert all(isinstance(outcome.error, PeerFailed) for outcome in found.values())
    assert "shrunk" not in run.info


@by_turns(
    [
        LocalSGD(every=4, after=6),
        StreamingDiLoCo(every=4, fragments=2, delay=1),
        DPSGD(),
        SlowMo(every=4, inner=DPSGD()),
        GradientTracking(),
        StochasticGradientPush(),
        ChocoSGD(),
        NoLoCo(every=2),
        SPARTA(fraction=0.3),
        FedAvg(every=4, fraction=1.0),
        FedAvg(every=4, fraction=0.6),
        FedProx(every=4, fraction=0.6),
    ],
    0,
)
def test_ranks_that_step_alone_go_on_from_their_mean(algorithm: Algorithm, runtime: RuntimeName) -> None:
    """Sums, mixed sums and messages are on both runtimes; what an algorithm keeps is no runtime's."""
    found, run = train(algorithm, 1, runtime=runtime)
    one, other = found[0], found[2]
    assert [row["ranks"] for row in run.info["shrunk"]] == [[0, 2]]
    assert not torch.equal(one.value[0], other.value[0]) or getattr(algorithm, "after", 0), (
        "replicas were each rank's own"
    )
    final_of(one), final_of(other)
    assert run.info["status"] == "finished"
    assert run.evaluations()[-1]["step"] == (HOW.steps or 0) - 1


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_at_steps_of_their_own_go_on_without_one(victim: int, runtime: RuntimeName) -> None:
    """In a ring of three, rank 0 answers and the others ask. A rank that was behind leaves out steps."""
    found, run = train(ADPSGD(), victim, replace(SHRINKING, steps=60, checkpoint_every=20), runtime=runtime)
    remain = [rank for rank in range(NUM_RANKS) if rank != victim]
    assert [row["ranks"] for row in run.info["shrunk"]] == [remain]
    assert run.info["status"] == "finished"
    for rank in remain:
        assert found[rank].error is None, found[rank].trace
        assert max(found[rank].value) == 59
    assert run.evaluations()[-1]["step"] == 59
    assert run.folder is not None
    newest = complete_checkpoints(run.folder)[0]
    assert (newest.step, newest.num_ranks) == (39, 2), "they go on keeping what two ranks need"


def test_whose_parameters_are_taken() -> None:
    """Rank 1 of three has left; rank 2 has finished one step less than rank 0."""
    last_steps = {0: 7, 2: 6}
    assert shrink._taken(SynchronousSGD(), last_steps) == shrink._taken(DPSGD(), last_steps) == [0]
    assert shrink._taken(PartialAllReduce(quorum="solo"), last_steps) == [0], "its replicas are equal"
    assert shrink._taken(ADPSGD(), last_steps) == [0, 2]


def test_what_all_go_on_from_is_the_mean_of_those_that_were_not_behind() -> None:
    """Rank 2 went astray by 1 in every parameter: half of that is in the mean."""
    found, run = train(LocalSGD(every=AT_STEP + 1), 1, replace(SHRINKING, optimizer=None, lr=1e-12), drifts=2)
    first = run.info["shrunk"][0]["step"]
    assert first == AT_STEP, "they had waited for rank 1 behind the step in which it was killed"
    one, other = (found[rank].value for rank in (0, 2))
    assert torch.allclose(other[AT_STEP - 1] - one[AT_STEP - 1], torch.ones(107).double(), atol=1e-6), (
        "it did not go astray"
    )
    for after in (one, other):
        assert torch.allclose(after[first], one[AT_STEP - 1] + 0.5, atol=1e-6)


def averaged_each_step(outer_lr: float, outer_momentum: float) -> list[Tensor]:
    """DiLoCo with H=1 in one process: a momentum for each rank, and rank 1 leaves in the midst of a step.

    The other ranks have then taken their local steps. Their mean is the new anchor, and they take the step again as two
    ranks. With an outer step of 1 and no outer momentum it is local SGD.
    """
    ranks = [reference.begin(PROBLEM, SHRINKING)[:2] for _ in range(NUM_RANKS)]
    batch_size, num_samples = SHRINKING.batch_size or 0, PROBLEM.num_samples()
    three = Sampler(num_samples, batch_size, NUM_RANKS, SHRINKING.seed)
    two = Sampler(num_samples, batch_size, 2, SHRINKING.seed, origin=(AT_STEP, three.samples_before(AT_STEP)))

    def step_alone(members: list[int], sampler: Sampler, step: int) -> None:
        for place, (model, optimizer) in enumerate(ranks[member] for member in members):
            optimizer.zero_grad()
            PROBLEM.batch_loss(model, fetch(PROBLEM.train_data(), sampler.share(step, place))).backward()
            optimizer.step()

    def mean(members: list[int]) -> Tensor:
        models = [ranks[member][0] for member in members]
        return torch.stack([parameters_to_vector(model.parameters()).detach() for model in models]).mean(0)

    def spread(members: list[int], parameters: Tensor) -> Tensor:
        for member in members:
            vector_to_parameters(parameters.clone(), ranks[member][0].parameters())
        return parameters

    anchor = mean([0])
    momentum, found = torch.zeros_like(anchor), []
    for step in range(SHRINKING.steps or 0):
        members, sampler = ([0, 1, 2], three) if step < AT_STEP else ([0, 2], two)
        if step == AT_STEP:
            step_alone([0, 1, 2], three, step)
            anchor = spread(members, mean(members))
        step_alone(members, sampler, step)
        change = anchor - mean(members)
        momentum = outer_momentum * momentum + change
        anchor = spread(members, anchor - outer_lr * (change + outer_momentum * momentum))
        found.append(anchor)
    return found


@pytest.mark.parametrize(
    ("algorithm", "outer"),
    [(LocalSGD(every=1), (1.0, 0.0)), (DiLoCo(every=1, outer_lr=0.6, outer_momentum=0.5), (0.6, 0.5))],
    ids=str,
)
def test_ranks_with_equal_parameters_keep_their_own_momenta(algorithm: Algorithm, outer: tuple[float, float]) -> None:
    """And the outer momentum."""
    found, run = train(algorithm, 1)
    assert run.info["shrunk"] == [{"step": AT_STEP, "ranks": [0, 2], "weights_of": 0}]
    for step, parameters in enumerate(averaged_each_step(*outer)):
        for rank in (0, 2):
            ours = found[rank].value[step]
            assert torch.allclose(ours, parameters, rtol=1e-11, atol=1e-13), f"rank {rank}, step {step}"


def test_a_rank_that_trains_alone_is_not_missed() -> None:
    found, run = train(NoCommunication(), 2, replace(HOW, optimizer=tiny.momentum))
    for outcome in found.values():
        final_of(outcome)
    assert (run.info["status"], [row["rank"] for row in run.info["departures"]]) == ("finished", [2])
    assert "shrunk" not in run.info


def train_ahead(job: Job) -> dict[int, Tensor]:
    """Train; when one is killed, this rank has been at two meetings more than the others: a death may break one for some alone."""
    place = shrink.Shrinker._place

    def ahead(self: shrink.Shrinker, ctx: Context, members: Membership, last: int) -> dict[str, int]:
        members.num_texts += 2
        return place(self, ctx, members, last)

    shrink.Shrinker._place = ahead  # type: ignore[method-assign]
    return train_shown(job)


def test_a_meeting_that_the_death_broke_is_no_ranks_next_one() -> None:
    job = make_job("torch", NUM_RANKS, Shown(inner=SynchronousSGD()), PROBLEM, replace(SHRINKING, timeout_s=10.0))
    dying = replace(job, problem=tiny.problem(partial(DiesAt, AT_STEP)))
    found = outcomes([(train_ahead, (job,)), (train_shown, (dying,)), (train_shown, (job,))])
    assert torch.equal(final_of(found[0]), final_of(found[2]))
    assert Run.load(job.folder).info["status"] == "finished"


def train_with_another_lane(job: Job) -> dict[int, Tensor]:
    """Train; when one is killed, this rank has opened a lane that the others have not."""
    place = shrink.Shrinker._place

    def ahead(self: shrink.Shrinker, *args: Any) -> dict[str, int]:
        self._transport._lanes.append(self._transport._lanes[0])  # type: ignore[attr-defined]  # gloo's
        return place(self, *args)

    shrink.Shrinker._place = ahead  # type: ignore[method-assign]
    return train_shown(job)


def test_all_lanes_are_opened_anew() -> None:
    job = make_job(
        "torch",
        NUM_RANKS,
        Shown(inner=LayerwiseSGD(bucket_bytes=100, lanes=2)),
        PROBLEM,
        replace(SHRINKING, timeout_s=10.0),
    )
    dying = replace(job, problem=tiny.problem(partial(DiesAt, AT_STEP)))
    found = outcomes([(train_with_another_lane, (job,)), (train_shown, (dying,)), (train_shown, (job,))])
    assert torch.equal(final_of(found[0]), final_of(found[2]))


def test_one_that_is_left_alone_has_no_link() -> None:
    job = make_job("torch", 2, Shown(inner=SynchronousSGD(collective=Auto())), PROBLEM, SHRINKING)
    dying = replace(job, problem=tiny.problem(partial(DiesAt, AT_STEP)))
    found = outcomes([(train_shown, (job,)), (train_shown, (dying,))])
    assert len(found[0].value) == SHRINKING.steps, found[0].trace


def dies_shrinking(job: Job, moment: str) -> None:
    """Train, and be killed when the others are about to meet, or have met."""
    from workbench.runtimes.transport.mpi import MpiTransport

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "before":
        torch_dist.TorchTransport.shrink = MpiTransport.shrink = die  # type: ignore[method-assign]
    else:
        shrink.Shrinker._take_parameters = die  # type: ignore[method-assign]
    run_rank(job)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("moment", ["before", "met"])
def test_a_second_death_while_they_meet(moment: str, runtime: RuntimeName) -> None:
    """gloo alone would wait for it for half an hour."""
    job = make_job(runtime, 4, SynchronousSGD(), PROBLEM, replace(SHRINKING, timeout_s=20))
    dying = replace(job, problem=tiny.problem(partial(DiesAt, AT_STEP)))
    found = outcomes(
        [(run_rank, (job,)), (run_rank, (dying,)), (run_rank, (job,)), (dies_shrinking, (job, moment))], runtime=runtime
    )
    assert set(found) == {0, 2}
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
        assert outcome.seconds < 60
    run = Run.load(job.folder)
    assert run.info["status"] == "finished"
    assert run.info["shrunk"][-1]["ranks"] == [0, 2]
    assert sorted(row["rank"] for row in run.info["departures"]) == [1, 3]


def sums_in_one_call(job: Job, dies: bool) -> list[bool]:
    """Train, where every sum is a call of MPI's that cannot be left, and be killed when the others are in one of them.

    Returns whether the abandoned communicators had been revoked by then.
    """
    from workbench.runtimes.transport import mpi

    number, to_host, shrunk, revoked = [0], mpi.MpiTransport._to_host, mpi.shrunk, list[bool]()

    def noting(communicator: Any, *more: Any) -> list[Any]:
        revoked.append(communicator.Is_revoked())
        return shrunk(communicator, *more)

    def counting(self: Any, flat: Tensor) -> Tensor:
        number[0] += self.bound
        if dies and number[0] == AT_STEP:
            time.sleep(0.5)  # until the others wait there for this one
            os.kill(os.getpid(), signal.SIGKILL)
        return to_host(self, flat)

    mpi.MpiTransport._to_host, mpi.shrunk = counting, noting  # type: ignore[method-assign]
    run_rank(job)
    return revoked


@pytest.mark.mpi
@pytest.mark.parametrize("victim", [1, 3])
def test_who_waits_in_a_call_for_a_rank_that_waits_in_vain_is_let_go(victim: int) -> None:
    """Of four ranks in a sum MPI need not tell all that one is gone (Open MPI does): what is revoked ends for all."""
    job = make_job("mpi", 4, SynchronousSGD(), PROBLEM, replace(SHRINKING, timeout_s=20))
    found = outcomes([(sums_in_one_call, (job, rank == victim)) for rank in range(4)], runtime="mpi")
    assert set(found) == set(range(4)) - {victim}
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
        assert outcome.value == [True]
    assert [len(row["ranks"]) for row in Run.load(job.folder).info["shrunk"]] == [3]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_it_is_not_the_default(runtime: RuntimeName) -> None:
    """The others leave with one error that names the rank, even if they could continue."""
    found, run = train(SynchronousSGD(), 1, replace(SHRINKING, on_failure="stop", timeout_s=10.0), runtime=runtime)
    for outcome in found.values():
        assert isinstance(outcome.error, PeerFailed) and "rank 1's process is gone" in str(outcome.error), outcome.trace
    assert "shrunk" not in run.info


@pytest.mark.parametrize("algorithm", [AsyncSGD(), NoCommunication()], ids=str)
def test_algorithms_that_cannot_say_so(algorithm: Algorithm) -> None:
    job = make_job("torch", 1, algorithm, PROBLEM, SHRINKING)
    found = outcomes([(run_rank, (job,))])
    assert isinstance(found[0].error, ConfigError | PeerFailed)
    assert "does not shrink" in str(found[0].error)
