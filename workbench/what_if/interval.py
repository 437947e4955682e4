"""The interval of a predicted step: what predictions for four models missed by.

`OWN_CORES`, `SHARED_CORES` and `SERVERS` are ln(measured / predicted) of records/study.json and
records/study-other-models.json: a ViT, a GPT, another transformer and an MLP on hosts of an emulated network, with Open
MPI. For the first, ranks slept for the seconds of compute, one rank for each core. For the second they computed, and two
or four ranks shared two cores. The third is of algorithms with parameter servers, of both kinds.

An interval is from the 5 % to the 95 % quantile of the mean seconds of a few steps. If the errors of a model are left
out, the interval from the others contains nine of ten of its measurements (`tests/unit/test_study_record.py`).
Intervals from the errors of the last two models alone contained 57 of 70 measurements of the first two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from workbench.calibration.model_error import NORMAL, STEPS_OF_A_MEAN

LEVELS = (0.05, 0.95)
OWN_CORES = (
    0.063,
    0.115,
    0.093,
    -0.002,
    -0.011,
    -0.054,
    0.072,
    0.069,
    0.103,
    0.005,
    0.015,
    0.036,
    0.116,
    0.629,
    0.136,
    0.026,
    0.115,
    0.105,
    0.067,
    0.005,
    0.016,
    -0.009,
    0.03,
    0.226,
    0.026,
    0.008,
    -0.001,
    -0.01,
    0.117,
    0.153,
    -0.049,
    -0.022,
    0.005,
    0.043,
    0.316,
    0.247,
    0.04,
    0.044,
    0.074,
    0.04,
    -0.005,
    -0.004,
    0.033,
    0.018,
)
SHARED_CORES = (
    0.051,
    0.177,
    -0.032,
    0.002,
    0.044,
    0.145,
    0.241,
    0.122,
    0.052,
    -0.108,
    0.231,
    0.123,
    -0.167,
    -0.037,
    0.088,
    0.255,
    0.035,
    0.0,
    0.136,
    -0.127,
    0.197,
    0.345,
    -0.002,
    0.019,
    0.026,
    0.078,
    -0.028,
    -0.009,
    0.082,
    -0.156,
    0.342,
    0.42,
    0.11,
    0.139,
    0.18,
    0.382,
    0.232,
    0.216,
    0.219,
    -0.004,
    0.13,
    0.319,
    -0.131,
    -0.094,
    -0.04,
    0.24,
    0.043,
    0.024,
    0.313,
    0.128,
    0.348,
    0.362,
    -0.066,
    -0.043,
    0.065,
    0.201,
    0.242,
    0.104,
    0.198,
    -0.004,
    0.151,
    0.277,
    -0.08,
    -0.105,
    -0.121,
    0.16,
    -0.007,
    0.003,
    0.154,
    -0.035,
    0.174,
    0.178,
    -0.141,
    -0.145,
    -0.082,
    0.147,
    0.121,
    0.092,
    0.192,
    -0.04,
)
SERVERS = (0.33, 0.29, 0.083, 0.149, 0.252, 0.205, 0.378, 0.42, 0.452, 0.36, 0.484, 0.321, 0.135, 0.259, 0.353, 0.217)


def missed_by(*, servers: bool, shared_cores: bool) -> tuple[float, ...]:
    """Return the errors of predictions for algorithms and cores of this kind."""
    if servers:
        return SERVERS
    return SHARED_CORES if shared_cores else OWN_CORES


def interval(
    seconds: float, others: Sequence[float] = (), *, step_sd: float = 0.0, missed: Sequence[float]
) -> tuple[float, float]:
    """Return the 5 % and 95 % quantiles of the mean seconds of a step.

    Args:
        seconds: the prediction, which the interval contains.
        others: predictions by other draws of the calibration.
        step_sd: standard deviation of one step's seconds, relative to the mean.
        missed: ln(measured / predicted) of earlier predictions.

    >>> low, high = interval(1.0, missed=[-0.02, 0.0, 0.1])
    >>> round(low, 3), round(high, 3)
    (0.98, 1.105)
    """
    ordered, num = sorted(missed), len(missed)
    first, last = math.floor((num + 1) * LEVELS[0]), math.ceil((num + 1) * LEVELS[1])
    means = np.maximum(1 + np.array(NORMAL) * step_sd / math.sqrt(STEPS_OF_A_MEAN), 1e-3)
    drawn = np.log(np.multiply.outer(np.array([seconds, *others]) / seconds, means))
    below, above = np.quantile(drawn, LEVELS)
    low = math.hypot(min(0.0, ordered[max(first, 1) - 1]), min(0.0, below))
    high = math.hypot(max(0.0, ordered[min(last, num) - 1]), max(0.0, above))
    return seconds * math.exp(-low), seconds * math.exp(high)
