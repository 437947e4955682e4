"""Notebooks run as experiments."""

from workbench.experiments.notebooks import run_notebook

__all__ = ["run_notebook"]
