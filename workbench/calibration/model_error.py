"""The error of predictions compared with later measurements, and the error band of a prediction.

`RESIDUALS` are ln(measured / predicted) of each cell that was not used for the calibration (two models, two and four
hosts, four rates, five algorithms; gloo on an emulated network). They are from two measuring sessions,
records/predictions.json and records/predictions-second.json. A band combines three causes, assumed to be independent:

    measured = predicted * c * v * exp(e)

    c   another calibration: the prediction from resampled calibration steps, divided by the prediction
    v   the mean of a few steps: 1 + z sd / sqrt(STEPS_OF_A_MEAN), z normal, sd of a step relative to its mean, as simulated
    e   the model's own error: each of RESIDUALS, with both signs

The sign of an error depends on the machine, so e and -e are equally likely. The band is from the 10 % to the 90 %
quantile of all products, so it should contain 80 % of cells. A band from the first session was tested on the second,
which was measured later. It contained 55 of 78 cells: 71 %. Steps that overlap communication with
computation on shared cores took longer than predicted. Predictions for Pipe-SGD with 16-bit hops were 9 % too short at
the median; the worst of all predictions was 24 % too short.

The present band uses both sessions. If one session is left out, the band of the other contains 79 % of its cells (96 %
and 62 %). The result is 80 % if each configuration (model, hosts, rate) is left out in turn, 78 % for each algorithm,
82 % for each model, and 76 % for each number of hosts (`tests/unit/test_model_error.py`). Both sessions are from idle
machines: under other load the error is larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

LEVELS = (0.1, 0.9)
STEPS_OF_A_MEAN = 8
NORMAL = tuple(NormalDist().inv_cdf((number + 0.5) / 9) for number in range(9))

FIRST_SESSION: tuple[float, ...] = (
    -0.0041,
    -0.0126,
    -0.0014,
    0.005,
    -0.0037,
    -0.0097,
    0.002,
    0.0401,
    0.0158,
    0.0168,
    0.0121,
    0.0264,
    0.0453,
    0.0245,
    -0.0137,
    -0.009,
    0.0874,
    0.061,
    0.0649,
    0.0056,
    -0.0048,
    0.0089,
    0.0395,
    0.0148,
    0.0072,
    -0.0346,
    -0.0879,
    -0.0018,
    0.0827,
    0.0231,
    0.0561,
    0.1201,
    0.0924,
    0.0577,
    -0.0146,
    -0.0169,
    0.0192,
    0.0964,
    0.035,
    0.0214,
    -0.013,
    -0.0004,
    0.0109,
    -0.0054,
    -0.0548,
    0.0124,
    -0.033,
    -0.002,
    -0.0014,
    0.0026,
    0.0466,
    0.0361,
    -0.0041,
    -0.0379,
    0.0776,
    0.0388,
    0.0337,
    0.0524,
    -0.0143,
    -0.0322,
    0.0106,
    0.0809,
    0.0569,
    -0.0302,
    -0.0938,
    -0.1148,
    -0.0273,
    -0.0383,
    -0.0623,
    0.0003,
    0.0405,
    0.1222,
    -0.0226,
    -0.0609,
    -0.0092,
    0.0219,
    0.0813,
    -0.0629,
)
SECOND_SESSION: tuple[float, ...] = (
    0.0073,
    0.0113,
    -0.0018,
    -0.0008,
    -0.0104,
    -0.0004,
    0.004,
    0.0441,
    -0.0009,
    0.0208,
    0.036,
    0.0269,
    0.1719,
    0.0159,
    0.016,
    0.065,
    0.1387,
    0.0752,
    0.0249,
    0.0005,
    0.022,
    0.0124,
    0.0453,
    0.0521,
    0.0103,
    0.0101,
    -0.079,
    0.0147,
    0.0974,
    0.0242,
    0.1132,
    0.0817,
    0.1509,
    0.0789,
    0.0473,
    0.0997,
    0.1042,
    0.2266,
    0.0688,
    0.0309,
    -0.0041,
    0.0017,
    0.0089,
    -0.0065,
    0.0006,
    0.011,
    0.1027,
    0.008,
    0.0086,
    0.0472,
    0.1832,
    0.0873,
    0.0184,
    -0.004,
    0.1608,
    0.0989,
    0.2779,
    0.0653,
    0.0253,
    -0.001,
    0.0106,
    0.0537,
    0.028,
    0.0234,
    0.0114,
    -0.0021,
    0.114,
    0.0383,
    0.0272,
    0.0863,
    0.1978,
    0.1805,
    -0.0744,
    0.001,
    0.1108,
    0.0798,
    0.1171,
    -0.0804,
)
RESIDUALS = FIRST_SESSION + SECOND_SESSION


def band(
    seconds: float, calibrations: Sequence[float] = (), *, step_sd: float = 0.0, residuals: Sequence[float] = RESIDUALS
) -> tuple[float, float]:
    """Return the 10 % and 90 % quantiles of the mean seconds of a step.

    Args:
        seconds: the prediction.
        calibrations: predictions by other draws of the calibration.
        step_sd: standard deviation of one step's seconds, relative to the mean.
        residuals: ln(measured / predicted) of earlier predictions; used with both signs.

    >>> low, high = band(1.0, residuals=[0.02, -0.1])
    >>> round(low, 3), round(high, 3)
    (0.905, 1.105)
    """
    said = np.array([seconds, *calibrations])
    means = np.maximum(1 + np.array(NORMAL) * step_sd / math.sqrt(STEPS_OF_A_MEAN), 0.0) if step_sd > 0 else np.ones(1)
    errors = np.exp(np.array([*residuals, *(-error for error in residuals)])) if residuals else np.ones(1)
    products = np.sort((said[:, None, None] * means[:, None] * errors).ravel())
    num = len(products)
    first, last = math.floor((num + 1) * LEVELS[0]), math.ceil((num + 1) * LEVELS[1])
    return float(products[max(first, 1) - 1]), float(products[min(last, num) - 1])
