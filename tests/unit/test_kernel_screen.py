"""What a notebook shows of a cell's output: few messages, a limit with a log, and lines that still change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench.kernel import screen as screens
from workbench.kernel.screen import LAST_LINES, SHOWN_CHARS, SHOWN_LINES, LimitedText, MergedScreen, TabbedScreen


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is displayed, and how displays change."""
    shown: list[Any] = []

    class Handle:
        def update(self, data: Any, **_: Any) -> None:
            shown.append(("update", data["text/plain"]))

    def display(data: Any, **options: Any) -> Any:
        shown.append(data if isinstance(data, dict) else data.data)
        if options.get("display_id") is not None:
            shown.append(options["display_id"])
        return Handle()

    monkeypatch.setattr(screens, "display", display)
    return shown


def test_consecutive_lines_of_a_stream_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: printed.append(text))
    screen = MergedScreen(2)
    for stream, line in (("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d")):
        screen.show([0], stream, line)
    screen.flush()
    assert printed == ["[0] a\n[0] b", "[0] c", "[0] d"]


@pytest.mark.parametrize(
    ("lines", "num_shown"),
    [([f"line {i}" for i in range(SHOWN_LINES + 100)], SHOWN_LINES), (["x" * (SHOWN_CHARS // 2)] * 30, 1)],
)
def test_much_text_ends_with_a_link_to_all_of_it(
    lines: list[str], num_shown: int, tmp_path: Path, displayed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "cells" / "1.log"
    screen = MergedScreen(2, log)
    for line in lines:
        screen.show([0, 1], "stdout", line)
        screen.flush()
    screen.close()
    assert log.read_text().splitlines() == [f"[0-1] {line}" for line in lines], "all of it, also what was shown"
    text = capsys.readouterr().out
    assert len(text) < SHOWN_CHARS + LAST_LINES * 600
    shown = text.splitlines()
    assert shown[:num_shown] == [f"[0-1] {line}" for line in lines[:num_shown]]
    assert shown[num_shown].startswith(f"... {len(lines) - num_shown} more lines") and str(log) in shown[num_shown]
    assert len(shown) == num_shown + 1 + min(LAST_LINES, len(lines) - num_shown)
    assert "1.log" in displayed[-1] and "<a href=" in displayed[-1]


def test_a_long_result_is_text_with_a_limit_and_a_short_one_is_displayed(
    tmp_path: Path, displayed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    screen = MergedScreen(1, tmp_path / "1.log")
    screen.show([0], "result", {"data": {"text/plain": "short"}, "metadata": {}})
    screen.show([0], "result", {"data": {"text/plain": "y" * 3 * SHOWN_CHARS}, "metadata": {}})
    screen.close()
    assert displayed[0] == {"text/plain": "short"}
    assert len(capsys.readouterr().out) < SHOWN_CHARS


def test_lines_that_change_have_one_place_and_leave_it(displayed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "CHANGES_S", 0.0)
    screen = MergedScreen(12)
    screen.change({})
    assert displayed == [], "nothing changes"
    screen.change({1: "10 %", 0: "20 %"})
    screen.change({1: "10 %", 0: "20 %"})
    screen.change(dict.fromkeys(range(12), "30 %"))
    screen.close()
    assert displayed[0] == {"text/plain": "[0] 20 %\n[1] 10 %"}
    updates = [text for kind, text in displayed[2:]]
    assert updates[0].splitlines()[-1] == "... and 4 more ranks" and updates[1:] == [""]


def test_a_display_with_an_identity_keeps_it(displayed: list[Any]) -> None:
    content = {"data": {"text/plain": "a"}, "metadata": {}, "transient": {"display_id": "of rank 1"}}
    MergedScreen(2).show([1], "display", content)
    assert displayed[-2:] == [{"text/plain": "a"}, "of rank 1"]


def test_in_tabs_each_rank_has_its_own_output(
    tmp_path: Path, displayed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screens, "display", displayed.append)
    monkeypatch.setattr(screens, "CHANGES_S", 0.0)
    screen = TabbedScreen([1, 3], tmp_path / "cell.log")
    (tab,) = displayed
    assert tuple(tab.titles) == ("rank 1", "rank 3")
    screen.show([1, 3], "stdout", "both")
    screen.show([3], "stdout", "three")
    screen.change({1: "10 %"})
    screen.flush()
    first, second = (area.outputs for area in tab.children)
    assert [output["text"] for output in first] == ["both\n", "10 %"]
    assert [output["text"] for output in second] == ["both\nthree\n"]
    image = {"data": {"image/png": "..."}, "metadata": {}, "transient": {"display_id": "a"}}
    screen.show([1], "display", image)
    screen.show([1], "update", {**image, "data": {"image/png": "new"}})
    for number in range(SHOWN_LINES + 5):
        screen.show([3], "stdout", str(number))
    screen.close()
    assert tab.children[0].outputs[1]["data"] == {"image/png": "new"}
    assert (tmp_path / "cell-rank-3.log").read_text().startswith("both\nthree\n0\n1\n")
    assert "cell-rank-3.log" in tab.children[1].outputs[-1]["data"]["text/html"]


@pytest.mark.parametrize("tabs", [False, True])
def test_a_cell_that_clears_its_output_may_print_for_hours(
    tabs: bool,
    tmp_path: Path,
    displayed: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only one line is below it at any time, so no line is too many."""
    monkeypatch.setattr(screens, "clear_output", lambda **_: None)
    monkeypatch.setattr(screens, "display", displayed.append)
    monkeypatch.setattr(screens, "CHANGES_S", 0.0)
    screen = TabbedScreen([0], tmp_path / "1.log") if tabs else MergedScreen(1, tmp_path / "1.log")
    for number in range(SHOWN_LINES + 100):
        screen.show([0], "clear", {"wait": True})
        screen.show([0], "stdout", f"step {number}")
    screen.close()
    shown = displayed[0].children[0].outputs[-1]["text"] if tabs else capsys.readouterr().out
    assert shown == f"step {number}\n" and not list(tmp_path.iterdir())


def test_after_a_clear_the_log_has_what_was_printed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "SHOWN_LINES", 2)
    text = LimitedText(tmp_path / "1.log")
    assert [text.add(f"old {number}") for number in range(3)] == [True, True, False]
    text.clear()
    assert text.close() == ("", "") and text.last == ""
    assert [text.add(f"new {number}") for number in range(3)] == [True, True, False]
    assert "1 more line " in text.close()[0]
    assert (tmp_path / "1.log").read_text().splitlines() == ["new 0", "new 1", "new 2"]


def test_lines_that_change_are_displayed_again_after_a_clear(
    displayed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screens, "CHANGES_S", 0.0)
    monkeypatch.setattr(screens, "clear_output", lambda **_: None)
    screen = MergedScreen(1)
    for _ in range(2):
        screen.change({0: "10 %"})
        screen.show([0], "clear", {"wait": False})
    assert displayed == [{"text/plain": "10 %"}, True] * 2, "an update would have nowhere to go"
