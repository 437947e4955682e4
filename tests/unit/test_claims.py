"""Claims in their schema, verdicts by the rule, findings as cells show them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scipy.stats import ttest_1samp

from workbench.errors import ConfigError
from workbench.papers.claims import SIZES, Claim, Expectation, find_claim, read_claims
from workbench.papers.findings import MIME, Finding, Shown
from workbench.papers.verdicts import interval, judge

YAML = """
experiments:
  - {id: P-E1, artefact: Fig. 1, about: speed}
claims:
  - id: faster
    source: Fig. 1
    statement: B is faster than A
    kind: ordering
    metric: time of A over that of B
    expected: {above: 1.5}
    reduced: {above: 1}
    scale: paper
    provenance: verified
questions:
  - {id: why, asked: review 1, question: "Why?", cell: answer}
"""


def claim(expected: dict[str, object], **more: object) -> Claim:
    words = {"scale": "any", **more}
    return Claim(
        paper="p", id="c", notebook="n", source="", statement="", kind="numeric", metric="m", provenance="derived",
        expected=Expectation.of(expected), **words,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    (tmp_path / "key2020word" / "claims").mkdir(parents=True)
    (tmp_path / "key2020word" / "claims" / "21-speed.yaml").write_text(YAML)
    return tmp_path


def test_a_file_of_claims_is_read(papers: Path) -> None:
    found = read_claims("key2020word", papers)
    (faster,) = found.claims
    assert (faster.name, faster.notebook, str(faster.expected)) == ("key2020word/faster", "21-speed", "> 1.5")
    assert [str(faster.expectation_at(size)) for size in SIZES] == ["> 1", "> 1", "> 1.5"]
    assert (found.experiments[0].artefact, found.questions[0].cell) == ("Fig. 1", "answer")
    with pytest.raises(ConfigError, match="did you mean faster"):
        find_claim("key2020word/fastr", papers)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("kind: ordering", "kind: order", "kind='order': write exact, numeric"),
        ("    metric: time of A over that of B\n", "", "'faster' has no `metric`"),
        ("provenance: verified", "provenance: recalled\n    theirs: '1.7'", "a recalled number must not be quoted"),
        ("{above: 1.5}", "{abve: 1.5}", "is no expectation: write {above: x}"),
        ("    reduced: {above: 1}\n", "", "write in `reduced` what smaller sizes can show"),
        ("scale: paper", "scale: any", "leave it out"),
        ("id: faster", "id: Faster!", "an id must consist of"),
        ("    metric:", "    metrics: x\n    metric:", "did you mean metric"),
        ("asked: review 1, ", "", "has no `asked`"),
        ("questions:", "question:", "did you mean questions"),
    ],
)
def test_what_does_not_follow_the_schema_is_refused(papers: Path, old: str, new: str, says: str) -> None:
    path = papers / "key2020word" / "claims" / "21-speed.yaml"
    assert old in YAML
    path.write_text(YAML.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_claims("key2020word", papers)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_id_belongs_to_one_claim(papers: Path) -> None:
    (papers / "key2020word" / "claims" / "22-again.yaml").write_text(YAML)
    with pytest.raises(ConfigError, match="claim faster exists twice"):
        read_claims("key2020word", papers)


def test_the_interval_is_students() -> None:
    values = [1.0, 1.2, 0.9, 1.4, 1.1, 1.3]
    ends = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert interval(values) == pytest.approx((ends.low, ends.high))


@pytest.mark.parametrize(
    ("expected", "values", "word"),
    [
        ({"above": 1}, [1.1, 1.2, 1.15, 1.18, 1.12], "reproduced"),
        ({"above": 1}, [0.9, 0.8, 0.85, 0.82, 0.88], "not reproduced"),
        ({"above": 1}, [0.9, 1.2, 1.0, 1.05, 0.95], "underpowered"),
        ({"above": 1}, [1.1, 1.2, 1.15, 1.18], "underpowered"),  # four seeds
        ({"between": [1, 2]}, [1.4, 1.5, 1.6, 1.5, 1.4], "reproduced"),
        ({"between": [1, 2]}, [1.9, 2.0, 2.1, 2.0, 1.9], "underpowered"),
        ({"between": [1, 2]}, [2.9, 3.0, 3.1, 3.0, 2.9], "not reproduced"),
        ({"value": 2.0, "rel": 0.1}, [2.0, 2.01, 1.99, 2.0, 2.0], "reproduced"),
    ],
)
def test_verdicts(expected: dict[str, object], values: list[float], word: str) -> None:
    assert judge(claim(expected), values, "ci").word == word


def test_a_deterministic_value_is_judged_by_itself() -> None:
    exact = claim({"value": 0.0, "abs": 0.0}, deterministic=True)
    assert judge(exact, [0.0], "smoke").word == "reproduced"
    assert judge(exact, [1e-9], "smoke").word == "not reproduced"
    assert judge(claim({"above": 1}, deterministic=True), [1.0], "ci").word == "not reproduced", "the same is not above"


def test_smaller_sizes_show_no_more_than_the_direction() -> None:
    values = [1.6, 1.7, 1.65, 1.62, 1.68]
    about = claim({"above": 1.5}, scale="paper", reduced=Expectation.of({"above": 1}))
    assert judge(about, values, "ci").word == "same direction at reduced scale"
    assert judge(about, values, "full").word == "reproduced"
    assert judge(claim({"above": 1.5}, scale="paper", needs="8 GPUs"), values, "ci").word == "needs hardware"
    assert judge(claim({"above": 1.5}), [], "ci").word == "not run"
    with pytest.raises(ValueError, match="finite"):
        judge(about, [1.0, math.nan], "ci")


def test_an_edited_expectation_has_another_digest() -> None:
    same = claim({"above": 1}, explanation="because")
    assert claim({"above": 1}).digest == same.digest, "words around it may be mended"
    others = [
        claim({"above": 1.1}),
        claim({"below": 1}),
        claim({"above": 1}, deterministic=True),
        claim({"above": 1}, sizes=("ci",)),
    ]
    assert len({same.digest, *(other.digest for other in others)}) == 5


def test_a_finding_is_shown_with_its_verdict_and_kept_as_json() -> None:
    shown = Shown(
        claim({"above": 1}),
        Finding(claim="p/c", size="ci", values=(1.2,) * 5, seeds=(0, 1, 2, 3, 4), where="local ranks", how="2 <ranks>"),
    )
    bundle = shown._repr_mimebundle_()
    assert (
        bundle["text/plain"].startswith("p/c: reproduced\n")
        and "1.2 [1.2, 1.2], 5 seeds; expected > 1" in bundle["text/plain"]
    )
    assert "2 &lt;ranks&gt;" in bundle["text/html"]
    assert bundle[MIME] == {
        "claim": "p/c", "size": "ci", "values": (1.2,) * 5, "seeds": (0, 1, 2, 3, 4), "where": "local ranks", "how": "2 <ranks>",
    }  # fmt: skip
