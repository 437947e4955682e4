"""Runs -> numbers: overlap of communication and computation, where a collective's time goes, summaries, time to accuracy."""

from workbench.analysis.overlap import Overlap, overlap
from workbench.analysis.parts import Parts, parts
from workbench.analysis.runs_table import runs_table
from workbench.analysis.summary import Comparison, compare, run_overlap, run_parts, summary, time_to_accuracy, time_to_loss
from workbench.analysis.table import Table

__all__ = [
    "Comparison",
    "Overlap",
    "Parts",
    "Table",
    "compare",
    "overlap",
    "parts",
    "run_overlap",
    "run_parts",
    "runs_table",
    "summary",
    "time_to_accuracy",
    "time_to_loss",
]
