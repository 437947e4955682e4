"""`wb.simulate`: a training on a simulated cluster, in the run store if you ask for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench import costs
from workbench.costs import AnyNetwork, Compute
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator import simulate as simulator
from workbench.runtimes.simulator.simulate import Detail
from workbench.trace.run import Run


def simulate(
    algorithm: Algorithm,
    problem: Problem,
    *,
    workers: int,
    network: AnyNetwork | str = costs.ethernet_10g,
    compute: Compute | None = None,
    timing_only: bool = False,
    detail: Detail = "auto",
    failures: Mapping[int, float] | None = None,
    save: bool = False,
    **settings: Any,
) -> Run:
    """Train on a simulated cluster and return the run.

    Args:
        algorithm, problem: the same objects as for real ranks.
        workers: number of workers.
        network: `workbench.costs.ethernet_10g`, or its name there, "ethernet-10g".
        compute: costs of one worker. None: they are measured (`workbench.costs.measure_compute`) and recorded with the
            run.
        timing_only: compute no gradients, only virtual time.
        detail: "messages": every worker runs its program, and every message is an event. "formula": one program runs
            for all workers. A collective begins when the last worker has arrived, and takes the seconds of its closed
            form. Needs `timing_only`, unless the collective is `Native()`. "auto": one program if the result is the
            same (a symmetric algorithm that sums with the library's all-reduce); otherwise messages.
        failures: rank -> virtual seconds at which its process ends, such as `{3: 2.5}`. The algorithm must be able to
            continue without that rank: a worker other than rank 0, of an algorithm with servers.
            `run.info["departures"]` lists the ranks that ended.
        save: add the run to the run store, where `workbench runs` finds it. Otherwise it is only in memory, until
            `run.save()`.
        settings: those of `workbench.settings.Settings`.

    Raises:
        ConfigError: this cannot be simulated; the message names the alternative.
        Stalled: no process can continue; names what each rank waits for.
        Diverged: a loss is not a finite number.
    """
    run = simulator.simulate(
        algorithm,
        problem,
        workers=workers,
        network=network,
        compute=compute,
        timing_only=timing_only,
        detail=detail,
        failures=failures,
        **settings,
    )
    return Run.load(run.save()) if save else run
