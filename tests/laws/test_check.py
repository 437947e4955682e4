"""The laws of `workbench check` accept right algorithms, and name property, rank and step of wrong ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.laws.quorum_diloco import LateCounts, QuorumDiLoCo
from tests.laws.variants import name_of, representatives
from tests.laws.wrong_algorithms import (
    Delayed,
    DropsAtStop,
    DropsLast,
    ForgetsMomentum,
    LateByTwo,
    Own,
    OwnMomentum,
    Period,
    Raises,
    Stuck,
    Undivided,
    WritesInFlight,
)
from workbench.algorithms import ADPSGD, SPARTA, EagerDiLoCo, FedAvg, GradientTracking, NoLoCo, SignSGD
from workbench.cli.main import main
from workbench.errors import ConfigError
from workbench.laws import LAWS, check
from workbench.laws.checks import chosen
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


SHARED = ["traffic", "timing", "counts", "unequal-batches", "one-worker", "buffers", "late-rank"]  # others: own files


@pytest.mark.parametrize("algorithm", representatives(4), ids=name_of)
def test_no_algorithm_of_the_package_breaks_one(algorithm: Algorithm) -> None:
    """FedAvg leaves ranks out by its rule: `--skip counts`."""
    skip = ["counts"] if isinstance(algorithm, FedAvg) else []
    broken = [verdict.broken for verdict in check(algorithm, only=SHARED, skip=skip) if verdict.broken]
    assert broken == []


FEW = [
    item
    for item in representatives(4)
    if type(item) in (ADPSGD, EagerDiLoCo, GradientTracking, NoLoCo, SignSGD, SPARTA)
]


@pytest.mark.parametrize("algorithm", FEW, ids=name_of)
def test_long_runs_with_stragglers_converge(algorithm: Algorithm) -> None:
    """The families; `test_convergence.py` has short runs of all, with a tighter bound."""
    (verdict,) = check(algorithm, only=["convergence"])
    assert not verdict.broken and not verdict.not_tried


def test_a_program_that_never_ends_or_raises_is_reported() -> None:
    verdicts = list(check(Stuck(), 2, only=["buffers"])) + list(check(Raises(), 2, only=["counts", "staleness"]))
    stuck, *raised = (verdict.broken for verdict in verdicts)
    assert "Stalled" in stuck and "rank 0: Recv" in stuck
    assert all("ZeroDivisionError" in broken for broken in raised)
    assert "wrong_algorithms.py" in verdicts[-1].details


def test_names_of_laws_are_checked() -> None:
    assert [law.name for law in chosen(skip=["counts"])] == [law.name for law in LAWS if law.name != "counts"]
    with pytest.raises(ConfigError, match="did you mean counts"):
        chosen(only=["count"])
    assert all(law.statement.endswith(".") for law in LAWS)


def test_the_command_takes_a_class_an_instance_and_a_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.laws.wrong_algorithms import Delayed, LateByTwo\n"
        "class Mine(Delayed):\n    pass\n"
        "late = LateByTwo()\n"
        "def made(delay=1):\n    return Delayed(delay=delay)\n"
        "number = 3\n"
    )
    assert main(["check", f"{file}:Mine", "--only", "staleness"]) == 0
    assert "1 of 1 laws hold" in capsys.readouterr().out
    assert main(["check", f"{file}:late", "--only", "staleness"]) == 1
    assert "staleness: LateByTwo-2: staleness is at most the declared 1" in capsys.readouterr().out
    assert main(["check", f"{file}:made", "--set", "delay=2", "--only", "staleness", "--json"]) == 1
    assert '"law": "staleness"' in capsys.readouterr().out
    assert main(["check", f"{file}:number"]) == 2
    assert "name a class" in capsys.readouterr().err
    assert main(["check", f"{file}:Mine", "--only", "stale"]) == 2
    assert "did you mean staleness" in capsys.readouterr().err


def test_real_ranks_take_the_steps_of_simulated_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "mine.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(FOLDER.parents[1])!r})\n{USES}")
    assert main(["check", f"{file}:Mine", "--only", "staleness", "--real"]) == 0
    assert "holds real-ranks" in capsys.readouterr().out


USES = "from tests.laws.wrong_algorithms import Own\nclass Mine(Own):\n    pass\n"
