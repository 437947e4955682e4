"""Settings of the update with every algorithm, against plain torch loops of its ranks: each setting is right, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK, Wrapper, relative_error, train
from tests.laws.variants import name_of, variants
from workbench.algorithms import (
    ADPSGD,
    DPSGD,
    SPARTA,
    AdaptiveDelaySGD,
    AdasumSGD,
    ApplyOrder,
    AsyncSGD,
    BackupSGD,
    ChocoSGD,
    Constant,
    DeAR,
    DelayCompensatedSGD,
    DeMo,
    DiLoCo,
    EagerDiLoCo,
    FedAvg,
    GradientTracking,
    LayerwiseSGD,
    LocalSGD,
    NoCommunication,
    NoLoCo,
    OnlineBackupSGD,
    PartialAllReduce,
    PipeSGD,
    Quorum,
    SerialSGD,
    SignSGD,
    SlowMo,
    SoftsyncSGD,
    StaleSGD,
    StaleSynchronousSGD,
    StochasticGradientPush,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.errors import ConfigError
from workbench.laws.sentences import assert_near
from workbench.ops import Apply, Program, Request
from workbench.problems.base import Problem, Sampler
from workbench.problems.loading import fetch
from workbench.program import Algorithm, Context, Update, replace_requests
from workbench.rng import derive_seed
from workbench.runtimes.control.reconfigure import changed
from workbench.runtimes.simulator.simulation import Simulation
from workbench.runtimes.user_loop.trainer import Trainer
from workbench.settings import Settings

STEPS, P, BATCH, LR = 7, 3, 4, 0.05
LARGE = 0.4  # the norm of a rank's own gradient is below it in some steps, and above it in others
settings = partial(Settings, steps=STEPS, batch_size=BATCH, timeout_s=30, evaluate_every=0)
decayed = partial(torch.optim.SGD, lr=LR, weight_decay=0.3)
sgd = partial(torch.optim.SGD, lr=LR)

CELLS: dict[str, Settings] = {
    "clip_norm": settings(optimizer=sgd, clip_norm=0.1),
    "max_grad_norm, clip": settings(optimizer=sgd, on_bad_gradient="clip", max_grad_norm=LARGE),
    "max_grad_norm, skip": settings(optimizer=sgd, on_bad_gradient="skip", max_grad_norm=LARGE),
    "weight decay": settings(optimizer=decayed),
    "schedule": settings(optimizer=sgd, schedule=tiny.step_lr),
    "num_micro": settings(optimizer=sgd, num_micro=3),
    "bf16": settings(optimizer=sgd, precision="bf16"),
    "fp16": settings(optimizer=sgd, precision="fp16"),
}


@final
class PlainRanks:
    """Ranks of a plain torch loop, each with a model, an optimizer and a schedule. No requests, buffers or runtimes."""

    def __init__(self, problem: Problem, how: Settings, num_ranks: int) -> None:
        torch.manual_seed(derive_seed(how.seed, "initial-weights"))
        model = problem.model()
        self.problem, self.how, self.num = problem, how, num_ranks
        self.models = [deepcopy(model) for _ in range(num_ranks)]
        self.weights = [[*model.parameters()] for model in self.models]
        assert how.optimizer is not None
        self.optimizers = [how.optimizer(weights) for weights in self.weights]
        self.schedules = [None if how.schedule is None else how.schedule(one) for one in self.optimizers]
        self.scales = [2.0**16] * num_ranks
        self.leaves_out_overflow = False  # each rank its own, as with servers: no rank sees the sum
        self.updates: list[Tensor] = []  # rank 0's parameters after each of its updates
        self.sampler = Sampler(problem.num_samples(), BATCH, num_ranks, how.seed)

    def gradient(self, rank: int, step: int) -> list[Tensor] | None:
        """A rank's own mean gradient at its parameters, clipped to `max_grad_norm`; None if it is left out."""
        how, weights = self.how, self.weights[rank]
        batch = fetch(self.problem.train_data(), self.sampler.share(step, rank))
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(how.precision)
        with torch.autocast("cpu", kind, enabled=kind is not None):
            loss = self.problem.batch_loss(self.models[rank], batch)
        scale = self.scales[rank] if how.precision == "fp16" else 1.0
        found = [grad / scale for grad in torch.autograd.grad(loss * scale, weights)]
        if self.leaves_out_overflow and not is_good(found):
            self.scales[rank] /= 2
            return None
        if how.max_grad_norm is not None:
            norm = norm_of(found)
            if norm > how.max_grad_norm and how.on_bad_gradient == "skip":
                return None
            found = [grad * min(1.0, how.max_grad_norm / (norm + 1e-6)) for grad in found]
        return found

    def gradients(self, step: int) -> list[list[Tensor] | None]:
        """Each rank's own."""
        return [self.gradient(rank, step) for rank in range(self.num)]

    def update(self, rank: int, gradient: list[Tensor] | None, *, clips: bool = True) -> None:
        """Clip, step, schedule: the order of every torch loop. A gradient that is not finite halves the loss scale."""
        bad = gradient is not None and not is_good(gradient)
        if bad:
            self.scales[rank] /= 2
        for number, param in enumerate(self.weights[rank]):
            param.grad = None if gradient is None else gradient[number].clone()
        if self.how.clip_norm is not None and clips:
            nn.utils.clip_grad_norm_(self.weights[rank], self.how.clip_norm)
        if not bad:
            self.optimizers[rank].step()
        schedule = self.schedules[rank]
        if schedule is not None:
            schedule.step()
        if rank == 0:
            self.updates.append(self.flat())

    def average(self, counts: list[int] | None = None, anchor: Tensor | None = None) -> None:
        """Set all ranks' parameters to their mean, by these weights; to the anchor if all weights are 0."""
        counts = counts or [1] * self.num
        if not any(counts):
            assert anchor is not None
            self.set(anchor)
            return
        with torch.no_grad():
            for of_ranks in zip(*self.weights, strict=True):
                mean = sum(count * param for count, param in zip(counts, of_ranks, strict=True)) / sum(counts)
                for param in of_ranks:
                    param.copy_(mean)

    def flat(self, rank: int = 0) -> Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.weights[rank]])

    def set(self, values: Tensor) -> None:
        """Set all ranks' parameters."""
        for weights in self.weights:
            nn.utils.vector_to_parameters(values.clone(), weights)


