"""`papers check` and `papers table`: a valid order of commits, and each way to break it is found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.papers_share import CARD, KEY, commit, facts, finding, git, make_share, write_claims, write_notebook
from workbench.cli.main import main
from workbench.errors import ConfigError
from workbench.papers import history
from workbench.papers.amendments import amendments_in_git, is_complete
from workbench.papers.check import check_papers
from workbench.papers.claims import find_claim
from workbench.papers.digest import experiment_digest
from workbench.papers.records import read_record, record_file, write_record
from workbench.papers.table import BEGIN, END, stale_pages, update_pages
from workbench.papers.verdict_rows import read_paper

pytestmark = pytest.mark.notebooks
NAME = "20-one"
CLAIM = f"{KEY}/{NAME}-near-one"


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A paper with one claim, a record of it made at the claims' commit, and its pages written."""
    folder = make_share(tmp_path / "share", NAME)
    monkeypatch.setenv("WORKBENCH_SHARE", str(folder))
    record(folder, git(folder, "rev-parse", "HEAD").strip())
    update_pages()
    return folder


def record(share: Path, sha: str, **more: Any) -> Path:
    told = facts(NAME, find_claim(CLAIM), sha, **more)
    where = {found["where"] for found in told["findings"].values()}
    digest = experiment_digest(share / "notebooks" / f"{NAME}.ipynb", told["parameters"], where)
    told = {"experiment_sha256": digest, **told}
    return write_record(record_file(share / "papers", KEY, NAME, told["size"], told["site"]), told)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_is_in_order_is_called_so(share: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "check"]) == 0
    assert capsys.readouterr().out == "1 claims, 1 records: all in order\n"
    assert main(["papers", "table", "--check"]) == 0
    capsys.readouterr()
    assert main(["papers", "list", "--json", KEY]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["claim"], told["verdict"], told["mean"]) == (CLAIM, "reproduced", 1.0)


CLAIMS, RECORD = (
    Path("papers", KEY, "claims", f"{NAME}.yaml"),
    Path("papers", KEY, "records", f"{NAME}.ci.2-cores.json"),
)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda share: edit(share / CLAIMS, "[0.9, 1.1]", "[0.5, 1.1]"),
            f"the expectation of {CLAIM} was edited after this record",
        ),
        (lambda share: edit(share / CLAIMS, "kind: numeric", "kind: numerc"), "kind='numerc': write exact"),
        (lambda share: edit(share / CLAIMS, "cell: answer", "cell: anwer"), "did you mean answer"),
        (lambda share: edit(share / CLAIMS, "near-one", "near-two"), f"has no claim {NAME}-near-one"),
        (lambda share: edit(share / RECORD, '"reproduced"', '"not reproduced"'), "by its values it is 'reproduced'"),
        (lambda share: edit(share / RECORD, "1.02", "7.02"), "by its values it is 'underpowered'"),
        (lambda share: edit(share / RECORD, '"values"', '"value"'), "has no values"),
        (lambda share: edit(share / RECORD, '"2-cores"', '"3-cores"'), "does not agree with its content"),
        (lambda share: edit(share / RECORD, f'"paper": "{KEY}"', '"paper": "roe2020two"'), "is a record of roe2020two"),
        (lambda share: (share / RECORD).write_text("{}"), "is no record: it lacks notebook"),
        (lambda share: (share / RECORD).unlink(), f"{CLAIM} has the verdict 'reproduced' without a record"),
        (
            lambda share: edit(share / "papers" / "README.md", "| reproduced |", "| underpowered |"),
            "README.md is not up to date with claims and records",
        ),
        (
            lambda share: edit(share / "papers" / KEY / "card.md", "| reproduced |", "| not run |"),
            "card.md is not up to date with claims and records",
        ),
        (lambda share: edit(share / "papers" / KEY / "card.md", BEGIN, ""), "has no place for its generated part"),
        (
            lambda share: (share / "notebooks" / f"{NAME}.ipynb").rename(share / "notebooks" / "21-other.ipynb"),
            "did you mean",
        ),
        (
            lambda share: (share / "notebooks" / "sizes" / f"{NAME}.yaml").unlink(),
            "has no sizes: write notebooks/sizes/20-one.yaml",
        ),
    ],
)
def test_what_is_out_of_order_is_said(
    share: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], says: str
) -> None:
    spoil(share)
    assert main(["papers", "check"]) == 1
    assert says in capsys.readouterr().out


