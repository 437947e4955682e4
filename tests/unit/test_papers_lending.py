"""Where a notebook's ranks are, and what a finding calls that."""

from __future__ import annotations

import pytest

from workbench.papers import where_of, within_reach


@pytest.mark.parametrize(
    ("launcher", "job", "place"),
    [
        ("local", "", "local ranks"),
        ("torch", "", "local ranks"),
        ("local", "17", "cluster"),
        ("emulated:1gbit", "", "emulated network"),
        ("emulated:1gbit", "17", "emulated network"),
        ("slurm:nodes=2", "", "cluster"),
        ("ssh:a,b", "", "cluster"),
    ],
)
def test_places(launcher: str, job: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    assert where_of(launcher) == place


@pytest.mark.parametrize(
    ("launcher", "user", "reached", "words"),
    [
        ("emulated:1gbit", 1000, "local", "needs root"),
        ("emulated:1gbit", 0, "emulated:1gbit", ""),
        ("torch", 1000, "torch", ""),
    ],
)
def test_an_emulated_network_is_for_root(
    launcher: str,
    user: int,
    reached: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert within_reach(launcher) == reached
    told = capsys.readouterr().out
    assert words in told
    assert bool(words) == bool(told)
