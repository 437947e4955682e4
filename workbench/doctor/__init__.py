"""What works on this machine and what does not, found by trying; each fault with what mends it."""

from workbench.doctor.examination import examine
from workbench.doctor.finding import Finding

__all__ = ["Finding", "examine"]
