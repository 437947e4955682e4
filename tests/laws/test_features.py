"""Features of models and settings, on every runtime, against one process with the whole batch in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.reference import serial
from tests.laws.train import (
    REAL,
    assert_same,
    make_job,
    on_all_runtimes,
    on_real_runtimes,
    run_job,
    run_on_ranks,
    train,
)
from tests.laws.variants import name_of
from workbench.algorithms import (
    DPSGD,
    AdasumSGD,
    ApplyOrder,
    ChocoSGD,
    FedAvg,
    GradientTracking,
    LayerwiseSGD,
    PipeSGD,
    StochasticGradientPush,
    SynchronousSGD,
)
from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.laws.sentences import assert_equal_ranks
from workbench.problems.base import Problem, Sampler
from workbench.problems.loading import fetch
from workbench.program import Algorithm
from workbench.rng import derive_seed
from workbench.runtimes.rank.main import Job
from workbench.settings import Settings

ROUNDING = 1e-12
NUM_RANKS = 3
settings = partial(Settings, steps=7, batch_size=3, timeout_s=30, optimizer=tiny.momentum)

WHOLE = (SynchronousSGD(), PipeSGD(width=3))  # algorithms that apply whole gradients
ALGORITHMS = (*WHOLE, LayerwiseSGD(bucket_bytes=150.0, apply=ApplyOrder.ANY))

FEATURES: dict[str, tuple[Problem, Settings, tuple[Algorithm, ...]]] = {
    "accumulation": (tiny.problem(), settings(num_micro=3), ALGORITHMS),
    "more micro-batches than samples": (tiny.problem(), settings(num_micro=5), ALGORITHMS),
    "clipping": (tiny.problem(), settings(clip_norm=0.1), (*WHOLE, LayerwiseSGD(bucket_bytes=0))),
    "clipping of accumulated gradients": (tiny.problem(), settings(clip_norm=0.1, num_micro=2), WHOLE),
    "frozen parameters": (tiny.problem(tiny.frozen_mlp), settings(), ALGORITHMS),
    "a layer used by some": (tiny.problem(tiny.PartlyUsed), settings(steps=12, batch_size=1), ALGORITHMS),
    "a layer used by some, accumulated": (
        tiny.problem(tiny.PartlyUsed),
        settings(batch_size=2, num_micro=2),
        ALGORITHMS,
    ),
    "shared parameters": (tiny.problem(tiny.TiedMLP), settings(), (*ALGORITHMS, LayerwiseSGD(bucket_bytes=0))),
    "fifty parameters": (tiny.problem(tiny.ManyParameters), settings(), (LayerwiseSGD(bucket_bytes=0), *WHOLE)),
    "channels last": (tiny.images(), settings(), (*ALGORITHMS, LayerwiseSGD(bucket_bytes=0))),
    "sparse gradients": (tiny.words(), settings(), ALGORITHMS),
    "step schedule": (tiny.problem(), settings(schedule=tiny.step_lr), ALGORITHMS),
    "one-cycle schedule": (tiny.problem(), settings(schedule=tiny.one_cycle), ALGORITHMS),
}


@on_all_runtimes
@pytest.mark.parametrize("feature", FEATURES)
def test_is_one_process_with_the_whole_batch(feature: str, runtime: str) -> None:
    """On real ranks every second algorithm, the others on the other runtime: of feature, algorithm and runtime every two meet."""
    problem, how, algorithms = FEATURES[feature]
    if runtime != "simulated":
        algorithms = algorithms[(list(FEATURES).index(feature) + REAL.index(runtime)) % 2 :: 2]
    for algorithm in algorithms:
        found = train(runtime, NUM_RANKS, algorithm, problem, how)
        for rank in range(NUM_RANKS):
            assert_same(found.parameters[rank], alone(feature, algorithm.max_staleness), ROUNDING)


@cache
def alone(feature: str, delay: int) -> list[torch.Tensor]:
    """What one process computes, for all runtimes and ranks."""
    problem, how, _ = FEATURES[feature]
    return serial(problem, how, NUM_RANKS, delay)


@on_all_runtimes
@pytest.mark.parametrize("model", [tiny.batchnorm_mlp, tiny.dropout_mlp], ids=["batchnorm", "dropout"])
def test_each_share_has_its_own_statistics_and_dropout(model: Callable[[], torch.nn.Module], runtime: str) -> None:
    """As torch DDP: BatchNorm looks at a rank's own samples, dropout differs from rank to rank; gradients are the mean over all samples."""
    problem, how = tiny.problem(model, num_samples=22), settings(batch_size=4)  # 12 and 10 samples: 4, 4, 4 and 4, 3, 3
    for algorithm in ALGORITHMS:
        found = train(runtime, NUM_RANKS, algorithm, problem, how)
        assert_same(
            found.parameters[0], serial(problem, how, NUM_RANKS, algorithm.max_staleness, by_share=True), ROUNDING
        )


