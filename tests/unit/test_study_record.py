"""records/study.json: what `wb.study` predicted for two models, and what real ranks took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "records" / "study.json").read_text())


def test_a_study_of_a_large_model_takes_its_minutes() -> None:
    for study in RECORD["studies"]:
        assert study["seconds"] <= 60 * study["asked"]["minutes"]
        assert {cell["workers"] for cell in study["cells"]} == {4, 16}
    assert max(study["parameters"] for study in RECORD["studies"]) > 4e6


def test_the_summary_is_that_of_the_rows() -> None:
    judged = [row for row in RECORD["rows"] if not row["fitted"]]
    for row in RECORD["rows"]:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert row["inside"] == (row["low_s"] <= row["measured_s"] <= row["high_s"])
    assert RECORD["how"]["inside"] == sum(row["inside"] for row in judged)
    assert RECORD["how"]["worst"] == pytest.approx(max(abs(row["error"]) for row in judged))
    assert {(row["model"], row["hosts"]) for row in judged} == {
        (name, hosts) for name in ("vit", "gpt") for hosts in (2, 4)
    }


def test_step_times_without_a_codec_are_predicted_within_a_tenth() -> None:
    plain = [row for row in RECORD["rows"] if not row["fitted"] and " with " not in row["algorithm"]]
    assert len(plain) >= 4
    assert max(abs(row["error"]) for row in plain) <= 0.1


def test_the_page_of_records_says_how_wrong_they_are() -> None:
    how = RECORD["how"]
    said = f"{how['inside']} of {how['rows']} measurements are inside their intervals, and the largest error is {how['worst']:.0%}"
    assert said.replace("%", " %") in " ".join((ROOT / "records" / "README.md").read_text().split())
