"""The table of algorithms and codecs: complete, with two outcomes, and its page agrees with the record."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

import workbench.algorithms
import workbench.codecs
from tests.benchmarks.combinations import ALGORITHMS, CODECS, COLLECTIVES, MARGIN, RANKS, RECORDS, outcome, page
from workbench import codecs, collectives
from workbench.codecs import Codec
from workbench.errors import ConfigError
from workbench.program import Algorithm

RECORD: dict[str, Any] = json.loads((RECORDS / "combinations.json").read_text())
ROWS: list[dict[str, Any]] = RECORD["rows"]


def test_each_combination_is_there_once() -> None:
    expected = [(name, repr(collective)) for name in ALGORITHMS for collective in COLLECTIVES]
    assert [(row["algorithm"], row["collective"]) for row in ROWS] == expected


def test_no_algorithm_that_sums_and_no_codec_is_left_out() -> None:
    sums = {
        name
        for name, item in inspect.getmembers(workbench.algorithms, inspect.isclass)
        if issubclass(item, Algorithm) and not inspect.isabstract(item) and "collective" in item.__dataclass_fields__
    }
    assert {name.partition("(")[0] for name in ALGORITHMS} == sums
    kinds = {item for _, item in inspect.getmembers(workbench.codecs, inspect.isclass) if issubclass(item, Codec)}
    assert {type(codec) for codec in CODECS} == {kind for kind in kinds if not inspect.isabstract(kind)}


def test_there_is_no_third_outcome() -> None:
    assert RECORD["settings"]["margin"] == MARGIN
    third = [row for row in ROWS if row["outcome"] not in ("trained", "refused")]
    assert not third, f"neither trained nor refused: {third}"
    short = [row for row in ROWS if row["outcome"] == "trained" and row["reached"] < 1 - MARGIN]
    assert not short, f"trained, and yet further from the exact sum's loss than the margin {MARGIN}: {short}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['algorithm']}-{row['collective']}")
def test_what_is_refused_is_still_refused_with_a_fix_and_nothing_else_is(row: dict[str, Any]) -> None:
    make = ALGORITHMS[row["algorithm"]]
    collective = next(item for item in COLLECTIVES if repr(item) == row["collective"])
    try:
        make(collective=collective).check(RANKS)
    except ConfigError as error:
        words = str(error)
        assert (row["outcome"], row.get("words")) == ("refused", words)
        assert "use " in words.lower()
    else:
        assert row["outcome"] == "trained"


@pytest.mark.parametrize("codec", codecs.names())
@pytest.mark.parametrize("collective", collectives.names())
def test_a_codec_that_leaves_out_part_for_good_is_refused_wherever_it_is(collective: str, codec: str) -> None:
    """In the hops of every collective that the package lists, on every level and in every candidate, and once around the sum."""
    try:
        summed = collectives.get(f"{collective}:{codec}")
    except ConfigError:
        return  # it takes no codec
    if codecs.get(codec).reencodes:
        collectives.check_collective(summed)
    else:
        with pytest.raises(ConfigError, match="use Once"):
            collectives.check_collective(summed)


def test_a_combination_that_does_not_train_would_be_seen() -> None:
    """A learning rate's worth of loss is missing: one that gained half of what the exact sum did."""
    row = outcome(ALGORITHMS["SynchronousSGD"], COLLECTIVES[0], gained=10.0)
    assert row["outcome"] == "failed"


def test_the_page_is_what_the_record_says() -> None:
    assert (RECORDS / "combinations.md").read_text() == page(RECORD)
