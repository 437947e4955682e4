"""`wb.simulate`, which chooses between a simulation message by message and one program for all workers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from workbench import costs
from workbench.callbacks.base import Notifier
from workbench.collectives import Native
from workbench.costs import AnyNetwork, Compute, Network, measure_compute
from workbench.errors import ConfigError
from workbench.naming import call_checked
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.replica.local_training import check_algorithm_and_problem
from workbench.runtimes.simulator.failures import check_failures
from workbench.runtimes.simulator.lockstep.lockstep import simulate_in_lockstep
from workbench.runtimes.simulator.simulation import Simulation, collecting_new_objects
from workbench.runtimes.simulator.worker import check_num_workers
from workbench.settings import Settings
from workbench.trace.info import MEASURED
from workbench.trace.run import Run

Detail = Literal["auto", "messages", "formula"]


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
    check_algorithm_and_problem(algorithm, problem)
    network = costs.get(network) if isinstance(network, str) else network
    chosen: Settings = call_checked("simulate", Settings, settings)
    measured = compute is None
    compute = compute or measure_compute(
        problem, chosen.batch_size, optimizer=chosen.optimizer, threads=chosen.threads or 1
    )
    again = partial(
        run_simulation,
        algorithm,
        problem,
        chosen,
        workers,
        network=network,
        compute=compute,
        timing_only=timing_only,
        detail=detail,
        failures=failures,
        measured=measured,
    )
    run = again()
    if chosen.callbacks:
        notifier = Notifier(chosen.callbacks, lambda text: warnings.warn(text, RuntimeWarning, stacklevel=4))
        stop = notifier.tell_simulated(run)
        if stop is not None:
            run = again(stop_after=stop)
        notifier.end(run)
    return Run.load(run.save()) if save else run


def run_simulation(
    algorithm: Algorithm,
    problem: Problem,
    settings: Settings,
    workers: int,
    *,
    network: AnyNetwork,
    compute: Compute,
    timing_only: bool = False,
    detail: Detail = "auto",
    failures: Mapping[int, float] | None = None,
    stop_after: int | None = None,
    measured: bool = False,
) -> Run:
    """Simulate, with complete settings (`simulate`). `stop_after`: stop at the end of this step."""
    _check_for_simulation(settings, workers, detail)
    check_failures(algorithm, workers, failures or {})
    native = isinstance(getattr(algorithm, "collective", None), Native)
    if detail == "formula":
        _check_formula(algorithm, network, timing_only=timing_only or native)
    simulated = {  # columns of tables, next to the settings
        "network": str(network),
        "compute": f"{MEASURED}{compute}" if measured else str(compute),
        "stragglers": "; ".join(map(str, compute.stragglers)) or None,
        "timing_only": timing_only,
        "detail": detail,
        "failures": "; ".join(f"rank {rank} at {at_s:g} s" for rank, at_s in (failures or {}).items()) or None,
    }
    if algorithm.symmetric and (detail == "formula" or (detail == "auto" and native)):
        run = simulate_in_lockstep(
            algorithm,
            problem,
            settings,
            workers,
            network=network,
            compute=compute,
            timing_only=timing_only,
            stop_after=stop_after,
        )
        run.info["simulated"] = simulated
        return run
    with collecting_new_objects():  # in no variable, so that the simulation is freed when it ends
        run = Simulation(
            algorithm,
            problem,
            settings,
            workers,
            network=network,
            compute=compute,
            timing_only=timing_only,
            failures=failures,
        ).run(stop_after=stop_after)
    run.info["simulated"] = simulated
    return run


def _check_for_simulation(settings: Settings, workers: int, detail: Detail) -> None:
    """Raise `ConfigError` for what only real ranks have, and for an unknown `detail`."""
    if detail not in ("auto", "messages", "formula"):
        raise ConfigError(f"detail={detail!r}: choose one of auto, messages, formula")
    if settings.checkpoint_every is not None:
        raise ConfigError(
            "checkpoint_every= is for real ranks: a simulated run is repeated from its seed, so leave it out"
        )
    if settings.compute is not None:
        raise ConfigError("Settings(compute=...) is for real ranks: use simulate(..., compute=...)")
    if settings.on_failure != "stop":
        raise ConfigError(
            "on_failure= is for real ranks: leave it out, and let simulated workers fail by failures={rank: seconds}"
        )
    check_num_workers(workers)


def _check_formula(algorithm: Algorithm, network: AnyNetwork, *, timing_only: bool) -> None:
    """Raise `ConfigError` unless the algorithm's collectives have closed forms."""
    if not algorithm.symmetric:
        raise ConfigError(
            f"detail='formula': workers of {algorithm} do not make the same requests; use detail='auto' or 'messages'"
        )
    if not timing_only:
        raise ConfigError(
            f"detail='formula': {algorithm} sums values by messages, which a formula lacks; "
            "use timing_only=True, or Native()"
        )
    collective = getattr(algorithm, "collective", None)
    if isinstance(collective, Native) or collective is None:
        return
    if not isinstance(network, Network):
        raise ConfigError(
            f"detail='formula': closed forms of {collective} are for equal links; use detail='messages' on {network}"
        )
    if collective.lossy and network.encode_s_per_byte + network.decode_s_per_byte > 0:
        raise ConfigError(
            f"detail='formula': {collective} has no closed form of its encoding on {network.name}; use "
            "detail='messages'"
        )
    if algorithm.requires.num_lanes > 1:
        raise ConfigError(
            f"detail='formula': {algorithm.requires.num_lanes} lanes share the links, which has no closed form; "
            "use detail='messages', or lanes=1"
        )
    try:
        collective.seconds(1.0, 2, network)
    except ConfigError:
        raise ConfigError(
            f"detail='formula': {collective} has no closed form of its time; use detail='messages'"
        ) from None
