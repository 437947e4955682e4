"""A live figure does not take the cores from the run that it draws."""

from __future__ import annotations

import pytest

from workbench.plots.live import pace


@pytest.mark.parametrize(
    ("busy_percent", "took_s", "pause_s"),
    [
        (10.0, 0.01, 0.2),  # as often as looks continuous
        (10.0, 0.1, 0.5),  # a fifth of the time
        (99.0, 0.001, 0.2),
        (99.0, 0.02, 2.0),  # a hundredth of it
        (99.0, 5.0, 3.0),  # but the pause is bounded
    ],
)
def test_drawings_leave_the_cores_to_who_needs_them(
    busy_percent: float, took_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace.psutil, "cpu_percent", lambda interval: busy_percent)
    assert pace.pause_after(took_s, 0.2) == pytest.approx(pause_s)
