"""The function `study`: which algorithm reaches a target first, for your problem, numbers of workers and networks.

- `run_study` holds it: it measures, times, trains and keeps to its minutes (`budget`).
- `question` checks its arguments.
- `measure` takes the costs from what the user gives, or measures compute and messages on this machine.
- `candidates` are the default algorithms. `step_time` is the time of a step of one of them, from cost models,
  with an `interval` from earlier errors.
- `recipe` is what changes an algorithm's numerical results; `trainings` trains each recipe with real gradients.
- `results` is `Study`: tables, figures, the answer. `check` compares it with trainings on real ranks.
- `saved` keeps a study in a folder, so that it can be continued.

Imports `calibration`, `plots`, `clusters` and what lies below. Used by `cli`. Begin with `results`, then `run_study`.
"""

from workbench.what_if.check import Check
from workbench.what_if.results import Study
from workbench.what_if.run_study import study

__all__ = ["Check", "Study", "study"]
