"""A gradient that is not finite, or too large, with every algorithm: named by step, rank and parameter.

The run stops, or the gradient is left out or clipped.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.distributed.pool import shared_pool
from tests.laws import poison, tiny
from tests.laws.train import COMPUTE, NETWORK, make_job, on_real_runtimes, train
from tests.laws.variants import SMALL_BUCKET, name_of, representatives, variants
from workbench.algorithms import ApplyOrder, AsyncSGD, LayerwiseSGD, LocalSGD, PipeSGD, StreamingDiLoCo, SynchronousSGD
from workbench.codecs import QSGD, ErrorFeedback, Linear8, TopK
from workbench.collectives import Once, PowerSGD, Ring
from workbench.errors import ConfigError, Diverged, PeerFailed
from workbench.laws.sentences import assert_equal_ranks, assert_holds, assert_near, steps_that
from workbench.problems.base import Problem, Sampler
from workbench.program import Algorithm, Replicas
from workbench.runtimes.rank.main import run_rank
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

P = 3
HOW = Settings(steps=7, batch_size=3, optimizer=tiny.momentum, seed=5, timeout_s=30)
SKIP = {"on_bad_gradient": "skip"}
NAMED = re.compile(
    r"the gradient of rank (\d+) is not finite at step (\d+): (nan|inf) in 1 of 35 values of body\.2\.weight"
)
# A codec that writes eight bits, or few values, could lose what is wrong with those it is given.
LOSSY = [
    SynchronousSGD(collective=Ring(codec=Linear8())),
    SynchronousSGD(collective=Once(codec=QSGD())),
    SynchronousSGD(collective=Once(codec=ErrorFeedback(codec=TopK(k=5)))),
    SynchronousSGD(collective=PowerSGD(rank=1)),
    LayerwiseSGD(bucket_bytes=SMALL_BUCKET, apply=ApplyOrder.ALL),
    StreamingDiLoCo(every=3, fragments=2, nesterov=False),
    AsyncSGD(shards=3),
]
ALGORITHMS = [*representatives(P), *LOSSY]


how = partial(replace, HOW)


def beginning(problem: Problem) -> nn.Module:
    """The MLP as ranks begin with it."""
    model, simulation = tiny.mlp(), Simulation(SynchronousSGD(), problem, HOW, 1, network=NETWORK, compute=COMPUTE)
    nn.utils.vector_to_parameters(simulation.workers[0].trained.read_parameters(), model.parameters())
    return model


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_it_is_named_by_rank_step_and_parameter(algorithm: Algorithm, value: float) -> None:
    with pytest.raises(Diverged) as found:
        train("simulated", P, algorithm, poison.problem(value), HOW)
    words = NAMED.match(str(found.value))
    assert words, found.value
    rank, step, kind = int(words[1]), int(words[2]), words[3]
    drawn = poison.drawn(algorithm, HOW, P)
    assert (step, rank) in drawn and kind == ("nan" if value != value else "inf")
    if not algorithm.asynchronous:
        assert step == min(drawn)[0], "an earlier one was not seen"


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_one_that_is_left_out_leaves_replicas_equal_and_finite(algorithm: Algorithm) -> None:
    settings = how(**SKIP)
    trained = train("simulated", P, algorithm, poison.problem(), settings)
    ends = [steps[-1] for steps in trained.parameters]
    for rank, steps in enumerate(trained.parameters):
        bad = steps_that([not bool(torch.isfinite(end).all()) for end in steps])
        assert_holds(
            f"{name_of(algorithm)}: what is left out leaves parameters finite",
            not bad,
            f"on rank {rank} after steps {bad}",
        )
    if algorithm.replicas != Replicas.NEVER:
        law = f"{name_of(algorithm)}: what is left out leaves replicas equal"
        assert_equal_ranks(law, ends[: algorithm.roles(P).num_computing], "at the end")
    drawn = poison.drawn(algorithm, settings, P)
    skipped = {
        (row["step"], rank): row["skipped"] for rank in range(P) for row in trained.rows(rank) if "skipped" in row
    }
    assert skipped and set(skipped) <= drawn
    assert set(skipped.values()) == {"nan in 1 of 35 values of body.2.weight"}
    if not algorithm.asynchronous:
        assert set(skipped) == drawn
    plain = train("simulated", P, algorithm, poison.problem(0.0), settings)
    assert not torch.equal(plain.final, trained.final)


def test_the_mean_is_then_over_the_others() -> None:
    """Plain torch, on the samples of the ranks whose gradient was used."""
    settings = how(**SKIP)
    trained = train("simulated", P, SynchronousSGD(), poison.problem(), settings)
    drawn, sampler = poison.drawn(SynchronousSGD(), settings, P), Sampler(23, 3, P, settings.seed)
    model, (x, y) = beginning(poison.problem()), tiny.data()
    optimizer = tiny.momentum(model.parameters())
    for step in range(7):
        used = torch.cat([sampler.share(step, rank) for rank in range(P) if (step, rank) not in drawn])
        optimizer.zero_grad()
        cross_entropy(model(x[used]), y[used]).backward()
        optimizer.step()
        found = trained.parameters[0][step]
        torch.testing.assert_close(
            found, nn.utils.parameters_to_vector(model.parameters()).detach(), rtol=1e-12, atol=1e-14
        )


def test_a_step_in_which_all_gradients_are_left_out_changes_nothing() -> None:
    """Neither parameters nor momentum change."""
    every = tuple(range(23))
    trained = train("simulated", P, SynchronousSGD(), poison.problem(samples=every), how(**SKIP))
    first, *later = trained.parameters[0]
    for number, parameters in enumerate(later, 1):
        law = "SynchronousSGD: a step whose gradients are all left out changes nothing"
        assert_near(law, parameters, first, 0.0, f"after step {number}, on rank 0")
    assert len(poison.drawn(SynchronousSGD(), HOW, P, every)) == sum(
        "skipped" in row for rank in range(P) for row in trained.rows(rank)
    )


@pytest.mark.parametrize(
    "policy", [SKIP, {"on_bad_gradient": "clip", "max_grad_norm": 0.2}], ids=lambda policy: policy["on_bad_gradient"]
)
@pytest.mark.parametrize("algorithm", [SynchronousSGD(), PipeSGD(width=2)], ids=name_of)
def test_one_program_for_all_workers_finds_the_same(algorithm: Algorithm, policy: dict[str, object]) -> None:
    from workbench.runtimes.simulator.simulate import run_simulation

    settings = how(**policy)
    runs = [
        run_simulation(algorithm, poison.problem(), settings, P, network=NETWORK, compute=COMPUTE, detail=detail)  # type: ignore[arg-type]
        for detail in ("auto", "messages")
    ]
    one, many = ([[{**row, "bytes_sent": 0} for row in run.metrics[rank]] for rank in range(P)] for run in runs)
    assert one == many
    rows = [row for rank in one for row in rank]
    assert any("skipped" in row for row in rows) and any("clipped" in row for row in rows) == (
        "max_grad_norm" in policy
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_clipped_ones_leave_replicas_equal_and_say_their_norm(algorithm: Algorithm) -> None:
    settings = how(on_bad_gradient="clip", max_grad_norm=0.2)
    trained = train("simulated", P, algorithm, poison.problem(1e6), settings)
    ends = [steps[-1] for steps in trained.parameters[: algorithm.roles(P).num_computing]]
    if algorithm.replicas != Replicas.NEVER:
        assert_equal_ranks(f"{name_of(algorithm)}: clipped gradients leave replicas equal", ends, "at the end")
    rows = {(row["step"], rank): row for rank in range(P) for row in trained.rows(rank)}
    spoilt = [
        rows[key]["clipped"] for key in poison.drawn(algorithm, settings, P) if key in rows and "clipped" in rows[key]
    ]
    assert spoilt and min(spoilt) > 1e4
    assert not any("skipped" in row for row in rows.values())


@pytest.mark.parametrize("norm", [0.02, 0.5, 1e9])
def test_clipping_on_one_rank_is_torchs_own(norm: float) -> None:
    settings = how(on_bad_gradient="clip", max_grad_norm=norm)
    trained = train("simulated", 1, SynchronousSGD(), tiny.problem(), settings)
    model, sampler, (x, y) = beginning(tiny.problem()), Sampler(23, 3, 1, settings.seed), tiny.data()
    optimizer = tiny.momentum(model.parameters())
    for step in range(7):
        samples = sampler.share(step, 0)
        optimizer.zero_grad()
        cross_entropy(model(x[samples]), y[samples]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        expected = nn.utils.parameters_to_vector(model.parameters()).detach()
        assert_near(
            "clipping on one rank is torch's own", trained.parameters[0][step], expected, 0.0, f"after step {step}"
        )
    clipped = ["clipped" in row for row in trained.rows(0)]
    assert all(clipped) if norm < 0.1 else (norm < 1.0 or not any(clipped))


def test_one_above_the_norm_is_stopped_at_or_left_out_too() -> None:
    with pytest.raises(
        Diverged, match=r"the gradient of rank \d at step \d has norm .*, above 10, largest in body\.2\.weight"
    ):
        train("simulated", P, SynchronousSGD(), poison.problem(1e6), how(max_grad_norm=10.0))
    trained = train("simulated", P, SynchronousSGD(), poison.problem(1e6), how(max_grad_norm=10.0, **SKIP))
    skipped = {(row["step"], rank) for rank in range(P) for row in trained.rows(rank) if "skipped" in row}
    assert skipped == poison.drawn(SynchronousSGD(), HOW, P)


def test_who_does_not_look_goes_on_until_the_loss_is_no_number() -> None:
    with pytest.raises(Diverged, match=r"the loss of rank \d is nan at step"):
        train("simulated", P, SynchronousSGD(), poison.problem(), how(on_bad_gradient="ignore"))


def test_parameters_that_are_no_numbers_are_not_trained_on() -> None:
    """A run that leaves out every gradient would look like training."""
    problem = tiny.problem(loss=lambda output, target: cross_entropy(output, target) * 1e300)
    with pytest.raises(Diverged, match=r"and so are its parameters"):
        train("simulated", P, SynchronousSGD(), problem, how(lr=1e30, optimizer=tiny.sgd, steps=20, **SKIP))


def test_a_loss_of_many_times_the_first_ends_the_run() -> None:
    settings = how(lr=3.0, steps=40, divergence_ratio=1.5, optimizer=tiny.sgd)
    with pytest.raises(
        Diverged, match=r"the loss of rank (\d) is \S+ at step \d+, more than 1.5 times its first loss \S+"
    ):
        train("simulated", P, SynchronousSGD(), tiny.problem(), settings)
    with pytest.raises(ConfigError, match="needs a first loss above 0"):
        train("simulated", P, SynchronousSGD(), tiny.problem(loss=lambda output, target: output.sum() - 1e3), settings)


@on_real_runtimes
@pytest.mark.parametrize(
    "algorithm",
    [
        SynchronousSGD(collective=Once(codec=Linear8())),
        LayerwiseSGD(bucket_bytes=SMALL_BUCKET, apply=ApplyOrder.BACKWARD),
        LocalSGD(every=3),
    ],
    ids=name_of,
)
def test_real_ranks_leave_out_what_simulated_ones_do(algorithm: Algorithm, runtime: str) -> None:
    settings = how(**SKIP)
    real, simulated = (train(where, P, algorithm, poison.problem(), settings) for where in (runtime, "simulated"))
    for rank in range(P):
        torch.testing.assert_close(real.parameters[rank][-1], simulated.parameters[rank][-1], rtol=1e-12, atol=1e-14)
        told = [[row.get("skipped") for row in run.rows(rank)] for run in (real, simulated)]
        assert told[0] == told[1]


@on_real_runtimes
@pytest.mark.parametrize("algorithm", [SynchronousSGD(), AsyncSGD(shards=2)], ids=name_of)
def test_real_ranks_stop_with_one_error(algorithm: Algorithm, runtime: str) -> None:
    job = make_job(runtime, P, algorithm, poison.problem(samples=(4,)), HOW)
    found = shared_pool(runtime, P).outcomes([(run_rank, (job,))] * P)  # type: ignore[arg-type]
    own = [outcome.error for outcome in found if isinstance(outcome.error, Diverged)]
    others = [outcome.error for outcome in found if isinstance(outcome.error, PeerFailed)]
    assert len(own) + len(others) == P and (len(own) == 1 or algorithm.asynchronous)
    words = [NAMED.match(str(error)) for error in own]
    known = [
        word[0] for word in words if word and (int(word[2]), int(word[1])) in poison.drawn(algorithm, HOW, P, (4,))
    ]
    assert len(known) == len(own) >= 1
    info = json.loads((Path(job.folder) / "run.json").read_text())
    assert info["status"] == "failed"
    for told in (info["error"], *map(str, others)):
        assert any(word in told for word in known), told


def test_every_variant_is_known_to_send_what_it_sent() -> None:
    """No check sends a byte."""
    for algorithm in variants(P)[::9]:
        runs = [
            train("simulated", P, algorithm, tiny.problem(), how(on_bad_gradient=policy, steps=3)).run
            for policy in ("ignore", "skip")
        ]
        sent = [[row["bytes_sent"] for rank in range(P) for row in run.metrics[rank]] for run in runs]
        assert sent[0] == sent[1]
