"""Claims in their schema, verdicts by the rule, findings as cells show them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scipy.stats import ttest_1samp

from workbench.errors import ConfigError
from workbench.papers.claims import SIZES, Claim, Expectation, find_claim, read_claims
from workbench.papers.findings import (
    ANSWER_MIME,
    MIME,
    Answer,
    Finding,
    FindingOutput,
    Reporter,
    ShownAnswer,
    answer,
    on_real_clock,
)
from workbench.papers.verdicts import Estimate, estimate, interval, judge, position

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
        ("kind: ordering", "kind: ordering\n    no_effect: one", "no_effect='one': write a number"),
        ("kind: ordering", "kind: ordering\n    clock: fast", "clock='fast': write real, none"),
        (
            "kind: ordering",
            "kind: ordering\n    clock: real\n    deterministic: true",
            "what is measured on a real clock is not deterministic",
        ),
        ("    metric:", "    check: maybe\n    metric:", "check must be true or false"),
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


def test_the_interval_of_sessions_is_that_of_their_means() -> None:
    """Seeds that agree within each session do not hide that sessions differ: three are three values."""
    values = [1.00, 1.01, 0.99, 1.10, 1.11, 1.09, 1.20, 1.21, 1.19]
    sessions = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    ends = ttest_1samp([1.0, 1.1, 1.2], 0.0).confidence_interval(0.95)
    found = estimate(values, sessions)
    assert (found.low, found.high) == pytest.approx((ends.low, ends.high))
    low, high = interval(values)
    assert high - low < 0.4 * (found.high - found.low)
    assert estimate(values, [0] * 9) == estimate(values), "one session: the interval of the seeds"
    with pytest.raises(ValueError, match="give the session of each value"):
        estimate(values, [0, 1])


def test_values_that_a_seed_determines_are_no_more_certain_in_three_sessions() -> None:
    values, seeds = [1.0, 1.2, 0.9, 1.4, 1.1], [0, 1, 2, 3, 4]
    once, sessions = estimate(values), [session for session in range(3) for _ in seeds]
    found = estimate(values * 3, sessions, seeds * 3)
    assert (found.mean, found.low, found.high) == pytest.approx((once.mean, once.low, once.high))
    for clock in (False, True):
        verdict = judge(claim({"above": 1}), values * 3, "ci", real_clock=clock, sessions=sessions, seeds=seeds * 3)
        assert verdict.word == judge(claim({"above": 1}), values, "ci").word == "underpowered"
    shifted = [value + 0.3 * session for value, session in zip(values * 3, sessions, strict=True)]
    virtual, real = (
        judge(claim({"above": 1}), shifted, "ci", real_clock=clock, sessions=sessions, seeds=range(15))
        for clock in (False, True)
    )
    assert (virtual.low, virtual.high) == pytest.approx(interval(shifted)), "virtual time has no sessions, only seeds"
    assert real.high - real.low > 2 * (virtual.high - virtual.low)
    few = judge(claim({"above": 1}), [2.0, 2.1] * 3, "ci", sessions=[0, 0, 1, 1, 2, 2], seeds=[0, 1] * 3)
    assert few.word == "underpowered", "two seeds are two, in any number of sessions"


@pytest.mark.parametrize(
    ("expected", "ends", "about", "place"),
    [
        # a ratio that is expected above 1
        ({"above": 1}, (1.1, 1.3), {"no_effect": 1}, "inside"),
        ({"above": 1}, (0.7, 0.9), {"no_effect": 1}, "other side"),
        ({"above": 1}, (0.9, 1.3), {"no_effect": 1}, "across"),
        # Its mean is below 1, but the effect asked for is unknown
        (
            {"above": 1},
            (0.8, 1.1),
            {"no_effect": 1},
            "across",
        ),
        ({"above": 1}, (0.8, 1.1), {"no_effect": 1, "effect": 1.2}, "other side"),  # it excludes that effect
        ({"above": 1}, (0.8, 1.1), {"no_effect": 1, "effect": 1.05}, "across"),
        ({"above": 1}, (0.95, 1.1), {"no_effect": 1, "effect": 1.2}, "across"),  # its mean is above 1
        ({"above": 1}, (1.0, 1.0), {"no_effect": 1}, "outside"),  # equal is neither above nor below
        ({"above": 1}, (9.0, 9.9), {"no_effect": 1, "most": 5.9}, "beyond"),
        ({"above": 1}, (5.0, 9.9), {"no_effect": 1, "most": 5.9}, "inside"),
        # a ratio with an expected range
        ({"between": [1.2, 1.8]}, (1.3, 1.5), {"no_effect": 1}, "inside"),
        ({"between": [1.2, 1.8]}, (1.9, 2.5), {"no_effect": 1}, "beyond"),
        ({"between": [1.2, 1.8]}, (1.05, 1.15), {"no_effect": 1}, "outside"),  # an effect, too small
        ({"between": [1.2, 1.8]}, (0.9, 1.1), {"no_effect": 1}, "outside"),  # no effect
        ({"between": [1.2, 1.8]}, (0.5, 0.9), {"no_effect": 1}, "other side"),
        ({"between": [1.2, 1.8]}, (1.7, 2.5), {"no_effect": 1}, "across"),
        ({"between": [1.2, 1.8]}, (0.5, 1.3), {"no_effect": 1, "effect": 1.2}, "across"),
        # a tolerance around the value of no effect, or a range without such a value
        ({"between": [-0.1, 0.1]}, (0.2, 0.3), {"no_effect": 0}, "outside"),
        ({"between": [-0.1, 0.1]}, (-0.3, -0.2), {"no_effect": 0}, "outside"),
        ({"between": [1.2, 1.8]}, (1.9, 2.5), {}, "outside"),
        ({"between": [1.2, 1.8]}, (0.1, 0.2), {}, "outside"),
        # a decrease
        ({"below": 1}, (0.7, 0.9), {"no_effect": 1}, "inside"),
        ({"below": 1}, (1.1, 1.3), {"no_effect": 1}, "other side"),
        ({"below": 1}, (0.95, 1.2), {"no_effect": 1, "effect": 0.8}, "other side"),
        ({"below": 1}, (0.1, 0.2), {"no_effect": 1, "most": 0.3}, "beyond"),
        ({"below": 1}, (1.0, 1.0), {"no_effect": 1}, "outside"),
    ],
)
def test_where_an_interval_lies(
    expected: dict[str, object], ends: tuple[float, float], about: dict[str, float], place: str
) -> None:
    low, high = ends
    found = Estimate(mean=(low + high) / 2, low=low, high=high)
    assert position(found, Expectation.of(expected), **about) == place


@pytest.mark.parametrize(
    ("expected", "values", "word"),
    [
        ({"above": 1}, [1.1, 1.2, 1.15, 1.18, 1.12], "reproduced"),
        ({"above": 1}, [0.9, 0.8, 0.85, 0.82, 0.88], "points the other way"),
        ({"above": 1.5}, [0.9, 0.8, 0.85, 0.82, 0.88], "not reproduced"),  # no value of no effect is known
        ({"above": 1}, [0.9, 1.2, 1.0, 1.05, 0.95], "underpowered"),
        ({"above": 1}, [1.1, 1.2, 1.15, 1.18], "underpowered"),  # four seeds
        ({"above": 1}, [0.1, 0.2, 0.15, 0.18], "underpowered"),  # four seeds
        ({"between": [1, 2]}, [1.4, 1.5, 1.6, 1.5, 1.4], "reproduced"),
        ({"between": [1, 2]}, [1.9, 2.0, 2.1, 2.0, 1.9], "underpowered"),
        ({"between": [1, 2]}, [2.9, 3.0, 3.1, 3.0, 2.9], "not reproduced"),
        ({"value": 2.0, "rel": 0.1}, [2.0, 2.01, 1.99, 2.0, 2.0], "reproduced"),
    ],
)
def test_verdicts(expected: dict[str, object], values: list[float], word: str) -> None:
    assert judge(claim(expected), values, "ci").word == word


def test_more_than_the_paper_says_is_no_confirmation() -> None:
    """At a reduced size only a direction is expected. The paper's own range still says what is too much."""
    about = claim({"value": 5.4, "rel": 0.1}, scale="paper", reduced=Expectation.of({"above": 1}))
    assert judge(about, [16.3, 16.5, 16.4, 16.2, 16.6], "ci").word == "overshoots"
    assert judge(about, [16.3, 16.5, 16.4, 16.2, 16.6], "full").word == "overshoots"
    assert judge(about, [5.3, 5.5, 5.4, 5.2, 5.6], "ci").word == "same direction at reduced scale"
    assert judge(about, [0.2, 0.3, 0.25, 0.2, 0.3], "ci").word == "points the other way"
    own = claim({"value": 5.4, "rel": 0.1}, scale="paper", reduced=Expectation.of({"between": [1, 20]}), no_effect=1.0)
    assert judge(own, [16.3, 16.5, 16.4, 16.2, 16.6], "ci").word == "same direction at reduced scale"


