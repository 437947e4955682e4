"""FedAvg and FedProx: who takes part, weights by samples, the proximal term, against plain PyTorch and NumPy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK
from workbench.algorithms import FedAvg, FedProx, LocalSGD, SynchronousSGD
from workbench.codecs import Truncate16
from workbench.collectives import Native, Once, Ring
from workbench.errors import ConfigError
from workbench.problems.base import Sampler
from workbench.runtimes.reference import ReferenceRuntime
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

LR = 0.3


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    """Each rank's own minimum, in each coordinate and step."""
    coordinates = torch.arange(1.0, len(parameters) + 1, dtype=torch.float64)
    return torch.linspace(0.5, 1.5, len(parameters), dtype=torch.float64) * (
        parameters - (rank + 1) * coordinates - step
    )


@pytest.mark.parametrize(("fraction", "num_ranks", "size"), [(0.5, 4, 2), (0.1, 4, 1), (1.0, 3, 3), (0.7, 3, 2)])
def test_a_round_has_its_share_of_the_ranks(fraction: float, num_ranks: int, size: int) -> None:
    algorithm = FedAvg(fraction=fraction)
    rounds = [algorithm.chosen(3, number, num_ranks) for number in range(50)]
    assert {len(chosen) for chosen in rounds} == {size}
    assert frozenset().union(*rounds) == frozenset(range(num_ranks)), "each rank takes part in some round"
    assert rounds == [algorithm.chosen(3, number, num_ranks) for number in range(50)], "by seed and round alone"
    if size < num_ranks:
        assert len(set(rounds)) > 1 and rounds != [algorithm.chosen(4, number, num_ranks) for number in range(50)]


