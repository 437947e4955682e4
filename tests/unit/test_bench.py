"""Ratios, their spread, targets, records and changes since; and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench import bench
from workbench.bench.collective_runner import Sums
from workbench.bench.collectives import Library, rows_of
from workbench.bench.paired import alternate
from workbench.bench.records import changes, facts_of, read_record, write_record
from workbench.bench.rows import Row, compare, interval, table_of
from workbench.cli.main import main
from workbench.collectives import Native, Ring
from workbench.errors import ConfigError
from workbench.runtimes.transport.base import SoloTransport

NAMES = {"case": "a sum, 2 ranks", "what": "ours", "over": "theirs"}


def test_a_ratio_is_of_pairs_and_not_of_medians() -> None:
    """A machine that becomes ten times slower midway changes both equally."""
    theirs = np.array([1.0] * 15 + [10.0] * 16)
    row = compare(list(1.1 * theirs), list(theirs), below=1.2, **NAMES)
    assert row.ratio == pytest.approx(1.1) and row.low == pytest.approx(1.1) and row.high == pytest.approx(1.1)
    assert (row.ours, row.theirs, row.rounds) == (pytest.approx(11.0), pytest.approx(10.0), 31)


@pytest.mark.parametrize(
    ("ratios", "asked", "word"),
    [
        ([0.9, 1.0, 1.01], {"below": 1.02}, "met"),
        ([0.9, 1.0, 1.05], {"below": 1.02}, "open"),
        ([1.03, 1.04, 1.05], {"below": 1.02}, "missed"),
        ([0.6, 0.7, 0.8], {"above": 0.5}, "met"),
        ([0.4, 0.7, 0.8], {"above": 0.5}, "open"),
        ([0.3, 0.4, 0.45], {"above": 0.5}, "missed"),
        ([0.3, 0.4, 0.45], {}, ""),
    ],
)
def test_a_target_is_met_by_all_of_the_interval(ratios: list[float], asked: dict[str, float], word: str) -> None:
    assert compare(ratios, 1.0, **NAMES, **asked).word == word


def test_the_interval_covers_the_median() -> None:
    """In 19 of 20 samples or so, the true median of a skewed law lies inside."""
    draws = np.random.default_rng(1).exponential(size=(400, 30))
    inside = [low <= np.log(2) <= high for low, high in map(interval, draws)]
    assert 0.9 <= np.mean(inside) <= 0.99


def test_every_way_once_a_round_in_turning_order() -> None:
    asked: list[str] = []
    steps = {name: (lambda name=name: asked.append(name)) for name in "abc"}
    met: list[int] = []
    times = alternate(
        steps, 3, block={"a": 2, "b": 1, "c": 1}, warm=1, meet=lambda: met.append(len(asked)), slowest=lambda _: 7.0
    )
    assert times == {name: [7.0] * 3 for name in "abc"}, (
        "the warming round does not count, and the slowest rank's seconds do"
    )
    assert "".join(asked) == "caab" + "aabc" + "bcaa" + "caab"
    assert len(met) == 4 * 3


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        compare([1.0, 2.0, 3.0], 2.0, below=1.5, **NAMES),
        compare([5e9], [4e9], kind="limit", unit="B/s", **{**NAMES, "case": "other"}),
    ]
    path = tmp_path / "bench.json"
    write_record(path, facts_of("step", rows))
    facts = read_record(path)
    assert [Row.from_record(row) for row in facts["rows"]] == rows
    assert facts["rows"][0]["word"] == rows[0].word
    assert facts["machine"]["cores"] >= 1 and facts["versions"]["torch"]
    assert "GB/s" in str(table_of(rows)) and "met" not in str(table_of(rows[1:]))


def test_what_moved_is_apart_from_both_intervals(tmp_path: Path) -> None:
    def row(case: str, ratios: list[float], **more: str) -> Row:
        return compare(ratios, 1.0, **{**NAMES, "case": case, **more})

    before = facts_of(
        "step",
        [row("slower", [1.0, 1.1]), row("same", [1.0, 1.2]), row("faster", [2.0, 2.1]), row("rate", [2.0], unit="B/s")],
    )
    now = [
        row("slower", [1.2, 1.3]),
        row("same", [1.1, 1.3]),
        row("faster", [1.0, 1.1]),
        row("rate", [1.0], unit="B/s"),
        row("new", [9.0]),
    ]
    assert [(move.now.case, move.word) for move in changes(now, before)] == [
        ("slower", "slower"),
        ("faster", "faster"),
        ("rate", "slower"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"bench": "step"}',
        '{"bench": 1, "date": 1, "machine": 1, "versions": 1, "rows": [{"case": 1}]}',
    ],
)
def test_a_file_that_is_no_record_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        read_record(path)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """A benchmark of its own, whose numbers a test may change."""
    import sys
    import types

    numbers = {"ratios": [1.0, 1.0, 1.01]}

    def run(how: bench.BenchOptions) -> Iterator[Row]:
        if how.wanted(NAMES["case"]):
            yield compare(numbers["ratios"][: how.rounds], 1.0, below=1.02, **NAMES)

    module = types.ModuleType("workbench.bench.made_up")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "workbench.bench.made_up", module)
    monkeypatch.setattr(bench, "NAMES", {"made_up": "numbers of a test"})
    return numbers


def test_the_command_measures_records_and_compares(
    made_up: dict[str, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = str(tmp_path / "sub" / "record.json")
    assert main(["bench"]) == 0 and "made_up  numbers of a test" in capsys.readouterr().out
    assert main(["bench", "made_up", "-o", record]) == 0
    told, progress = capsys.readouterr()
    assert "1.000 [1.000, 1.010]  < 1.02  met" in told
    assert re.search(r"over .*: 1\.000 \[1\.000, 1\.010\] met", progress), "as soon as it is measured"
    assert main(["bench", "made_up", "--quiet"]) == 0 and capsys.readouterr().err == ""
    assert main(["bench", "made_up", "--against", record]) == 0 and "nothing changed" in capsys.readouterr().out
    made_up["ratios"] = [1.2, 1.2, 1.3]
    assert main(["bench", "made_up", "--against", record, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"][0]["word"] == "missed" and "slower than before" in err
    every = str(tmp_path / "every")
    assert (
        main(["bench", "all", "-o", every, "--against", every]) == 0 and "no earlier record" in capsys.readouterr().out
    )
    assert main(["bench", "all", "--against", every]) == 0 and "nothing changed" in capsys.readouterr().out
    assert (
        main(["bench", "all", "-o", str(tmp_path / "every")]) == 0
        and (tmp_path / "every" / "bench-made_up.json").exists()
    )


def test_a_record_of_other_cases_is_not_called_unchanged(
    made_up: dict[str, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    assert main(["bench", "made_up", "-o", str(record)]) == 0
    facts = read_record(record)
    write_record(record, {**facts, "rows": [{**row, "case": "another case"} for row in facts["rows"]]})
    capsys.readouterr()
    assert main(["bench", "made_up", "--against", str(record)]) == 0
    told = capsys.readouterr().out
    assert "nothing was compared" in told and "nothing changed" not in told
    write_record(record, {**facts, "bench": "another"})
    assert main(["bench", "made_up", "--against", str(record)]) == 2
    assert "is a record of another" in capsys.readouterr().err


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bench", "made-op"], "made_up"),
        (["bench", "made_up", "--rounds", "0"], "one round or more"),
        (["bench", "made_up", "--ranks", "1"], "two ranks or more"),
        (["bench", "all", "-o", "all.json"], "give a folder"),
        (["bench", "made_up", "--against", "nowhere.json"], "nowhere.json"),
        (["bench", "made_up", "--only", "nothing"], "no case has such a name"),
    ],
)
def test_bad_words_are_told_before_anything_is_measured(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_sums_are_held_against_the_library_and_the_wire() -> None:
    """4 ranks, 1 MB: 1.5 MB a rank, of 119.6 MB/s that 1 Gbit/s carries; a sum of 25.08 ms is at half of that."""
    times = {"library": [0.05, 0.06], "auto": [0.02508, 0.02508], "ring": [0.0125, 0.0125]}
    rows = {
        (row.what, row.kind): row
        for row in rows_of("a case", times, Library(name="Open MPI", runtime="mpi"), 4, 1_000_000, "emulated:1gbit")
    }
    assert (
        rows["auto", "peer"].ratio == pytest.approx((0.02508 / 0.05 + 0.02508 / 0.06) / 2)
        and rows["auto", "peer"].word == "met"
    )
    assert rows["ring", "peer"].word == ""
    assert rows["auto", "limit"].ratio == pytest.approx(0.5, rel=1e-3) and rows["ring", "limit"].ratio == pytest.approx(
        1.0, rel=5e-3
    )
    assert rows["auto", "limit"].above is None, "a short sum is not asked for the wire's rate"
    long = [
        row
        for row in rows_of("a case", times, Library(name="Open MPI", runtime="mpi"), 4, 1 << 24, "emulated:1gbit")
        if row.kind == "limit" and row.above
    ]
    assert [(row.what, row.above) for row in long] == [("auto", 0.95)]
    assert all(
        row.kind == "peer"
        for row in rows_of("a case", times, Library(name="Open MPI", runtime="mpi"), 4, 1 << 24, "local")
    ), "no wire, no limit"


def test_a_sum_alone_is_a_trainings_sum() -> None:
    with Sums(SoloTransport()) as sums:
        value = torch.arange(5.0)
        sums.all_reduce(Ring(), value)
        sums.all_reduce(Native(), value)
    assert value.tolist() == [0, 1, 2, 3, 4]


RECORDS = sorted((Path(__file__).parents[2] / "records").glob("bench-*.json"))


def test_committed_records_are_of_benchmarks_that_there_are() -> None:
    assert RECORDS
    about = (RECORDS[0].parent / "README.md").read_text()
    for path in RECORDS:
        facts = read_record(path)
        assert facts["bench"] in bench.NAMES and f"`{path.name}`" in about
        assert path.name == f"bench-{facts['bench']}.json" or path.name.startswith(f"bench-{facts['bench']}-"), (
            "of it, or of a part of it"
        )
        assert all(Row.from_record(row).word == row["word"] for row in facts["rows"]), (
            "the word is what its numbers make of it"
        )


def test_the_newest_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    """A window of a run begins and ends at it."""
    from workbench.bench.notebook_cost import LAST_BYTES, newest

    assert newest(tmp_path) == (-1, 0.0)
    rows = [json.dumps({"step": step, "seconds": step / 8, "loss": 1.0}) for step in range(400)]
    path = tmp_path / "metrics-00000.jsonl"
    path.write_text("\n".join(rows) + '\n{"step": 400, "sec')
    assert path.stat().st_size > 2 * LAST_BYTES
    assert newest(tmp_path) == (399, 399 / 8)