def test_a_powered_result_on_the_wrong_side_is_not_underpowered() -> None:
    """Half a point is expected, 0.1 is the least; the interval ends at 0.06 and its mean is negative."""
    values = [-0.0926, 0.0926, -0.1852, -0.2778, -0.0926]
    about = claim({"value": 0.5, "abs": 0.4}, scale="paper", reduced=Expectation.of({"above": 0}))
    assert about.effect == pytest.approx(0.1)
    assert judge(about, values, "ci").word == "points the other way"
    assert judge(about, [10 * value for value in values], "ci").word == "underpowered", "it does not exclude 0.1"


def test_a_cap_is_no_value() -> None:
    capped = claim({"above": 1}, cap=15.0)
    verdict = judge(capped, [15.0, 15.0, 3.0, 2.0, 4.0], "ci")
    assert (verdict.word, verdict.num_censored) == ("censored", 2)
    assert judge(capped, [14.0, 14.5, 3.0, 12.0, 14.0], "ci").num_censored == 0
    verdict = judge(claim({"above": 1}), [5.0] * 5, "ci", censored=[False, False, True, False, False])
    assert (verdict.word, verdict.num_censored) == ("censored", 1)


def test_a_deterministic_value_is_judged_by_itself() -> None:
    exact = claim({"value": 0.0, "abs": 0.0}, deterministic=True)
    assert judge(exact, [0.0], "smoke").word == "reproduced"
    assert judge(exact, [1e-9], "smoke").word == "not reproduced"
    assert judge(claim({"above": 1}, deterministic=True), [1.0], "ci").word == "not reproduced", "the same is not above"


