"""Pipe-SGD's timing model: for a gradient that is sent in parts, and compared with steps measured on a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch

from workbench.algorithms import LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.analysis.summary import steady_overlap
from workbench.analysis.table import Column, Table
from workbench.collectives import Ring
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.gradients import Layout, build_layout
from workbench.ops import Program
from workbench.papers.studies.paired_runs import step_s, with_interval
from workbench.papers.studies.simulated_steps import gradient_bytes, simulated_step_s
from workbench.papers.studies.wires import Wire
from workbench.problems.base import Problem
from workbench.program import Algorithm, Buckets, Card, Context, Requirements
from workbench.theory import all_reduce_s, layerwise, per_layer_pipe_s, pipe_s, synchronous_s
from workbench.trace.run import Run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PipeInParts(Algorithm):
    """Pipe-SGD (K = 2) whose gradient goes in parts, which our ring sums one after the other.

    In the steady state this takes as long as a sum of each part that starts when the part is ready.

    Attributes:
        parts: L, number of parts, cut between parameters.

    Paper: li2018pipesgd (timing model, sequential against pipelined gradient communication).
    """

    parts: int

    card: ClassVar[Card] = PipeSGD.card

    @property
    def max_staleness(self) -> int:
        return 1

    @property
    def requires(self) -> Requirements:
        return Requirements(buckets=Buckets(count=self.parts))

    def worker(self, ctx: Context) -> Program:
        return PipeSGD(width=2, collective=Ring()).worker(ctx)


def model_compute(seconds: float) -> Compute:
    """Return compute of this many seconds a step: three tenths forward, six backward, one update."""
    return Compute(forward_s=0.3 * seconds, backward_s=0.6 * seconds, update_s=0.1 * seconds)


def part_layout(problem: Problem, parts: int) -> Layout:
    """Return the layout of the problem's gradient in this many parts.

    Raises:
        ConfigError: the problem has fewer parameters.
    """
    with torch.device("meta"):  # shapes without values
        layout = build_layout(problem.model().named_parameters(), None, parts)
    if len(layout.buckets) < parts:
        raise ConfigError(f"{parts} parts: {problem.name} has parameters for {len(layout.buckets)}; give fewer parts")
    return layout


def bucket_layout(problem: Problem, bucket_bytes: float) -> Layout:
    """Return the layout of the problem's gradient in buckets of about this many bytes."""
    with torch.device("meta"):
        return build_layout(problem.model().named_parameters(), bucket_bytes)


def ring_sums_s(layout: Layout, num_workers: int, link: Network) -> list[float]:
    """Return the seconds of a ring's sum of each bucket, by the closed form."""
    return [
        all_reduce_s(Ring(), layout.bucket_bytes(bucket), num_workers, link) for bucket in range(len(layout.buckets))
    ]


def layerwise_step_s(layout: Layout, compute: Compute, num_workers: int, link: Network) -> float:
    """Return the step of a D-Sync whose sums start during backward, by the recurrence of `theory.layerwise`."""
    num = len(layout.buckets)
    backward_s = np.diff([0.0, *compute.ready_shares(layout)]) * compute.backward_s
    updates_s = [compute.update_s / num] * num
    return float(
        layerwise(compute.forward_s, backward_s.tolist(), ring_sums_s(layout, num_workers, link), updates_s).step_s
    )


Lines = dict[str, dict[int, float]]  # name -> parts of the gradient -> milliseconds of a step


def steps_in_parts(
    problem: Problem, *, workers: int, link: Network, segments: Sequence[int], steps: int
) -> tuple[Lines, Lines]:
    """Return milliseconds of a step for each number of parts, by formula and simulated, of Pipe-SGD and of D-Sync.

    Each is bound by communication (compute is half of a sum), or by compute (1.2 times the sums of the most parts).

    Args:
        problem: its gradient is cut.
        workers, link: number of simulated workers, and their links.
        segments: numbers of parts, ascending, from 1 on.
        steps: simulated steps.
    """
    expected: Lines = {}
    simulated: Lines = {}
    size = gradient_bytes(problem)
    parts = {number: part_layout(problem, number) for number in segments}
    bound_s = {
        "bound by communication": 0.5 * all_reduce_s(Ring(), size, workers, link),
        "bound by compute": 1.2 * sum(ring_sums_s(parts[segments[-1]], workers, link)),
    }
    for kind, compute_s in bound_s.items():
        compute = model_compute(compute_s)
        how: dict[str, Any] = {"workers": workers, "network": link, "compute": compute, "steps": steps}
        pipe, sync = f"Pipe-SGD, {kind}", f"D-Sync, {kind}"
        expected |= {pipe: {}, sync: {}}
        simulated |= {pipe: {}, sync: {}}
        for number, layout in parts.items():
            expected[pipe][number] = 1e3 * per_layer_pipe_s(compute_s, ring_sums_s(layout, workers, link))
            simulated[pipe][number] = 1e3 * simulated_step_s(PipeInParts(parts=number), problem, **how)
        for number in segments:
            algorithm = LayerwiseSGD(bucket_bytes=size / number, collective=Ring())
            layout = bucket_layout(problem, size / number)
            expected[sync][len(layout.buckets)] = 1e3 * layerwise_step_s(layout, compute, workers, link)
            simulated[sync][len(layout.buckets)] = 1e3 * simulated_step_s(algorithm, problem, **how)
    return expected, simulated


