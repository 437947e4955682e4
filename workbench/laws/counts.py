"""Every gradient counts once, and all count the same.

The gradient of rank i in step t is 1 in a coordinate of its own and 0 elsewhere, for any parameters. So with a linear
algorithm and plain SGD of learning rate h, the mean over ranks has moved by h / p in each coordinate at the end of a
run. A coordinate that has moved by 0 is a lost gradient, by 2 h / p one that was applied twice, and by h one that was
not divided by the number of ranks. A momentum of the algorithm moves it by another number, but by the one with which a
single rank moves. With an outer optimizer the number is equal for all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import ConfigError
from workbench.laws.sentences import NotTried, assert_holds, name_of
from workbench.program import Algorithm, Replicas, Update
from workbench.runtimes.reference import ReferenceRuntime

RATE = 0.25
LENGTHS = (1, 2, 3, 5, 8, 41)  # steps of a run: it may end inside a period
ROUNDING = 1e-9


def check_counts(algorithm: Algorithm, num_ranks: int) -> None:
    """Each rank's gradient of each step counts once at the end of a run, however long the run is."""
    _check_update(algorithm, num_ranks)
    _check_replicas(algorithm)
    if algorithm.asynchronous or algorithm.depends_on_timing:
        raise NotTried("asynchronous or depends_on_timing: which gradients count is chance")
    if algorithm.update == Update.DIRECTION:
        raise NotTried("update is DIRECTION: no sum of gradients")
    for steps in LENGTHS:
        _check(algorithm, num_ranks, steps)


def _check(algorithm: Algorithm, num_ranks: int, steps: int) -> None:
    driver = moved(algorithm, num_ranks, steps)
    law = f"{name_of(algorithm)}: every gradient counts once"
    counted = torch.stack([-rank.parameters for rank in driver.ranks]).mean(0).view(num_ranks, steps) * num_ranks / RATE
    expected = torch.ones(steps, dtype=torch.float64)
    if algorithm.update == Update.OWN:
        expected = counted.mean(0)
    elif runs_alone(algorithm):
        expected = -moved(algorithm, 1, steps).ranks[0].parameters / RATE
    if _is_nonlinear(algorithm, num_ranks, steps, counted):
        raise NotTried("the update is not linear in the gradients")
    for step in range(steps):
        for rank in range(num_ranks):
            times, due = float(counted[rank, step]), float(expected[step])
            where = (
                f"on rank {rank} in step {step}, in a run of {steps} steps on {num_ranks} ranks: its gradient counts "
                f"{times:.4g} times and should count {due:.4g} times"
            )
            assert_holds(law, times != 0, f"{where.partition(' and should')[0]}: it is lost")
            assert_holds(law, abs(times - due) <= ROUNDING * max(1.0, abs(due)), where)


def _check_update(algorithm: Algorithm, num_ranks: int) -> None:
    """A rank that applies gradients of its own declares it, because settings such as `clip_norm` then act on these."""
    law = f"{name_of(algorithm)}: update is what the optimizer steps with"
    for number, rank in enumerate(moved(algorithm, num_ranks, 2).ranks):
        local = [applied.gradient_step for applied in rank.applied if applied.local]
        where = (
            f"on rank {number} in step {min(local, default=0)}: it is declared {algorithm.update.name}, and the rank "
        )
        assert_holds(law, not local or algorithm.update != Update.MEAN, f"{where}applies its own gradient (Update.OWN)")


def _check_replicas(algorithm: Algorithm) -> None:
    """Where each rank's optimizer has seen other gradients, its state is its own, and a checkpoint keeps each rank's."""
    if algorithm.update == Update.OWN:
        law = f"{name_of(algorithm)}: replicas are equal as declared"
        where = "on any rank: update is OWN, so momenta differ after the first step: declare Replicas.PARAMETERS"
        assert_holds(law, algorithm.replicas != Replicas.EVERY_STEP, where)


def moved(algorithm: Algorithm, num_ranks: int, steps: int) -> ReferenceRuntime:
    """Return a run in which the gradient of rank i in step t is 1 in coordinate i * steps + t, and 0 elsewhere."""

    def single(rank: int, step: int, parameters: Tensor) -> Tensor:
        gradient = torch.zeros_like(parameters)
        gradient[rank * steps + step] = 1.0
        return gradient

    sizes = (num_ranks * steps,)
    return ReferenceRuntime(algorithm, num_ranks, single, sizes=sizes, lr=RATE, start=0.0).run(steps)


def _is_nonlinear(algorithm: Algorithm, num_ranks: int, steps: int, counted: Tensor) -> bool:
    """Return True if equal gradients of all ranks and steps do not move the parameters by the sum of the single ones."""
    driver = ReferenceRuntime(
        algorithm,
        num_ranks,
        lambda rank, step, parameters: torch.full_like(parameters, 3.0),
        sizes=(num_ranks * steps,),
        lr=RATE,
        start=0.0,
    ).run(steps)
    together = -torch.stack([rank.parameters for rank in driver.ranks]).mean(0) * num_ranks / RATE
    total = 3.0 * float(counted.sum())
    return float((together - total).abs().max()) > ROUNDING * max(1.0, abs(total))


def is_plain(algorithm: Algorithm) -> bool:
    """Return True if on one rank each step applies its gradient once: no momentum, period or outer optimizer."""
    if not runs_alone(algorithm):
        return False
    rank = moved(algorithm, 1, 8).ranks[0]
    counted = -rank.parameters / RATE
    return len(rank.applied) == 8 * len(rank.updates) and bool((counted - 1).abs().max() <= ROUNDING)


def runs_alone(algorithm: Algorithm) -> bool:
    """Return True if it runs on one rank."""
    try:
        algorithm.check(1)
    except ConfigError:
        return False
    return True