def test_an_expectation_may_not_be_edited_and_committed_behind_its_record(share: Path) -> None:
    """A record whose digest is forged too is found out by the claims at its commit."""
    edit(share / CLAIMS, "[0.9, 1.1]", "[0.5, 1.1]")
    commit(share)
    path = share / RECORD
    told = json.loads(path.read_text())
    told["findings"][f"{NAME}-near-one"]["digest"] = find_claim(CLAIM).digest
    write_record(path, told)
    assert any("had another expectation at the record's commit" in problem for problem in check_papers().problems)


def test_a_claim_is_older_than_its_record(share: Path) -> None:
    sha = git(share, "rev-parse", "HEAD").strip()
    write_notebook(share, "21-late", finding("21-late"))
    write_claims(share, "21-late")
    commit(share)
    late = facts("21-late", find_claim(f"{KEY}/21-late-near-one"), sha)
    write_record(record_file(share / "papers", KEY, "21-late", "ci", "2-cores"), late)
    assert any("did not exist at the record's commit" in problem for problem in check_papers().problems)


def test_a_renamed_claim_keeps_its_record(share: Path) -> None:
    """With its former id; without it, a claim with another id is another claim."""
    old, new = f"{NAME}-near-one", f"{NAME}-close-to-one"
    edit(share / CLAIMS, f"- id: {old}", f"- id: {new}\n    formerly: {old}")
    path = share / RECORD
    path.write_text(path.read_text().replace(old, new))
    update_pages()
    commit(share)
    assert check_papers().problems == []
    edit(share / CLAIMS, f"    formerly: {old}\n", "")
    assert any("was edited after this record" in problem for problem in check_papers().problems)


def test_without_history_it_is_said_that_digests_alone_are_checked(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "git", lambda *_: None)
    result = check_papers()
    assert result.problems == [] and "only the digests of expectations are checked" in result.notes[0]


def test_a_commit_that_is_not_there_is_said(share: Path) -> None:
    record(share, "0" * 40)
    result = check_papers()
    assert result.problems == [] and "is not in this history: only digests are checked" in result.notes[0]


def test_digits_never_reproduce_the_papers_own_scale(share: Path) -> None:
    sized = "expected: {between: [0.9, 1.1]}\n    scale: paper\n    reduced: {between: [0.9, 1.1]}"
    edit(share / CLAIMS, "expected: {between: [0.9, 1.1]}", sized)
    sha = commit(share)
    (share / RECORD).unlink()
    for size, word in (("ci", "same direction at reduced scale"), ("full", "reproduced")):
        record(share, sha, size=size, parameters={"size": size, "problem": "digits-mlp"})
        assert read_paper(KEY).rows[0].verdict.word == word
    assert any(
        "about the paper's own data, but was measured on digits-mlp" in problem for problem in check_papers().problems
    )


def test_the_largest_size_decides_then_the_newest_and_sites_stand_side_by_side(share: Path) -> None:
    sha = git(share, "rev-parse", "HEAD").strip()
    far = (2.0, 2.1, 1.9, 2.0, 2.05)
    record(share, sha, size="smoke", site="lab-8-gpus", date="2027-01-01T00:00:00+00:00", values=far)
    assert read_paper(KEY).rows[0].verdict.word == "reproduced", "smoke is smaller than ci"
    record(share, sha, size="ci", site="lab-8-gpus", date="2027-01-01T00:00:00+00:00", values=far)
    assert read_paper(KEY).rows[0].verdict.word == "not reproduced"
    update_pages()
    page = (share / "papers" / "README.md").read_text()
    assert f"| {KEY} `{NAME}-near-one` | reproduced (ci) | not reproduced (ci) |" in page
    assert "| claim | 2-cores | lab-8-gpus |" in page


