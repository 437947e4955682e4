"""Where the time of a step or of a sum goes: compute, hidden and exposed communication, codecs, and the wire."""

from __future__ import annotations

from workbench.analysis.parts import PART_NAMES
from workbench.analysis.summary import run_overlap, run_parts
from workbench.papers.studies.paired_runs import SKIPPED
from workbench.theory import pipe_s
from workbench.trace.run import Run

ROUNDING_S = 1e-12  # shorter parts of a simulated step are rounding


def breakdown(run: Run, steps: slice, *, compute_s: float, sum_s: float, overlaps: bool) -> dict[str, float]:
    """Return the parts of a step in seconds, and what the timing model says about them.

    Args:
        run: a traced run.
        steps: those that count.
        compute_s: c, all compute of a step.
        sum_s: m, the closed form of its all-reduce.
        overlaps: whether the algorithm communicates during compute: Pipe-SGD exposes max(0, m - c), D-Sync exposes m.

    Returns:
        `window_s`, `compute_s`, `hidden_s` and `exposed_s` of a step; `expected_s`, the exposed communication of the
        model; `error`, the difference as a share of the step; `hidden`, the hidden share of communication; `over`, m /
        c.
    """
    found = run_overlap(run, steps)
    parts = {name: value if value > ROUNDING_S else 0.0 for name, value in found.per_step().items()}
    expected_s = pipe_s(compute_s, sum_s) - compute_s if overlaps else sum_s
    return {
        **parts,
        "expected_s": expected_s,
        "error": abs(parts["exposed_s"] - expected_s) / parts["window_s"],
        "hidden": found.fraction or 0.0,
        "over": sum_s / compute_s,
    }


def codec_share(run: Run, without: Run, steps: slice) -> dict[str, float]:
    """Return the share of a step that a codec takes, and the share that it saves compared with a run without it.

    Args:
        run: a traced run with a codec in its hops.
        without: the same without a codec.
        steps: those that count.

    Returns:
        `codec_s` and `wire_s`, seconds a step and rank; `share`, the codec's of the step; `saved`, the share of the
        step that the codec saves, negative if it makes the step longer.
    """
    count = run.num_ranks * (steps.stop - steps.start)
    parts = run_parts(run, steps).total()
    step_s, plain_s = (run_overlap(each, steps).per_step()["window_s"] for each in (run, without))
    codec_s = (parts["encode_s"] + parts["decode_s"]) / count
    return {
        "codec_s": codec_s,
        "wire_s": parts["wire_s"] / count,
        "share": codec_s / step_s,
        "saved": 1 - step_s / plain_s,
    }


def parts_of_a_sum(run: Run, skipped: int = SKIPPED) -> dict[str, float]:
    """Return seconds of each part of a sum, mean over ranks and steps after the first `skipped` ones."""
    steps, num_ranks = len(run.steps()) - skipped, run.num_ranks
    total = run_parts(run, slice(skipped, None)).total()
    return {name.removesuffix("_s"): total[name] / steps / num_ranks for name in PART_NAMES}
