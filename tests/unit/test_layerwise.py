"""Layer-wise SGD's lanes and priorities: the sums that are started, their lanes, and an unchanged update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.numbered import pull
from workbench.algorithms import ApplyOrder, LayerwiseSGD, SendOrder, SynchronousSGD
from workbench.collectives import Linear, Ring
from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import FREE, AllReduce, Backward, Start
from workbench.program import Context
from workbench.runtimes.reference import ReferenceRuntime

PRIORITY = SendOrder.PRIORITY


def started(algorithm: LayerwiseSGD) -> list[Any]:
    """What is begun on each of three buckets, in backward order."""
    layout = ReferenceRuntime(algorithm, 1, pull).ranks[0].layout
    assert len(layout.buckets) == 3
    request = next(algorithm.worker(Context(0, 2, layout=layout)))
    assert isinstance(request, Backward) and request.on_bucket is not None
    gradient = Gradient(torch.zeros(layout.numel), layout, 0, 0)
    return [request.on_bucket(gradient.bucket_view(bucket)) for bucket in range(3)]


def test_buckets_are_dealt_to_lanes() -> None:
    works = started(LayerwiseSGD(bucket_bytes=0, lanes=2))
    assert [type(work) for work in works] == [Start] * 3
    assert [work.lane for work in works] == [0, 1, 0]
    assert [type(work) for work in started(LayerwiseSGD(bucket_bytes=0))] == [AllReduce] * 3, "one lane needs no name"


def test_the_front_layers_go_first() -> None:
    works = started(LayerwiseSGD(bucket_bytes=0, order=PRIORITY, collective=Ring()))
    assert [(work.lane, work.priority) for work in works] == [(FREE, 2), (FREE, 1), (FREE, 0)], (
        "the last bucket holds the first layer"
    )


@pytest.mark.parametrize("shuffle", [None, 0, 1])
@pytest.mark.parametrize("apply", ApplyOrder)
@pytest.mark.parametrize(
    "more",
    [{"lanes": 2}, {"lanes": 2, "collective": Linear()}, {"lanes": 9}, {"order": PRIORITY, "collective": Linear()}],
    ids=str,
)
def test_the_update_is_the_synchronous_one(more: dict[str, Any], apply: ApplyOrder, shuffle: int | None) -> None:
    ours = ReferenceRuntime(
        LayerwiseSGD(bucket_bytes=0, apply=apply, **more), 3, pull, momentum=0.5, lr=0.3, shuffle=shuffle
    ).run(5)
    theirs = ReferenceRuntime(SynchronousSGD(), 3, pull, momentum=0.5, lr=0.3).run(5)
    for one, other in zip(ours.ranks, theirs.ranks, strict=True):
        assert all(torch.allclose(mine, yours, rtol=1e-14) for mine, yours in zip(one.seen, other.seen, strict=True))
        assert not one.out


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ({"order": PRIORITY}, r"use Ring\(\)"),
        ({"order": PRIORITY, "collective": Ring(), "lanes": 2}, "leave lanes at 1"),
        ({"order": "first"}, "ready, priority"),
        ({"lanes": 0}, "1 or more"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        LayerwiseSGD(**wrong)