@pytest.mark.parametrize("algorithm", [FedAvg(every=3), FedAvg(every=2, fraction=0.7), FedProx(every=3, proximal=0.8)])
def test_it_is_the_formula_in_numpy(algorithm: FedAvg) -> None:
    """Of each step and rank; ranks outside the round stay at a, and the last round may be short."""
    num_ranks, steps = 4, 10
    found = ReferenceRuntime(algorithm, num_ranks, pull, lr=LR, start=1.0, seed=5).run(steps)
    anchor, w = np.ones(6), np.ones((num_ranks, 6))
    for step in range(steps):
        chosen = sorted(algorithm.chosen(5, step // algorithm.every, num_ranks))
        for rank in chosen:
            gradient = pull(rank, step, torch.from_numpy(w[rank])).numpy()
            w[rank] = w[rank] - LR * (gradient + algorithm.proximal * (w[rank] - anchor))
        if (step + 1) % algorithm.every == 0:
            anchor = w[chosen].mean(0)
            w[:] = anchor
        for rank in range(num_ranks):
            assert np.allclose(found.ranks[rank].seen[step].numpy(), w[rank], rtol=1e-13, atol=1e-13)
    for rank in range(num_ranks):
        expected = w[chosen].mean(0) if steps % algorithm.every else anchor
        assert np.allclose(found.ranks[rank].parameters.numpy(), expected, rtol=1e-13, atol=1e-13)


def test_all_ranks_without_a_proximal_term_are_local_sgd() -> None:
    ours, theirs = (
        ReferenceRuntime(algorithm, 3, pull, lr=LR).run(8)
        for algorithm in (FedAvg(every=3, fraction=1.0), LocalSGD(every=3))
    )
    for one, other in zip(ours.ranks[1].seen, theirs.ranks[1].seen, strict=True):
        assert torch.allclose(one, other, rtol=1e-13)
    ours, theirs = (
        ReferenceRuntime(algorithm, 3, pull, lr=LR).run(8)
        for algorithm in (FedAvg(every=1, fraction=1.0, proximal=9.0), SynchronousSGD())
    )
    assert torch.allclose(ours.ranks[1].parameters, theirs.ranks[1].parameters, rtol=1e-13), "w = a at every gradient"


def test_clients_count_by_their_samples() -> None:
    """23 samples in batches of 9 on 3 ranks: 3 + 3 + 2, 3 + 3 + 2 and 3 + 3 + 1 samples in a round of three steps."""
    problem = tiny.problem()
    how = Settings(steps=3, batch_size=3, optimizer=tiny.sgd, seed=4)
    simulation = Simulation(FedAvg(every=3, fraction=1.0), problem, how, 3, network=NETWORK, compute=COMPUTE)
    start = simulation.workers[0].trained.read_parameters().clone()
    simulation.run()
    (x, y), sampler = tiny.data(), Sampler(23, 3, 3, how.seed)
    ends, counts = [], []
    for rank in range(3):
        model = tiny.mlp()
        nn.utils.vector_to_parameters(start.clone(), model.parameters())
        optimizer, count = tiny.sgd(model.parameters()), 0
        for step in range(3):
            share = sampler.share(step, rank)
            optimizer.zero_grad()
            cross_entropy(model(x[share]), y[share]).backward()
            optimizer.step()
            count += len(share)
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        counts.append(count)
    assert counts == [8, 8, 7]
    expected = sum(count * end for count, end in zip(counts, ends, strict=True)) / 23
    for worker in simulation.workers:
        torch.testing.assert_close(worker.trained.read_parameters(), expected, rtol=1e-12, atol=1e-13)


def test_ranks_of_a_round_have_the_learning_rate_of_the_step() -> None:
    """However often a rank was chosen before. Momentum is of its own steps only."""
    problem, algorithm = tiny.problem(num_samples=24, batch_size=2), FedAvg(every=2, fraction=0.5)
    how = Settings(steps=8, optimizer=tiny.momentum, schedule=tiny.step_lr, seed=3)
    simulation = Simulation(algorithm, problem, how, 3, network=NETWORK, compute=COMPUTE)
    anchor = simulation.workers[0].trained.read_parameters().clone()
    simulation.run()
    (x, y), sampler = tiny.data(24), Sampler(24, 2, 3, how.seed)
    models = [tiny.mlp() for _ in range(3)]
    optimizers = [tiny.momentum(model.parameters()) for model in models]
    rate = optimizers[0].param_groups[0]["lr"]
    for model in models:
        nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    for step in range(8):
        chosen = algorithm.chosen(how.seed, step // 2, 3)
        for rank in chosen:
            share = sampler.share(step, rank)
            optimizers[rank].param_groups[0]["lr"] = rate * 0.5 ** (step // 3)
            optimizers[rank].zero_grad()
            cross_entropy(models[rank](x[share]), y[share]).backward()
            optimizers[rank].step()
        if step % 2:
            ends = [nn.utils.parameters_to_vector(models[rank].parameters()).detach() for rank in chosen]
            for model in models:
                nn.utils.vector_to_parameters(torch.stack(ends).mean(0), model.parameters())
    for worker, model in zip(simulation.workers, models, strict=True):
        expected = nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.testing.assert_close(worker.trained.read_parameters(), expected, rtol=1e-12, atol=1e-13)


def test_a_round_without_samples_moves_nothing() -> None:
    """10 samples in batches of 9: the second step has one sample, on rank 0, and some rounds do not choose rank 0."""
    algorithm, problem = FedAvg(every=1, fraction=0.3), tiny.problem(num_samples=10)
    how = Settings(steps=12, batch_size=3, optimizer=partial(torch.optim.SGD, lr=0.1), seed=0)
    chosen = [algorithm.chosen(0, step, 3) for step in range(12)]
    assert any(0 not in ranks for ranks in chosen[1::2]), "such a round is tested"
    simulation = Simulation(algorithm, problem, how, 3, network=NETWORK, compute=COMPUTE)
    simulation.run()
    ends = [worker.trained.read_parameters() for worker in simulation.workers]
    assert all(bool(end.isfinite().all()) and torch.equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"fraction": 0.0}, "above 0 and at most 1"),
        ({"fraction": True}, "above 0 and at most 1"),
        ({"proximal": -1.0}, "0 or more"),
        ({"every": 0}, "1 or more"),
        ({"collective": Ring(codec=Truncate16())}, r"use Ring\(\)"),
        ({"collective": Once(codec=Truncate16())}, rf"use {Native()!r}".replace("(", r"\(").replace(")", r"\)")),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        FedAvg(**settings)  # type: ignore[arg-type]
