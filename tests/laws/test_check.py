"""The laws of `workbench check` accept right algorithms, and name property, rank and step of wrong ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.laws.quorum_diloco import LateCounts, QuorumDiLoCo
from tests.laws.variants import name_of
from tests.laws.wrong_algorithms import (
    Delayed,
    DropsAtStop,
    DropsLast,
    ForgetsMomentum,
    LateByTwo,
    Own,
    OwnMomentum,
    Period,
    Undivided,
    WritesInFlight,
)
from workbench.laws import check
from workbench.program import Algorithm

FOLDER = Path(__file__).parent
RIGHT = [Own(), OwnMomentum(), Delayed(), Period(), QuorumDiLoCo()]
WRONG = [  # algorithm, the law that fails, and what it says
    (
        LateCounts(),
        "convergence",
        r"on rank \d of 4 after step \d+, with a slow rank.* away from the minimum, and began 10",
    ),
    (Undivided(), "counts", r"on rank 0 in step 0, .* counts 4 times and should count 1 times"),
    (ForgetsMomentum(), "resume", r"rank 0, stopped after step 0: after step 1, coordinate \d+ is .* and should be"),
    (DropsAtStop(), "resume", r"rank 0, stopped after step 0: after step 2, coordinate \d+ is .* and should be"),
    (LateByTwo(), "staleness", r"at most the declared 1: not so on rank 0 in step \d: its gradient is 2 updates late"),
    (
        DropsLast(),
        "counts",
        r"on rank 0 in step 0, in a run of 1 steps on 4 ranks: its gradient counts 0 times: it is lost",
    ),
    (WritesInFlight(), "buffers", r"a gradient in flight was overwritten \(rank \d, step \d\)"),
]


@pytest.mark.parametrize("algorithm", RIGHT, ids=name_of)
def test_a_right_algorithm_breaks_no_law(algorithm: Algorithm) -> None:
    verdicts = list(check(algorithm))
    assert [verdict.broken for verdict in verdicts if verdict.broken] == []
    assert sum(not verdict.not_tried for verdict in verdicts) >= 5


@pytest.mark.parametrize(("algorithm", "law", "words"), WRONG, ids=[name_of(algorithm) for algorithm, *_ in WRONG])
def test_a_wrong_algorithm_breaks_one_by_name(algorithm: Algorithm, law: str, words: str) -> None:
    (verdict,) = check(algorithm, only=[law])
    assert re.search(words, verdict.broken), verdict
    assert type(algorithm).__name__ in verdict.broken and "\n" not in verdict.broken
