"""Runs -> numbers: overlap, critical path, where a collective's time goes, summaries, time to accuracy."""

from workbench.analysis.critical import CriticalPath, critical_path
from workbench.analysis.overlap import Overlap, overlap
from workbench.analysis.parts import Parts, parts
from workbench.analysis.runs_table import runs_table
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
from workbench.analysis.table import Table

__all__ = [
    "Comparison",
    "CriticalPath",
    "Overlap",
    "Parts",
    "Table",
    "compare",
    "critical_path",
    "overlap",
    "parts",
    "run_critical_path",
    "run_overlap",
    "run_parts",
    "runs_table",
    "summary",
    "time_to_accuracy",
    "time_to_loss",
]
