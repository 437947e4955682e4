"""Limits found by training are those of the closed form, and of the right delay only."""

from __future__ import annotations

import math

import pytest

from workbench import theory
from workbench.algorithms import PipeSGD, SerialSGD
from workbench.papers.studies.quadratic import trained_limit
from workbench.program import Algorithm


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("algorithm", "delay", "workers"), [(SerialSGD(delay=2), 2, 1), (PipeSGD(width=2), 1, 2)], ids=str
)
def test_training_finds_the_limit(algorithm: Algorithm, delay: int, workers: int, momentum: float) -> None:
    assert trained_limit(algorithm, delay, momentum, workers=workers, steps=300) == pytest.approx(
        theory.stability_limit(delay, momentum), rel=0.01
    )


def test_what_grows_for_long_is_still_a_number() -> None:
    """With momentum, modes above the limit grow by half a step."""
    assert trained_limit(SerialSGD(delay=0), 0, 0.9, workers=1, steps=1000) == pytest.approx(
        theory.stability_limit(0, 0.9), rel=0.01
    )


def test_of_another_delay_there_is_none() -> None:
    assert math.isnan(trained_limit(SerialSGD(delay=2), 1, 0.0, workers=1, steps=300)), "the first mode grows already"
    assert math.isnan(trained_limit(SerialSGD(delay=0), 1, 0.0, workers=1, steps=300)), "all shrink"