def test_what_is_measured_is_not_deterministic_and_includes_its_sessions() -> None:
    once = claim({"below": 0.1}, deterministic=True)
    verdict = judge(once, [0.035], "ci", real_clock=True)
    assert (verdict.word, verdict.num_sessions) == ("underpowered", 1)
    values = [1.10, 1.11, 1.12, 1.13, 1.14, 1.90, 1.91, 1.92, 1.93, 1.94]
    two = [0] * 5 + [1] * 5
    faster = claim({"above": 1})
    assert judge(faster, values, "ci", real_clock=True).word == "reproduced"
    verdict = judge(faster, values, "ci", real_clock=True, sessions=two)
    assert (verdict.word, verdict.num_sessions) == ("underpowered", 2)
    assert judge(faster, values, "ci", sessions=two).num_sessions == 0, "virtual time has no sessions"


@pytest.mark.parametrize(
    ("where", "clock", "real"),
    [
        ("local ranks", None, True),
        ("emulated network, slept compute", None, True),
        ("simulated cluster", None, False),
        ("one process", None, False),
        ("one process", "real", True),
        ("emulated network", "none", False),
    ],
)
def test_which_findings_read_a_real_clock(where: str, clock: str | None, real: bool) -> None:
    assert on_real_clock(claim({"above": 1}, clock=clock), where) is real