def norm_of(gradient: list[Tensor]) -> float:
    return float(torch.cat([grad.reshape(-1) for grad in gradient]).norm())


def mean_of(gradients: list[list[Tensor] | None]) -> list[Tensor] | None:
    used = [gradient for gradient in gradients if gradient is not None]
    return [sum(parts) / len(used) for parts in zip(*used, strict=True)] if used else None  # type: ignore[misc]


Rule = Callable[[PlainRanks], list[Tensor]]  # -> rank 0's parameters after each step, and at the end


def mean_gradient(delay: int = 0, *, served: bool = False) -> Rule:
    """w <- w - lr mean_i g_i(w of `delay` updates ago); what is in flight at the end is applied."""

    def rule(ranks: PlainRanks) -> list[Tensor]:
        ranks.leaves_out_overflow = served
        waiting: list[list[Tensor] | None] = []
        seen = []
        for step in range(STEPS):
            waiting.append(mean_of(ranks.gradients(step)))
            if len(waiting) > delay:
                gradient = waiting.pop(0)
                for rank in range(ranks.num):
                    ranks.update(rank, gradient)
            seen.append(ranks.flat())
        for gradient in waiting:
            for rank in range(ranks.num):
                ranks.update(rank, gradient)
        return [*seen, ranks.flat()]

    return rule


