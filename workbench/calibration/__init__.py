"""Cost models fitted to real steps, what they predict, and what they recommend."""

from workbench.calibration.from_profile import from_profile
from workbench.calibration.from_run import calibrate
from workbench.calibration.model import Calibration, Estimate, Host, Line, Origin, Pace, Shapes
from workbench.calibration.predict import Prediction, predict
from workbench.calibration.probe import Probe, probe, with_probe

__all__ = [
    "Calibration",
    "Estimate",
    "Host",
    "Line",
    "Origin",
    "Pace",
    "Prediction",
    "Probe",
    "Shapes",
    "calibrate",
    "from_profile",
    "predict",
    "probe",
    "with_probe",
]