def test_the_pages_tell_ours_beside_what_is_expected(share: Path) -> None:
    row = next(
        line for line in (share / "papers" / "README.md").read_text().splitlines() if f"`{NAME}-near-one`" in line
    )
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert cells[2:4] == ["reproduced", "1.000 (expected 0.9 to 1.1)"]
    assert cells[4] == "[0.980, 1.020], 5 seeds"
    assert cells[5] == f"[formula, 2-cores, ci]({KEY}/records/{NAME}.ci.2-cores.json)" and cells[6] == "2026-01-02"
    card = (share / "papers" / KEY / "card.md").read_text()
    assert card.startswith(CARD.partition(BEGIN)[0])
    for words in (
        f"### {NAME}: is it one?",
        f"Notebook [{NAME}](../../notebooks/{NAME}.ipynb).",
        "- P-20-one, Fig. 1: ones",
        f"**Answer**: the [record](records/{NAME}.ci.2-cores.json) has none; see the first cell of the notebook.",
        "- Why one? (review 1; cell `answer`)",
    ):
        assert words in card
    assert stale_pages() == []


def test_a_card_prints_answer_and_figure(share: Path) -> None:
    described = "figures:\n  - {id: ones, caption: 'The values.', alt: 'Five points near 1.'}\nexperiments:"
    edit(share / CLAIMS, "experiments:", described)
    figure = share / "papers" / KEY / "figures" / f"{NAME}-ones.svg"
    figure.parent.mkdir()
    figure.write_text("<svg/>")
    told = {"text": "The value is {mean:.2f}; it is {near}.", "numbers": {"mean": [1.0, 1.1, 1.2], "near": CLAIM}}
    record(share, git(share, "rev-parse", "HEAD").strip(), answer=told)
    update_pages()
    card = (share / "papers" / KEY / "card.md").read_text()
    told_text = "The value is 1.10 [0.85, 1.35]; it is 1.000 [0.980, 1.020]."
    assert f"**Answer** (size `ci`, [record](records/{NAME}.ci.2-cores.json)). {told_text}" in card
    assert f"![Five points near 1.](figures/{NAME}-ones.svg)\n\n*The values.*\n" in card


def test_an_answer_by_a_claim_that_is_gone_is_not_printed(share: Path) -> None:
    told = {"text": "It is {near}.", "numbers": {"near": f"{KEY}/renamed"}}
    record(share, git(share, "rev-parse", "HEAD").strip(), answer=told)
    assert main(["papers", "table"]) == 0
    card = (share / "papers" / KEY / "card.md").read_text()
    assert f"answers by {KEY}/renamed, no longer a claim: measure again." in card


def test_the_answer_of_the_record_is_that_of_the_notebook(share: Path) -> None:
    path = share / "notebooks" / f"{NAME}.ipynb"
    content = json.loads(path.read_text())
    content["cells"][0]["source"] = "# one?\n\n**Answer**: none yet.\n\nMore."
    path.write_text(json.dumps(content))
    sha = commit(share)
    told = {"text": "The value is {mean:.2f}:\n- by the record, {near}.", "numbers": {"mean": [1.0], "near": CLAIM}}
    record(share, sha, answer=told)
    update_pages()
    assert [page.name for page in stale_pages()] == [path.name]
    assert main(["papers", "table"]) == 0
    first = "".join(json.loads(path.read_text())["cells"][0]["source"])
    link = f"[record](../papers/{KEY}/records/{NAME}.ci.2-cores.json)"
    lines = [
        "# one?",
        "",
        f"**Answer** (size `ci`, {link}). The value is",
        "1.00:",
        "- by the record, 1.000 [0.980, 1.020].",
        "",
        "More.",
    ]
    assert first.splitlines() == lines
    assert stale_pages() == [] and check_papers().stale == [], "text is no part of the experiment"