@pytest.mark.parametrize(
    ("source", "provenance", "check", "origin"),
    [
        ("Fig. 1", "verified", False, "statement of the paper"),
        ("Fig. 1; P1 review 2", "recalled", False, "statement of the paper"),
        ("P1 review 2, question 3; derived", "derived", False, "reviewer's question"),
        ("public comment on P2", "derived", False, "reviewer's question"),
        ("derived", "derived", False, "own check"),
        ("P1 review 2", "derived", True, "own check"),
        ("Fig. 1", "verified", True, "own check"),
    ],
)
def test_claims_are_counted_by_their_origin(source: str, provenance: str, check: bool, origin: str) -> None:
    about = Claim(
        paper="p", id="c", notebook="n", source=source, statement="", kind="numeric", metric="m",
        expected=Expectation.of({"above": 1}), provenance=provenance, check=check,  # type: ignore[arg-type]
    )  # fmt: skip
    assert about.origin == origin


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
    finer = claim({"above": 1}, no_effect=1.0, effect=2.0, cap=9.0, clock="real", figure="speed", check=True)
    assert finer.digest == same.digest, "these tell failures apart; they cannot make a success"
    assert len({same.digest, *(other.digest for other in others)}) == 5


def test_a_finding_is_shown_with_its_verdict_and_kept_as_json() -> None:
    shown = FindingOutput(
        claim({"above": 1}),
        Finding(claim="p/c", size="ci", values=(1.2,) * 5, seeds=(0, 1, 2, 3, 4), where="local ranks", how="2 <ranks>"),
    )
    bundle = shown._repr_mimebundle_()
    assert bundle["text/plain"].startswith("p/c: reproduced\n") and "1.2, 5 seeds; expected > 1" in bundle["text/plain"]
    assert "2 &lt;ranks&gt;" in bundle["text/html"]
    assert bundle[MIME] == {
        "claim": "p/c", "size": "ci", "values": (1.2,) * 5, "seeds": (0, 1, 2, 3, 4), "where": "local ranks", "how": "2 <ranks>",
        "censored": (),
    }  # fmt: skip


def test_a_reporter_reports_claims_of_its_paper_and_names_those_that_this_size_does_not_test(
    capsys: pytest.CaptureFixture[str],
) -> None:
    how = {"paper": "daily2016leveraging", "where": "local ranks, slept compute", "seeds": [3, 4, 5, 6, 7]}
    assert Reporter(size="smoke", **how)("agd-speed-up-on-ranks", [1.0], "how") is None  # type: ignore[arg-type]
    assert capsys.readouterr().out == "daily2016leveraging/agd-speed-up-on-ranks is not tested at size smoke\n"
    verdict = Reporter(size="ci", **how)("agd-speed-up-on-ranks", [1.5, 1.6, 1.7, 1.6, 1.5], "two ranks")  # type: ignore[arg-type]
    assert verdict is not None
    assert (verdict.claim, verdict.num_values) == ("daily2016leveraging/agd-speed-up-on-ranks", 5)
    assert "5 seeds" in (shown := capsys.readouterr().out) and "slept compute; two ranks" in shown
    capped = Reporter(size="ci", **how)(  # type: ignore[arg-type]
        "agd-speed-up-on-ranks", [1.5, 1.6, 1.7, 1.6, 1.5], "two ranks", censored=[False, True, False, False, False]
    )
    assert capped is not None and (capped.word, capped.num_censored) == ("censored", 1)


def test_an_answer_is_kept_with_its_numbers() -> None:
    verdict = judge(claim({"above": 1}), [1.1, 1.2, 1.3, 1.2, 1.2], "ci")
    given = Answer(
        text="{gain:.1f} times as fast ({gain.word}), {rate} per second", numbers={"gain": "p/c", "rate": (2.5,)}
    )
    shown = ShownAnswer(given, {"p/c": verdict})
    assert repr(shown) == "1.2 [1.1, 1.3] times as fast (reproduced), 2.5 per second"
    bundle = shown._repr_mimebundle_()
    assert bundle["text/plain"] == repr(shown)
    assert bundle[ANSWER_MIME] == {"text": given.text, "numbers": {"gain": "p/c", "rate": (2.5,)}}


def test_an_answer_has_a_number_for_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    answer("{rate:.1f} per second, {ratio.mean:.2f} times", rate=[1.0, 2.0, 3.0], ratio=2)
    assert capsys.readouterr().out == "2.0 [-0.5, 4.5] per second, 2.00 times\n"
    with pytest.raises(ConfigError, match="'ratio': give one number for each field"):
        answer("{rate}", rate=1.0, ratio=2.0)
    with pytest.raises(ConfigError, match="'rate': give one number for each field"):
        answer("{rate}")
    with pytest.raises(ConfigError, match="the text has an empty line"):
        answer("One.\n\nTwo.")
