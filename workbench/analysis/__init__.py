"""Runs -> numbers: overlap of communication and computation, summaries, time to accuracy."""

from workbench.analysis.overlap import Overlap, overlap
from workbench.analysis.summary import Comparison, compare, run_overlap, summary, time_to_accuracy, time_to_loss
from workbench.analysis.table import Table

__all__ = ["Comparison", "Overlap", "Table", "compare", "overlap", "run_overlap", "summary", "time_to_accuracy", "time_to_loss"]