@on_all_runtimes
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_one_worker_is_plain_training(algorithm: Algorithm, runtime: str) -> None:
    how = settings(batch_size=4)
    assert_same(
        train(runtime, 1, algorithm, tiny.problem(), how).parameters[0],
        serial(tiny.problem(), how, 1, algorithm.max_staleness),
        ROUNDING,
    )


@on_all_runtimes
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_what_nobody_uses_never_moves(algorithm: Algorithm, runtime: str) -> None:
    """Its gradient is None, not zero: weight decay would shrink it, momentum would carry it on."""
    problem = tiny.problem(tiny.PartlyUsed)
    slots = {slot.name: slot for slot in build_layout(trainable(tiny.PartlyUsed())).slots}
    first = torch.cat([param.detach().reshape(-1) for param in [*initial(problem).parameters()]])
    found = train(runtime, NUM_RANKS, algorithm, problem, settings(optimizer=partial(tiny.momentum, weight_decay=0.5)))
    numel = slots["never.weight"].numel + slots["never.bias"].numel
    assert torch.equal(found.final[:numel], first[:numel])
    assert not torch.isclose(found.final[numel:], first[numel:]).any()


def initial(problem: Problem) -> torch.nn.Module:
    torch.manual_seed(derive_seed(0, "initial-weights"))
    return problem.model()


def test_a_batch_of_which_one_rank_uses_a_layer_occurs() -> None:
    """The feature above is what it says: with one sample a rank, some steps use `sometimes` on no rank, some on one, some on several."""
    problem, how, _ = FEATURES["a layer used by some"]
    sampler = Sampler(problem.num_samples(), 1, NUM_RANKS, how.seed)
    uses = set()
    for step in range(how.steps or 0):
        shares = [fetch(problem.train_data(), sampler.share(step, rank)) for rank in range(NUM_RANKS)]
        uses.add(sum(bool((x[:, 0] > 1.0).any()) for x, _ in shares))
    assert {0, 1} <= uses


REFUSED: dict[str, tuple[Algorithm, Problem, Settings, str]] = {
    "LBFGS": (SynchronousSGD(), tiny.problem(), settings(optimizer=torch.optim.LBFGS), "closure"),
    "clipping by bucket": (LayerwiseSGD(apply=ApplyOrder.ANY), tiny.problem(), settings(clip_norm=1.0), "apply='all'"),
    "loss scaling by bucket": (
        LayerwiseSGD(apply=ApplyOrder.BACKWARD),
        tiny.problem(),
        settings(precision="fp16"),
        "bf16",
    ),
    "reentrant checkpointing": (
        SynchronousSGD(),
        tiny.problem(tiny.Reentrant, test=None),
        settings(),
        "use_reentrant=False",
    ),
    "unreduced loss": (
        SynchronousSGD(),
        tiny.problem(loss=partial(torch.nn.functional.cross_entropy, reduction="none")),
        settings(),
        "mean",
    ),
    "nothing to train": (SynchronousSGD(), tiny.problem(torch.nn.Tanh), settings(), "no trainable parameter"),
    "module instead of its maker": (SynchronousSGD(), tiny.problem(lambda: "a word"), settings(), "not an nn.Module"),
    "optimizer instance": (SynchronousSGD(), tiny.problem(), settings(optimizer=lambda parameters: 0.1), "torch.optim"),
}


@on_all_runtimes
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_with_what_to_use_instead(case: str, runtime: str) -> None:
    algorithm, problem, how, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        train(runtime, 2, algorithm, problem, how)


