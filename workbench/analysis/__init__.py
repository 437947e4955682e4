"""Numbers from runs. An analysis reads a run's trace and metrics, and never trains.

- A step: `overlap` (hidden communication), `critical` (the critical path), `parts` (of a collective's time).
- Gradients: `arrivals` at a server, `staleness` by bucket, `buckets` (times of layer-wise runs).
- Runs: `summary` (a run in a row, and a comparison), `runs_table` (a store), `fronts` (Pareto fronts), `labels` (in
  legends), `fairness` (what makes runs not comparable).
- Output: `table` (text and HTML), `export` (CSV, Parquet, TensorBoard), `frames` (pandas, polars).

Imports `theory`, `trace` and what lies below, and no runtime. Used by `calibration`, `plots` and layers above. Begin
with `overlap`, then `summary`.
"""

from workbench.analysis.arrivals import arrivals
from workbench.analysis.buckets import bucket_times
from workbench.analysis.critical import CriticalPath, critical_path
from workbench.analysis.frames import frame
from workbench.analysis.fronts import pareto_front
from workbench.analysis.overlap import Overlap, overlap
from workbench.analysis.parts import Parts, parts
from workbench.analysis.runs_table import runs_table
from workbench.analysis.staleness import staleness_by_bucket
from workbench.analysis.summary import (
    Comparison,
    compare,
    run_critical_path,
    run_overlap,
    run_parts,
    summary,
    time_to_accuracy,
    time_to_loss,
)
from workbench.analysis.table import Table, tabulate

__all__ = [
    "Comparison",
    "CriticalPath",
    "Overlap",
    "Parts",
    "Table",
    "arrivals",
    "bucket_times",
    "compare",
    "critical_path",
    "frame",
    "overlap",
    "pareto_front",
    "parts",
    "run_critical_path",
    "run_overlap",
    "run_parts",
    "runs_table",
    "staleness_by_bucket",
    "summary",
    "tabulate",
    "time_to_accuracy",
    "time_to_loss",
]
