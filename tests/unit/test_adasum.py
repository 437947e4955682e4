"""Adasum: orthogonal gradients add, parallel ones are averaged, and a tree in NumPy for any number of ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.algorithms import AdasumSGD
from workbench.algorithms.adasum import adasum_factors
from workbench.runtimes.reference import ReferenceRuntime

SIZES = (2, 3, 1)
STARTS = np.cumsum([0, *SIZES])


def run(gradients: np.ndarray, steps: int = 1) -> list[np.ndarray]:
    """The first update of each rank, from 0 with lr=1: the negative of A."""
    given = torch.from_numpy(gradients)
    runtime = ReferenceRuntime(
        AdasumSGD(), len(gradients), lambda rank, step, w: given[rank], lr=1.0, start=0.0, sizes=SIZES
    ).run(steps)
    return [-rank.parameters.numpy() for rank in runtime.ranks]


def pair(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A(x, y) of whole gradients, tensor by tensor."""
    found = np.empty_like(x)
    for start, stop in pairwise(STARTS):
        a, b = x[start:stop], y[start:stop]
        of_a = 1 - a @ b / (2 * (a @ a)) if a @ a else 1.0
        of_b = 1 - a @ b / (2 * (b @ b)) if b @ b else 1.0
        found[start:stop] = of_a * a + of_b * b
    return found


def tree(gradients: list[np.ndarray]) -> np.ndarray:
    """Ranks beyond a power of two are added to the first ones; then neighbours, and pairs of them, and so on."""
    size = 1 << (len(gradients).bit_length() - 1)
    level = [*gradients[:size]]
    for number, extra in enumerate(gradients[size:]):
        level[number] = pair(level[number], extra)
    while len(level) > 1:
        level = [pair(x, y) for x, y in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def test_orthogonal_gradients_add() -> None:
    """In each tensor: (1, 0) and (0, 2), (1, 2, 2) and (2, 1, -2); the last has only one number that is not 0."""
    gradients = np.array([[1.0, 0, 1, 2, 2, 3], [0, 2, 2, 1, -2, 0]])
    for found in run(gradients):
        assert found.tolist() == [1, 2, 3, 3, 0, 3]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_equal_gradients_are_averaged(num_ranks: int) -> None:
    gradient = np.array([1.0, -2, 3, 0.5, -0.25, 7])
    for found in run(np.tile(gradient, (num_ranks, 1))):
        assert np.allclose(found, gradient, rtol=1e-14, atol=0)


def test_parallel_gradients_are_averaged_too() -> None:
    """A(x, k x) = (1 + k) / 2 x."""
    x = np.array([1.0, -2, 3, 0.5, -0.25, 7])
    for k in (3.0, 0.5, -1.0):
        for found in run(np.stack([x, k * x])):
            assert np.allclose(found, (1 + k) / 2 * x, rtol=1e-14, atol=1e-14)


@settings(max_examples=30)
@given(num_ranks=st.integers(1, 9), seed=st.integers(0, 2**32 - 1), zero=st.booleans())
def test_it_is_the_tree_in_numpy(num_ranks: int, seed: int, zero: bool) -> None:
    gradients = np.random.default_rng(seed).standard_normal((num_ranks, 6))
    if zero:
        gradients[-1, :2] = 0.0
    expected = tree(list(gradients))
    found = run(gradients)
    for one in found:
        assert np.array_equal(one, found[0])
        assert np.allclose(one, expected, rtol=1e-12, atol=1e-12)


def test_tensors_are_combined_one_by_one() -> None:
    """Whole gradients of these would be neither orthogonal nor equal; each tensor is one or the other."""
    gradients = np.array([[1.0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2]])
    assert run(gradients)[0].tolist() == [1, 1, 1, 1, 1, 2]


def test_a_square_of_float32_that_overflows_does_not_matter() -> None:
    x: Tensor = torch.tensor([3e30, 0.0])
    assert [float(factor) for factor in adasum_factors(x, x)] == [0.5, 0.5]


def test_ranks_beyond_a_power_of_two_send_once() -> None:
    runtime = ReferenceRuntime(AdasumSGD(), 6, lambda rank, step, w: w, sizes=SIZES)
    layout = runtime.ranks[0].layout
    messages = [AdasumSGD().bytes_per_step(rank, 6, layout) / layout.message_bytes for rank in range(6)]
    assert messages == [3, 3, 2, 2, 1, 1]
