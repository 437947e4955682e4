"""Cost models fitted to real steps, their predictions, and recommendations from them.

- From records: `from_run` and `from_profile` make a calibration. `observed` is the data that they read. `probe` makes
  additional measurements.
- The fit: `fit`, and `straggler_fit` for the distribution of stragglers.
- The result: `model` (`Calibration`), its `parts`, and `record` (JSON and back).
- Predictions: `predict`, by simulation under given conditions (`effective`) with shared cores (`cores`,
  `fixed_point`). `steady` says how many steps are simulated, and which of them are timed. `handling` is the time of a
  rank for its messages, and `model_error` the error of predictions, as measured later.
- Recommendations: `recommend`, from `candidates` and their `convergence`.

Imports `analysis`, `algorithms`, `runtimes` and what lies below. Used by `plots`, `papers` and `cli`. Begin with
`from_run`, then `model` and `predict`.
"""

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