@on_all_runtimes
def test_bf16_and_fp16_train(runtime: str) -> None:
    """Half the bits in forward and backward; parameters and sums stay in float32; the loss falls as it does in full precision."""
    problem = tiny.problem(float_mlp, num_samples=48, train=tiny.data(48, dtype=torch.float32), test=None)
    how = Settings(steps=40, batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.3), timeout_s=30)
    full = train(runtime, 2, SynchronousSGD(), problem, how)
    for precision in ("bf16", "fp16"):
        found = train(runtime, 2, PipeSGD(width=2), problem, replace(how, precision=precision))
        assert found.final.dtype == torch.float32
        assert_equal_ranks(
            f"PipeSGD in {precision}: replicas are equal", [steps[-1] for steps in found.parameters], "at the end"
        )
        assert not torch.equal(found.final, full.final)
        last = sum(row["loss"] for row in found.rows(0)[-3:]) / 3
        assert last < 0.8 * found.rows(0)[0]["loss"]
        assert last == pytest.approx(sum(row["loss"] for row in full.rows(0)[-3:]) / 3, rel=0.2)


@pytest.mark.parametrize(
    "algorithm",
    [DPSGD(), GradientTracking(), StochasticGradientPush(), ChocoSGD(), AdasumSGD(), FedAvg(every=2)],
    ids=name_of,
)
def test_a_gradient_that_overflows_costs_its_step_only(algorithm: Algorithm) -> None:
    """The first gradients overflow in fp16, until the loss scale is small enough. Then the loss falls."""
    problem = tiny.problem(
        float_mlp, num_samples=48, train=tiny.data(48, dtype=torch.float32), test=None, loss=large_loss
    )
    how = Settings(steps=40, batch_size=8, optimizer=partial(torch.optim.SGD, lr=1e-3), precision="fp16")
    found = train("simulated", 3, algorithm, problem, how)
    losses = [row["loss"] for row in found.rows(0)]
    torch.testing.assert_close(found.parameters[0][1], found.parameters[0][0], msg="the second step does not overflow")
    assert sum(losses[-3:]) / 3 < 0.6 * losses[0]


def large_loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 300 * torch.nn.functional.cross_entropy(out, labels)


def float_mlp() -> torch.nn.Module:
    return tiny.mlp().float()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_compiled_module_takes_the_same_steps() -> None:
    """On the ranks of one runtime: compiling is the module's affair, not the runtime's."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # noqa: BLE001 - torch's own class for it is private
        pytest.skip(f"no C++ compiler: {error}")
    how = settings(steps=3, num_micro=2)
    for algorithm in (SynchronousSGD(), LayerwiseSGD(bucket_bytes=150.0, apply=ApplyOrder.BACKWARD)):
        compiled = train("torch", 2, algorithm, tiny.problem(), replace(how, compile=True, timeout_s=100.0))
        assert_same(compiled.parameters[0], train("torch", 2, algorithm, tiny.problem(), how).parameters[0], ROUNDING)


@on_real_runtimes
def test_frozen_parameters_and_buffers_are_rank_0s_too(runtime: str) -> None:
    """Every rank's model starts as rank 0's."""
    problem = tiny.problem(tiny.Remembered(unlike_elsewhere), test=None)
    job = make_job(
        runtime, NUM_RANKS, SynchronousSGD(), problem, settings(steps=1, optimizer=partial(torch.optim.SGD, lr=1e-300))
    )
    states = run_on_ranks(train_and_look, job, NUM_RANKS)
    assert {int(state["number"]) for state in states} == {shared_pool(runtime, NUM_RANKS).pids[0]}  # type: ignore[arg-type]
    for name in states[0]:
        if "running" not in name:  # BatchNorm's statistics have seen a batch since
            assert_equal_ranks(f"{name} is rank 0's", [state[name] for state in states], "after step 0")


def unlike_elsewhere() -> torch.nn.Module:
    torch.manual_seed(os.getpid())
    model = tiny.batchnorm_mlp()
    model[0].weight.requires_grad_(False)
    model.register_buffer("mark", torch.tensor([os.getpid() % 2 == 0, True]))
    model.register_buffer("number", torch.tensor(os.getpid()))
    model.register_buffer("nothing", torch.empty(0))
    return model


def train_and_look(job: Job, num_ranks: int) -> dict[str, torch.Tensor]:
    run_job(job, num_ranks)
    return tiny.remembered_state()