def test_headlines_come_first_and_are_no_part_of_the_digest(share: Path) -> None:
    readme = share / "papers" / "README.md"
    assert "## Headlines" not in readme.read_text()
    before = find_claim(CLAIM).digest
    edit(share / CLAIMS, "kind: numeric", "kind: numeric\n    headline: true\n    theirs: exactly 1\n    unit: times")
    edit(share / CLAIMS, "provenance: derived", "provenance: verified")
    assert find_claim(CLAIM).headline and find_claim(CLAIM).digest == before
    update_pages()
    headlines, _, table = readme.read_text().partition("## Counts")
    (row,) = [line for line in headlines.splitlines() if line.startswith(f"| [{KEY}]")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells == [
        f"[{KEY}]({KEY}/card.md): the value of {NAME} is near one",
        "exactly 1",
        "1.000 [0.980, 1.020] times: **reproduced**",
        f"[formula]({KEY}/records/{NAME}.ci.2-cores.json), 5 seeds",
        f"[{NAME}](../notebooks/{NAME}.ipynb)",
    ]
    assert f"`{NAME}-near-one`" in table and "| statements of the papers | 1 | 1 |" in table
    edit(share / CLAIMS, "headline: true", "headline: yes, it is")
    with pytest.raises(ConfigError, match="headline must be true or false"):
        find_claim(CLAIM)


def test_the_front_page_has_the_headlines_where_it_has_a_place_for_them(share: Path) -> None:
    front = share / "README.md"
    edit(share / CLAIMS, "kind: numeric", "kind: numeric\n    headline: true\n    theirs: exactly 1")
    edit(share / CLAIMS, "provenance: derived", "provenance: verified")
    front.write_text("# Title\n\nNo place.\n")
    update_pages()
    assert front.read_text() == "# Title\n\nNo place.\n"
    front.write_text(f"# Title\n\n{BEGIN}\n{END}\n\nMore.\n")
    assert front in stale_pages()
    update_pages()
    lines = front.read_text().splitlines()
    assert (
        f"| the value of {NAME} is near one ([{KEY}](papers/{KEY}/card.md)) | exactly 1 | 1.000 [0.980, 1.020] | reproduced; formula |"
        in lines
    )
    assert "Of 1 statements of the papers: 1 reproduced." in lines
    assert lines[0] == "# Title" and lines[-1] == "More." and stale_pages() == []


def test_a_headline_that_is_not_measured_says_so(share: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(share / CLAIMS, "kind: numeric", "kind: numeric\n    headline: true")
    (share / RECORD).unlink()
    update_pages()
    assert "| none quoted | not measured yet |  |" in (share / "papers" / "README.md").read_text()
    assert main(["papers", "check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda told: told.pop("experiment_sha256"), "no digest"),
        (lambda told: told.update(experiment_sha256="0" * 16), "other code"),
        (lambda told: told.update(parameters={"size": "smoke"}), "other parameters"),
    ],
)
def test_stale_records_are_named_and_no_problem(
    share: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[dict[str, Any]], object], reason: str
) -> None:
    told = json.loads((share / RECORD).read_text())
    spoil(told)
    write_record(share / RECORD, told)
    assert stale_pages() == [], "the mark is not compared"
    update_pages()
    page = (share / "papers" / "README.md").read_text()
    assert f"| reproduced, stale ({reason}) |" in page and f"Stale: 1 of 1 measured claims (1 {reason})." in page
    assert main(["papers", "check"]) == 0
    assert f"  {KEY}/records/{RECORD.name}: {reason}\n" in capsys.readouterr().out
    edit(share / CLAIMS, "kind: numeric", "kind: numeric\n    headline: true")
    update_pages()
    assert check_papers().problems == []
    assert main(["papers", "check"]) == 0, "a stale headline is no problem either"


def test_amendments_are_logged_from_git(share: Path) -> None:
    """Edits before the first record are counted; those after it are printed with their commits."""
    write_notebook(share, "21-two", finding("21-two"), ci="{scale: 1.0}")
    write_claims(share, "21-two")
    commit(share)
    edit(share / "papers" / KEY / "claims" / "21-two.yaml", "metric: the value", "metric: the first value")
    commit(share)
    edit(share / "notebooks" / "sizes" / f"{NAME}.yaml", "ci: {}", "ci: {scale: 1.5}")
    edit(share / CLAIMS, "[0.9, 1.1]", "[0.5, 1.1]")
    edit(share / CLAIMS, "statement: the value", "statement: a value")
    sha = commit(share)
    found = amendments_in_git(share / "papers", KEY)
    assert found is not None
    assert [(item.of, item.entry, item.before, item.after, item.measured) for item in found] == [
        ("21-two-near-one", "metric", "the value", "the first value", False),
        (f"{NAME}-near-one", "expected", "{'between': [0.9, 1.1]}", "{'between': [0.5, 1.1]}", True),
        (NAME, "ci: scale", "(none)", "1.5", True),
    ]
    assert any("amendments.json is not that of git's history" in problem for problem in check_papers().problems)
    record(share, sha, parameters={"scale": 1.5, "size": "ci"})
    assert main(["papers", "table"]) == 0
    card = (share / "papers" / KEY / "card.md").read_text()
    assert "Before their first records there were 1 edits." in card
    assert f"| `{sha[:10]}` | {NAME} | ci: scale | (none) | 1.5 |" in card
    commit(share)
    assert check_papers().problems == []
    edit(share / CLAIMS, "metric: the value", "metric: the value: broken")
    commit(share)
    edit(share / CLAIMS, "metric: the value: broken", "metric: the mean")
    commit(share)
    last = (amendments_in_git(share / "papers", KEY) or ())[-1]
    assert (last.entry, last.before, last.after) == ("metric", "the value", "the mean"), "a broken file hides nothing"
    before = amendments_in_git(share / "papers", KEY)
    edit(share / CLAIMS, f"id: {NAME}-near-one", f"id: {NAME}-close-to-one")
    commit(share)
    assert amendments_in_git(share / "papers", KEY) == before, "a renamed claim is no amendment"
    edit(share / CLAIMS, f"id: {NAME}-close-to-one", f"id: {NAME}-near")
    edit(share / CLAIMS, "metric: the mean", "metric: the median")
    commit(share)
    assert (amendments_in_git(share / "papers", KEY) or ())[-1].after == "deleted", "nor is an edit hidden by a new id"
    log = share / "papers" / KEY / "amendments.json"
    log.write_text("[]")
    assert not is_complete(share / "papers", KEY), "an edit cannot be left out"


def test_within_a_tolerance_a_difference_is_still_named(share: Path) -> None:
    edit(share / CLAIMS, "kind: numeric", "kind: numeric\n    no_effect: 1")
    sha = git(share, "rev-parse", "HEAD").strip()
    assert read_paper(KEY).rows[0].word == "reproduced"
    record(share, sha, values=(1.05, 1.06, 1.04, 1.05, 1.05))
    assert read_paper(KEY).rows[0].word == "reproduced, differs from 1"
    record(share, sha, values=(2.05, 2.06, 2.04, 2.05, 2.05))
    assert read_paper(KEY).rows[0].word == "not reproduced"


def test_a_record_is_one_line_a_list(share: Path) -> None:
    text = (share / RECORD).read_text()
    assert "[1.0, 1.01, 0.99, 1.02, 0.98]" in text and json.loads(text) == read_record(share / RECORD).facts


def test_a_paper_without_claims_has_none(share: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        read_paper("doe2020oen")
