"""Closed forms: results that the simulator must reproduce, or that need no simulation.

Each formula names its source: a paper, a paper as recalled, or "derived here". Tests compare each with the simulator.

- Seconds: `steps`, `layerwise` and `fluctuating` (of a step), `collectives` (of a sum), `compression` (when it saves
  time).
- Waiting for the k-th worker: `order_statistics`, `arrivals`, `atoms`, `backlog`.
- Updates: `asynchronous` (their rate and staleness), `iterations` (how many), `stability`, `implicit_momentum`.

Imports `costs`, `collectives` and layers below, and no runtime. Used by `analysis` and `papers`. Begin with
`steps`.
"""

from __future__ import annotations

from workbench.theory.arrivals import (
    Arrival,
    LognormalTime,
    NormalTime,
    ParetoTime,
    QuantileTime,
    ShiftedExponentialTime,
    UniformTime,
)
from workbench.theory.asynchronous import busiest_workers, cycle_s, mean_staleness, service_s, update_interval_s
from workbench.theory.atoms import BimodalTime, ConstantTime, EmpiricalTime
from workbench.theory.backlog import Backlog, backlog_steps
from workbench.theory.collectives import (
    all_reduce_s,
    codec_s,
    gather_s,
    parameter_server_s,
    scatter_s,
    server_over_ring,
    wire_s,
)
from workbench.theory.compression import break_even_bandwidth, ring_break_even_bandwidth, smallest_useful_ratio
from workbench.theory.fluctuating import pipe_ends_s
from workbench.theory.iterations import (
    BackupChoice,
    Iterations,
    backups_repay,
    best_backups,
    fit_iterations,
    machine_seconds,
)
from workbench.theory.layerwise import Schedule, apply_times, dear_s, lane, layerwise
from workbench.theory.order_statistics import (
    blom,
    expected_order_statistic,
    exponential_order_statistic,
    pareto_order_statistic,
    quantile_of_order_statistic,
    uniform_order_statistic,
)
from workbench.theory.stability import spectral_radius, stability_limit
from workbench.theory.steps import (
    delayed_s,
    parameter_server_step_s,
    per_layer_pipe_s,
    pipe_s,
    pipe_speedup,
    pipe_unlimited_s,
    smallest_useful_delay,
    synchronous_s,
)

__all__ = [
    "Arrival",
    "Backlog",
    "BackupChoice",
    "BimodalTime",
    "ConstantTime",
    "EmpiricalTime",
    "Iterations",
    "LognormalTime",
    "NormalTime",
    "ParetoTime",
    "QuantileTime",
    "Schedule",
    "ShiftedExponentialTime",
    "UniformTime",
    "all_reduce_s",
    "apply_times",
    "backlog_steps",
    "backups_repay",
    "best_backups",
    "blom",
    "break_even_bandwidth",
    "busiest_workers",
    "codec_s",
    "cycle_s",
    "dear_s",
    "delayed_s",
    "expected_order_statistic",
    "exponential_order_statistic",
    "fit_iterations",
    "gather_s",
    "lane",
    "layerwise",
    "machine_seconds",
    "mean_staleness",
    "parameter_server_s",
    "parameter_server_step_s",
    "pareto_order_statistic",
    "per_layer_pipe_s",
    "pipe_ends_s",
    "pipe_s",
    "pipe_speedup",
    "pipe_unlimited_s",
    "quantile_of_order_statistic",
    "ring_break_even_bandwidth",
    "scatter_s",
    "server_over_ring",
    "service_s",
    "smallest_useful_delay",
    "smallest_useful_ratio",
    "spectral_radius",
    "stability_limit",
    "synchronous_s",
    "uniform_order_statistic",
    "update_interval_s",
    "wire_s",
]
