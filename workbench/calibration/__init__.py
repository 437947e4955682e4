"""Cost models fitted to real steps, what they predict, and what they recommend."""

from workbench.calibration.from_run import calibrate
from workbench.calibration.model import Calibration, Estimate, Host, Line, Origin, Pace, Shapes

__all__ = [
    "Calibration",
    "Estimate",
    "Host",
    "Line",
    "Origin",
    "Pace",
    "Shapes",
    "calibrate",
]
