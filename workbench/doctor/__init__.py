"""Tries what works on this machine and what does not. Each fault comes with its fix."""

from workbench.doctor.examination import examine
from workbench.doctor.finding import Finding

__all__ = ["Finding", "examine"]