def local_steps(
    every: int | None, slow: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None, *, by_samples: bool = False
) -> Rule:
    """Each rank steps with its own gradient. Every H steps: the mean, or the outer step `slow(a, mean, m)`, then the mean.

    by_samples: the mean weighs a rank by the gradients that it used.
    """

    def rule(ranks: PlainRanks) -> list[Tensor]:
        anchor, seen = ranks.flat(), []
        momentum, used = torch.zeros_like(anchor), [0] * ranks.num
        for step in range(STEPS):
            for rank, gradient in enumerate(ranks.gradients(step)):
                ranks.update(rank, gradient)
                used[rank] += gradient is not None
            if every is not None and (step + 1) % every == 0:
                ranks.average(used if by_samples else None, anchor)
                used = [0] * ranks.num
                anchor = ranks.flat() if slow is None else anchor
                if slow is not None:
                    anchor = slow(anchor, ranks.flat(), momentum)
                    ranks.set(anchor)
            seen.append(ranks.flat())
        if every is not None:
            ranks.average(used if by_samples and STEPS % every else None, anchor)
        return [*seen, ranks.flat()]

    return rule


def outer(lr: float, mu: float, *, nesterov: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """m <- mu m + (a - mean); a <- a - lr m, or with Nesterov's form a <- a - lr ((a - mean) + mu m)."""

    def slow(anchor: Tensor, mean: Tensor, momentum: Tensor) -> Tensor:
        change = anchor - mean
        momentum.mul_(mu).add_(change)
        return anchor - lr * (change + mu * momentum if nesterov else momentum)

    return slow


def tracking(ranks: PlainRanks) -> list[Tensor]:
    """y_i <- W y + g_i - the last g_i,   w_i <- W w - lr y_i, with all weights 1/3. One that is left out: its last one."""
    nothing = [torch.zeros_like(param) for param in ranks.weights[0]]
    trackers, last, seen = [nothing] * ranks.num, [nothing] * ranks.num, []
    for step in range(STEPS):
        mean = mean_of([*trackers])
        assert mean is not None
        newest = ranks.gradients(step)
        ranks.average()
        for rank, gradient in enumerate(newest):
            used = gradient if gradient is not None and is_good(gradient) else last[rank]
            trackers[rank] = [y + g - before for y, g, before in zip(mean, used, last[rank], strict=True)]
            last[rank] = used
            bad = gradient is not None and not is_good(gradient)
            ranks.update(rank, gradient if bad else trackers[rank])
        seen.append(ranks.flat())
    ranks.average()
    return [*seen, ranks.flat()]


def combined(
    combine: Callable[[list[dict[str, Any]], list[list[Tensor] | None]], list[Tensor]], *, clips: bool = False
) -> Rule:
    """w <- w - lr u, with u from all ranks' gradients. Where u is no gradient, nothing clips it."""

    def rule(ranks: PlainRanks) -> list[Tensor]:
        states: list[dict[str, Any]] = [{} for _ in range(ranks.num)]
        seen = []
        for step in range(STEPS):
            gradients = ranks.gradients(step)
            u = combine(states, gradients) if any(one is not None for one in gradients) else None
            for rank in range(ranks.num):
                ranks.update(rank, u, clips=clips)
            seen.append(ranks.flat())
        return [*seen, ranks.flat()]

    return rule


def is_good(gradient: list[Tensor] | None) -> bool:
    return gradient is not None and all(bool(grad.isfinite().all()) for grad in gradient)


def votes(beta: float) -> Any:
    """v_i <- beta v_i + (1 - beta) g_i,   u = sign(sum_i sign(v_i)); a rank whose gradient is left out does not vote."""

    def combine(states: list[dict[str, Any]], gradients: list[list[Tensor] | None]) -> list[Tensor]:
        shapes = next(gradient for gradient in gradients if gradient is not None)
        total = [torch.zeros_like(grad) for grad in shapes]
        for state, gradient in zip(states, gradients, strict=True):
            if gradient is None:
                continue
            if not is_good(gradient):
                total = [part * math.nan for part in total]
                continue
            old = state.get("v", [torch.zeros_like(grad) for grad in shapes])
            state["v"] = [beta * before + (1 - beta) * grad for before, grad in zip(old, gradient, strict=True)]
            total = [part + v.sign() for part, v in zip(total, state["v"], strict=True)]
        return [torch.where(part.isnan(), part, part.sign()) for part in total]

    return combine


def decoupled(beta: float, chunk: int, top_k: int, *, sign: bool = True) -> Any:
    """m_i <- beta m_i + g_i,   q_i = C(m_i),   m_i <- m_i - q_i,   u = sign(mean_i q_i) or u = mean_i q_i, by a DCT in float64."""
    number = torch.arange(chunk, dtype=torch.float64)
    basis = torch.cos(math.pi / chunk * number[:, None] * (number + 0.5)) * math.sqrt(2 / chunk)
    basis[0] /= math.sqrt(2)

    def largest(values: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(values, (0, -len(values) % chunk)).view(-1, chunk)
        parts = rows @ basis.to(values).T
        kept = torch.zeros_like(parts).scatter(1, parts.abs().topk(top_k).indices, 1.0)
        return ((parts * kept) @ basis.to(values)).view(-1)[: len(values)]

    def combine(states: list[dict[str, Any]], gradients: list[list[Tensor] | None]) -> list[Tensor]:
        shapes = next(gradient for gradient in gradients if gradient is not None)
        ordered = [[0 * part for part in shapes] if one is None else one for one in gradients]
        flats = [torch.cat([part.reshape(-1) for part in reversed(one)]) for one in ordered]  # as backward finds them
        if not all(bool(flat.isfinite().all()) for flat in flats):
            return [torch.full_like(grad, math.nan) for grad in shapes]
        total = torch.zeros_like(flats[0])
        for state, flat in zip(states, flats, strict=True):
            momentum = beta * state.get("m", torch.zeros_like(flat)) + flat
            sent = largest(momentum)
            state["m"] = momentum - sent
            total += sent
        u = total.sign() if sign else total / len(flats)
        parts = u.split([grad.numel() for grad in reversed(shapes)])
        return [part.view_as(grad) for part, grad in zip(reversed(parts), shapes, strict=True)]

    return combine


def adaptive_sum(_states: list[dict[str, Any]], gradients: list[list[Tensor] | None]) -> list[Tensor]:
    """A(A(g_0, g_2), g_1), for each tensor: the tree of three ranks."""

    def add(x: Tensor, y: Tensor) -> Tensor:
        dot, xx, yy = (x * y).sum(), (x * x).sum(), (y * y).sum()
        return (1 - dot / (2 * xx) if xx else 1.0) * x + (1 - dot / (2 * yy) if yy else 1.0) * y

    shapes = next(gradient for gradient in gradients if gradient is not None)
    first, second, third = ([torch.zeros_like(part) for part in shapes] if one is None else one for one in gradients)
    return [add(add(x, z), y) for x, y, z in zip(first, second, third, strict=True)]


# algorithm, ranks, rule: the settings in which its paper's rule fits in a line
RULES: list[tuple[Algorithm, int, Rule]] = [
    (SynchronousSGD(), P, mean_gradient()),
    (LayerwiseSGD(bucket_bytes=200.0, apply=ApplyOrder.ALL), P, mean_gradient()),
    (LayerwiseSGD(bucket_bytes=200.0, apply=ApplyOrder.BACKWARD), P, mean_gradient()),
    (DeAR(bucket_bytes=200.0), P, mean_gradient()),
    (PipeSGD(width=3), P, mean_gradient(delay=2)),
    (AdaptiveDelaySGD(max_delay=0), P, mean_gradient()),
    (StaleSGD(staleness=Constant(0)), P, mean_gradient()),
    (PartialAllReduce(quorum=Quorum.ALL), P, mean_gradient()),
    (BackupSGD(backups=0), P, mean_gradient(served=True)),
    (SoftsyncSGD(), 1, mean_gradient(served=True)),
    (SerialSGD(), 1, mean_gradient()),
    (AsyncSGD(), 1, mean_gradient(served=True)),
    (OnlineBackupSGD(), 1, mean_gradient(served=True)),
    (DelayCompensatedSGD(), 1, mean_gradient(served=True)),
    (StaleSynchronousSGD(), 1, mean_gradient(served=True)),
    (LocalSGD(every=3), P, local_steps(3)),
    (FedAvg(every=3, fraction=1.0), P, local_steps(3, by_samples=True)),
    (SPARTA(fraction=1.0), P, local_steps(1)),
    (DiLoCo(every=3), P, local_steps(3, outer(0.7, 0.9, nesterov=True))),
    (SlowMo(every=3, slow_lr=0.7), P, local_steps(3, outer(0.7, 0.7, nesterov=False))),
    (StreamingDiLoCo(every=STEPS + 1, fragments=1), P, local_steps(STEPS + 1)),
    (EagerDiLoCo(every=STEPS + 1), P, local_steps(STEPS + 1)),
    (NoLoCo(every=STEPS + 1), P, local_steps(STEPS + 1)),
    (DPSGD(overlap=False), P, local_steps(1)),  # a ring of three is complete
    (StochasticGradientPush(), 1, local_steps(None)),
    (ChocoSGD(), 1, local_steps(None)),
    (GradientTracking(), P, tracking),
    (ADPSGD(), 1, local_steps(None)),
    (NoCommunication(), P, local_steps(None)),
    (SignSGD(momentum=0.5), P, combined(votes(0.5))),
    (DeMo(chunk=16, top_k=2), P, combined(decoupled(0.999, 16, 2))),
    (DeMo(chunk=16, top_k=16, sign=False), P, combined(decoupled(0.999, 16, 16, sign=False), clips=True)),
    (AdasumSGD(), P, combined(adaptive_sum)),
]


def large_loss(out: Tensor, labels: Tensor) -> Tensor:
    """So large that the first gradients overflow in fp16."""
    return 20 * nn.functional.cross_entropy(out, labels)


@cache
def problem_of(setting: str) -> Problem:
    """24 samples: each rank has as many. Sixteen bits need float32 parameters."""
    if setting not in ("bf16", "fp16"):
        return tiny.problem(num_samples=24, test=None)
    more = {"loss": large_loss} if setting == "fp16" else {}
    return tiny.problem(float_mlp, train=tiny.data(24, dtype=torch.float32), test=None, **more)


def float_mlp() -> nn.Module:
    return tiny.mlp().float()


@pytest.mark.parametrize(("algorithm", "num_ranks", "rule"), RULES, ids=[name_of(algorithm) for algorithm, *_ in RULES])
@pytest.mark.parametrize("setting", CELLS)
def test_a_setting_is_right_or_refused(setting: str, algorithm: Algorithm, num_ranks: int, rule: Rule) -> None:
    how, problem = CELLS[setting], problem_of(setting)
    if setting in REFUSED.get(kind_of(algorithm), ()):
        with pytest.raises(ConfigError, match=r"use |set |leave it out"):
            train("simulated", num_ranks, algorithm, problem, how)
        return
    found = train("simulated", num_ranks, algorithm, problem, how).parameters[0]
    expected = rule(PlainRanks(problem, how, num_ranks))
    in_float32 = setting in ("bf16", "fp16") or isinstance(algorithm, DeMo)  # it sends float32
    for step in [len(found) - 1] if isinstance(algorithm, DeAR) else range(len(found)):
        if not relative_error(found[step], expected[step]) <= (1e-5 if in_float32 else 1e-12):
            assert_near(f"{name_of(algorithm)} with {setting}", found[step], expected[step], 0.0, f"after step {step}")


def kind_of(algorithm: Algorithm) -> str:
    return "by bucket" if algorithm.requires.buckets.applied_singly else algorithm.update


REFUSED: dict[str, set[str]] = {
    "by bucket": {"clip_norm", "fp16"},
    Update.SERVED: {"clip_norm"},
    Update.DIRECTION: {"clip_norm"},
}


@pytest.mark.parametrize(
    ("algorithm", "num_ranks", "rule"),
    [row for row in RULES if row[0].update != Update.OWN],
    ids=[name_of(algorithm) for algorithm, *_ in RULES if algorithm.update != Update.OWN],
)
def test_the_moving_average_is_over_all_updates(algorithm: Algorithm, num_ranks: int, rule: Rule) -> None:
    """a <- 0.7 a + 0.3 w after each update; it is what the last evaluation evaluates."""
    problem, how = tiny.problem(num_samples=24), settings(optimizer=sgd, ema_decay=0.7)
    ranks = PlainRanks(problem, how, num_ranks)
    average = ranks.flat()
    rule(ranks)
    for parameters in ranks.updates:
        average = 0.7 * average + 0.3 * parameters
    model = tiny.mlp()
    nn.utils.vector_to_parameters(average, model.parameters())
    x, y = tiny.data(9, seed=1)
    expected = float(nn.functional.cross_entropy(model(x), y).detach())
    found = train("simulated", num_ranks, algorithm, problem, how).run.evaluations()[-1]["test_loss"]
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("algorithm", [algorithm for algorithm, *_ in RULES], ids=name_of)
def test_a_loop_of_the_users_refuses_the_same(algorithm: Algorithm) -> None:
    """`wb.Trainer`, in a process of its own. What it takes, it clips as a plain loop does."""
    model = tiny.mlp()
    x, y = tiny.data()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def train_one() -> None:
        with Trainer(model, optimizer, algorithm, clip_norm=0.1) as trainer:
            trainer.step(lambda: nn.functional.cross_entropy(model(x), y))

    if "clip_norm" in REFUSED.get(kind_of(algorithm), ()):
        with pytest.raises(ConfigError, match=r"clip_norm.*(use |set |leave it out)"):
            train_one()
        return
    train_one()
    moved = torch.cat([(param - old).reshape(-1) for param, old in zip(model.parameters(), before, strict=True)])
    assert float(moved.detach().norm()) == pytest.approx(0.1 * LR, rel=1e-4)


def test_a_run_cannot_turn_its_updates_into_directions() -> None:
    with pytest.raises(ConfigError, match="how they are applied"):
        changed(DeMo(sign=False), {"sign": True}, P)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Applies(Wrapper):
    """Another algorithm, whose `Apply` requests are noted."""

    seen: list[Apply] = field(default_factory=list, hash=False)

    def worker(self, ctx: Context) -> Program:
        return replace_requests(self.inner.worker(ctx), self.note)

    def note(self, request: Request) -> Request:
        """Note an `Apply`."""
        if isinstance(request, Apply):
            self.seen.append(request)
        return request


@pytest.mark.parametrize("algorithm", [item for item in variants() if item.update != Update.SERVED], ids=name_of)
def test_own_gradients_are_applied_by_those_that_declare_it(algorithm: Algorithm) -> None:
    wrapped = Applies(inner=algorithm)
    Simulation(wrapped, tiny.problem(test=None), settings(optimizer=sgd), P, network=NETWORK, compute=COMPUTE).run()
    assert (algorithm.update == Update.OWN) == any(request.local for request in wrapped.seen)


def test_each_algorithm_has_its_rule() -> None:
    assert {type(algorithm) for algorithm, *_ in RULES} == {type(algorithm) for algorithm in variants()} | {SerialSGD}
