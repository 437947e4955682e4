"""The time that a rank needs to handle its own messages, which the simulator leaves out."""

from __future__ import annotations

from workbench.calibration.effective import Setting
from workbench.calibration.model import Calibration
from workbench.calibration.steady import messages_per_step
from workbench.program import Algorithm

LONGEST_HANDLING_S = 1e-3  # a longer latency of a message is one of the wire


def handling_seconds(calibration: Calibration, algorithm: Algorithm, setting: Setting) -> float:
    """Return the seconds of a step in which a rank handles the messages that it sends itself, one after another.

    A simulated message has a latency, and many of them pass it at the same time. Real ones are handled by one
    interpreter, which delays the rank's other work. So it is 0 if the calibration is of a simulated run.
    """
    if calibration.origin.runtime == "simulated":
        return 0.0
    each_s = min(calibration.line.message_latency_s.value, LONGEST_HANDLING_S)
    return each_s * messages_per_step(calibration, algorithm, setting) / algorithm.period / setting.workers
