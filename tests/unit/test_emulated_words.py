"""Texts that describe an emulated network: rates, times, places for ranks, launchers; and those that are refused before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.cli.emulate import _wait
from workbench.cli.main import main
from workbench.clusters.emulated import EmulatedNetwork, Placement, parse_rate, parse_seconds, rate_text
from workbench.clusters.emulated.launcher import network_of
from workbench.clusters.emulated.spec import shape
from workbench.clusters.local.spawn import spawn_ranks
from workbench.errors import ConfigError


class Ending:
    """A process that ends between two looks."""

    def __init__(self, status: int) -> None:
        self.returncode: int | None = None
        self.statuses = iter([None, status])

    def poll(self) -> int | None:
        self.returncode = next(self.statuses, self.returncode)
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Nothing to wait for."""


@pytest.mark.parametrize("status", [0, 3])
def test_a_command_may_end_at_any_moment(status: int) -> None:
    assert _wait([Ending(status)]) == status  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("1gbit", 1e9),
        ("100mbit", 1e8),
        ("2.5 Gbit/s", 2.5e9),
        ("500kbit", 5e5),
        ("10gbit", 1e10),
        ("100000bit", 1e5),
        (12345678, 12345678.0),
    ],
)
def test_rates(words: str | float, rate: float) -> None:
    assert parse_rate(words) == rate


@pytest.mark.parametrize(
    "words",
    [
        "",
        "fast",
        "1",
        "5mb",
        "10gbps",
        "1gbyte",
        "-1gbit",
        "1 gbit fast",
        "0gbit",
        "1000gbit",
        "99999bit",
        True,
        None,
        float("nan"),
    ],
)
def test_no_rates(words: str) -> None:
    with pytest.raises(ConfigError, match="rate"):
        parse_rate(words)


@pytest.mark.parametrize(
    ("words", "seconds"), [("5ms", 5e-3), ("250us", 250e-6), ("0.5s", 0.5), ("0", 0.0), (0.25, 0.25)]
)
def test_times(words: str | float, seconds: float) -> None:
    assert parse_seconds(words) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("words", ["", "5", "5 min", "-1ms", "3s", -0.1, float("nan")])
def test_no_times(words: str | float) -> None:
    with pytest.raises(ConfigError, match="latency"):
        parse_seconds(words)


def test_a_rate_is_told_as_it_was_given() -> None:
    assert [parse_rate(rate_text(rate)) for rate in (1e9, 2.5e9, 3.2e7, 5e5)] == [1e9, 2.5e9, 3.2e7, 5e5]


@pytest.mark.parametrize("rate", [1e6, 1e8, 1e9, 1e10])
def test_little_leaves_at_once_and_little_waits(rate: float) -> None:
    """After a pause at most 0.25 ms of bytes, or four frames, leave at once. A full queue holds 40 ms of bytes."""
    found = shape(rate, 250e-6)
    assert found["burst"] == max(4 * 1514, round(rate / 8 * 250e-6))
    assert found["limit"] >= rate / 8 * 40e-3
    assert found["limit"] > found["burst"] + 64 * 1024, "a whole segment of TCP must find a place"


def test_ranks_fill_hosts_in_blocks() -> None:
    places = Placement(hosts=("host0", "host1", "host2"), ranks_per_host=2)
    assert [(places.host(rank), places.local_rank(rank)) for rank in (0, 1, 2, 5)] == [
        ("host0", 0),
        ("host0", 1),
        ("host1", 0),
        ("host2", 1),
    ]
    places.check_num_ranks(6)
    with pytest.raises(ConfigError, match=r"--hosts 7\), or 3 ranks on each \(--ranks-per-host 3"):
        places.check_num_ranks(7)


def test_a_placement_is_read_where_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Placement.here() is None
    places = Placement(hosts=("host0", "host1"), ranks_per_host=3)
    for name, value in places.environment.items():
        monkeypatch.setenv(name, value)
    assert Placement.here() == places
    with pytest.raises(ConfigError, match="runs on an emulated network"):
        EmulatedNetwork(2)


@pytest.mark.parametrize("runtime", ["torch", "mpi"])
def test_more_ranks_than_places_are_refused_before_one_starts(
    runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in Placement(hosts=("host0", "host1")).environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"\(--hosts 3\), or 2 ranks on each"):
        spawn_ranks(runtime, 3, ["train"], tmp_path, lambda: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hosts", "settings", "told"),
    [
        (0, {}, "hosts=0: give a whole number"),
        (True, {}, "hosts=True"),
        (65, {}, "from 1 to 64"),
        (2, {"ranks_per_host": 0}, "ranks_per_host=0"),
        (2, {"rate": "slowly"}, "'slowly' is not a rate: write 1gbit"),
        (2, {"slow": {2: "1mbit"}}, "slow host 2: hosts are numbered from 0 to 1"),
        (2, {"slow": {1: "1mb"}}, "'1mb' is not a rate"),
        (2, {"up": "1"}, "'1' is not a rate"),
        (2, {"latency_s": "5"}, "'5' is not a latency"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(hosts: int, settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EmulatedNetwork(hosts, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "launcher",
    ["slurm", "emulated", "emulated:", "emulated:fast", "emulated:1gbit,speed=2", "emulated:1gbit,ranks-per-host=0", 4],
)
def test_launchers_that_are_none(launcher: str) -> None:
    with pytest.raises(ConfigError, match=r"launcher=|is not a rate"):
        network_of(launcher, 2)


def test_local_is_no_network() -> None:
    assert network_of("local", 2) is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--hosts", "2"], "give a command after --"),
        (["--check", "--hosts", "1"], "use 2 or more"),
        (["--each", "--check"], "--each needs a COMMAND"),
        (["--slow", "1", "--", "true"], "write HOST=RATE"),
        (["--slow", "1=1mbit", "--slow", "1=2mbit", "--", "true"], "host 1 has a rate already"),
        (["--rate", "5mb", "--", "true"], "'5mb' is not a rate"),
    ],
)
def test_the_shell_says_what_to_write(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", *arguments]) == 2
    assert told in capsys.readouterr().err
