"""The chart of `bench.wire`: step time over compute, against communication over compute, with limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.bench.rows import Row
from workbench.bench.wire_cases import BITS, DDP, LAYERWISE, PIPE, RATE
from workbench.errors import ConfigError

SHOWN = {"synchronous": "synchronous", DDP: "torch DDP", LAYERWISE: "layer-wise", PIPE: PIPE} | {
    f"{PIPE}, {bits}": f"{PIPE}, {bits}" for bits in BITS
}


def chart(rows: Sequence[Row]) -> Any:
    """Return the figure of a record's rows.

    Raises:
        ConfigError: the rows are from another benchmark.
    """
    from workbench import plots

    over = {(row.case, row.what): row.ratio for row in rows if row.over == "compute alone"}
    cases = list(dict.fromkeys(case for case, what in over if what == "the wire"))
    if not cases:
        raise ConfigError("the chart needs rows of `workbench bench wire`, but these are from another benchmark")
    panels: dict[str, dict[str, dict[float, float]]] = {}
    limits: dict[str, dict[str, dict[float, float]]] = {}
    for case in cases:
        panel, at = case.partition(", ")[2], over[case, "the wire"]
        for what, name in SHOWN.items():
            if (case, what) in over:
                panels.setdefault(panel, {}).setdefault(name, {})[at] = over[case, what]
            if (limit := over.get((case, f"the limit of {what}"))) is not None:
                limits.setdefault(panel, {}).setdefault(name, {})[at] = limit
    title = f"Step time on an emulated {RATE.removesuffix('gbit')} Gbit/s network"
    return plots.compare_with_limits(
        panels, limits, title=title, x="communication over compute", y="step over compute alone"
    )