def parts_off_formula(
    problem: Problem, *, workers: int, link: Network, segments: Sequence[int], steps: int
) -> tuple[float, float]:
    """Return how far simulated steps of Pipe-SGD in parts are from the formulas.

    Bound by communication, L parts cost 2 (L-1) (p-1) latencies; bound by compute, nothing. Arguments: see
    `steps_in_parts`.

    Returns:
        Two relative differences, each the largest. If communication bounds the step: its surplus over one with a whole
        gradient, from the latencies of the formula. If compute bounds it: the step, from one with a whole gradient.
    """
    whole_s = all_reduce_s(Ring(), gradient_bytes(problem), workers, link)
    latencies_s = 2 * (workers - 1) * link.latency_s
    slow, quick = 0.5 * whole_s, 1.2 * (whole_s + segments[-1] * latencies_s)

    def parts_s(number: int, compute_s: float) -> float:
        how: dict[str, Any] = {"workers": workers, "network": link, "compute": model_compute(compute_s)}
        return simulated_step_s(PipeInParts(parts=number), problem, steps=steps, **how)

    one_slow_s, one_quick_s = parts_s(1, slow), parts_s(1, quick)
    surplus = [abs((parts_s(number, slow) - one_slow_s) / ((number - 1) * latencies_s) - 1) for number in segments[1:]]
    change = [abs(parts_s(number, quick) / one_quick_s - 1) for number in segments[1:]]
    return max(surplus), max(change)


def layerwise_gain(problem: Problem, *, workers: int, link: Network, segments: Sequence[int], steps: int) -> float:
    """Return how many times as fast D-Sync is with its best number of layer-wise sums as with one.

    Compute takes as long as one sum. Arguments: see `steps_in_parts`.
    """
    size = gradient_bytes(problem)
    compute = model_compute(all_reduce_s(Ring(), size, workers, link))
    how: dict[str, Any] = {"workers": workers, "network": link, "compute": compute, "steps": steps}
    best_s = min(
        simulated_step_s(LayerwiseSGD(bucket_bytes=size / number, collective=Ring()), problem, **how)
        for number in segments[1:]
    )
    return simulated_step_s(SynchronousSGD(collective=Ring()), problem, **how) / best_s


def sum_alone_s(run: Run) -> float:
    """Return the seconds of a sum without waiting: of the last rank to arrive, the median over steps."""
    found = steady_overlap(run)
    return float(np.median([found.exposed_s[found.step == step].min() for step in np.unique(found.step)]))


def measured_over_predicted(
    runs: Mapping[str, Mapping[str, Sequence[Run]]],
    wires: Mapping[str, Wire],
    megabytes: float,
    compute_s: float,
    names: Sequence[str],
) -> dict[tuple[str, str], list[float]]:
    """Return (wire, algorithm) -> measured over predicted time of a step, for each seed.

    Args:
        runs: text of a wire -> algorithm -> runs.
        wires: text -> wire, each with a network.
        megabytes: size of the gradient.
        compute_s: c.
        names: of "PS-Sync" (server on one of the hosts), "D-Sync" and "Pipe-SGD".
    """
    found: dict[tuple[str, str], list[float]] = {}
    for text, wire in wires.items():
        sum_s = 1 / wire.megabytes(1.0) * megabytes  # of a ring
        predicted = {
            "PS-Sync": compute_s + wire.num_ranks * sum_s,
            "D-Sync": synchronous_s(compute_s, sum_s),
            "Pipe-SGD": pipe_s(compute_s, sum_s),
        }
        for name in names:
            found[str(wire), name] = [step_s(run) / predicted[name] for run in runs[text][name]]
    return found


def over_predicted_table(rows: Mapping[tuple[str, str], Sequence[float]], caption: str) -> Table:
    """Return a row for each network and algorithm of `measured_over_predicted`."""
    shown = [{"wire": wire, "name": name, "over": with_interval(values)} for (wire, name), values in rows.items()]
    columns = (Column("wire", "network"), Column("name", "algorithm"), Column("over", "measured over predicted"))
    return Table(shown, columns, caption=caption)
