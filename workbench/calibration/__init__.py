"""Cost models fitted to real steps, their predictions, and recommendations from them."""

from workbench.calibration.candidates import candidates
from workbench.calibration.convergence import Convergence
from workbench.calibration.from_profile import from_profile
from workbench.calibration.from_run import calibrate
from workbench.calibration.model import Calibration
from workbench.calibration.parts import Estimate, Host, Line, Origin, Pace, Shapes
from workbench.calibration.predict import Prediction, predict
from workbench.calibration.probe import Probe, probe, with_probe
from workbench.calibration.recommend import Recommendation, recommend

__all__ = [
    "Calibration",
    "Convergence",
    "Estimate",
    "Host",
    "Line",
    "Origin",
    "Pace",
    "Prediction",
    "Probe",
    "Recommendation",
    "Shapes",
    "calibrate",
    "candidates",
    "from_profile",
    "predict",
    "probe",
    "recommend",
    "with_probe",
]
