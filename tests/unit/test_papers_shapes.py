"""Networks by their shapes: bytes, operations and parts of a step that can be computed by hand."""

from __future__ import annotations

import pytest

from workbench.algorithms import LayerwiseSGD, SynchronousSGD
from workbench.costs import Compute, Network
from workbench.papers.studies.shapes import Shape, equal_layers
from workbench.theory import layerwise

LINK = Network(name="link", latency_s=1e-3, bandwidth_bytes_per_s=1e6)
STEP = Compute(forward_s=1.0, backward_s=2.0)
TAIL = 12  # bytes of the three numbers after a bucket's parameters


def test_alexnet_has_its_published_parameters_and_its_first_gradients_are_of_fully_connected_layers() -> None:
    alexnet = Shape.get("alexnet")
    assert len(alexnet.weights) == 16 and alexnet.num_bytes == 4 * 61_100_840
    dense = 4 * (9216 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 1000 + 1000)
    assert alexnet.linear_share() == pytest.approx(dense / alexnet.num_bytes)
    assert alexnet.bytes_after_convolutions() == pytest.approx((dense + 4 * 256) / alexnet.num_bytes), "with a bias"
    ready = alexnet.ready(alexnet.compute(32, 1e12))
    assert next(iter(ready)) == 0.0 and [*ready][-1] == pytest.approx(1) and [*ready.values()][-1] == 1.0
    assert [*ready.values()] == sorted(ready.values())


def test_compute_is_in_proportion_to_samples_and_the_update_to_bytes() -> None:
    shape = Shape.get("alexnet")
    one, four = (shape.compute(samples, 1e12, update_bytes_per_s=1e9) for samples in (1, 4))
    assert four.forward_s == pytest.approx(4 * one.forward_s) and four.backward_s == pytest.approx(4 * one.backward_s)
    assert one.update_s == four.update_s == pytest.approx(shape.num_bytes / 1e9)
    assert one.forward_s == pytest.approx(2 * 714_188_480 / 1e12), "published multiplications and additions of an image"


def test_the_parts_of_a_step_are_those_of_the_simulator() -> None:
    shape = equal_layers(4, 4000)
    of = shape.bucket_seconds(STEP, LINK, workers=2)
    assert of.backward_s == pytest.approx([0.5] * 4) and of.window_s == pytest.approx(1.5)
    assert of.sums_s == pytest.approx([2 * 1e-3 + (4000 + TAIL) / 1e6] * 4) and of.compute_s == pytest.approx(3.0)
    how = {"workers": 2, "network": LINK, "compute": STEP, "steps": 4}
    whole_s = 3.0 + LINK.all_reduce_s(16000, 2)
    assert shape.step_s(SynchronousSGD(), skip=1, **how) == pytest.approx(whole_s, rel=1e-5), "but for the tail"
    took_s = shape.step_s(LayerwiseSGD(bucket_bytes=0), skip=1, **how)
    assert took_s == pytest.approx(layerwise(*of, "backward").step_s) == pytest.approx(3.0 + of.sums_s[-1])
