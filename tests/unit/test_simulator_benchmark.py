"""The simulator's benchmark compares equal work, runs, and its record agrees with its numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks import simpy_programs, simulator
from tests.benchmarks.simulator_cases import COMPUTE, MESSAGE_BYTES, PEAKS, seconds_of, simulation
from workbench.algorithms import AsyncSGD, PipeSGD
from workbench.collectives import Ring
from workbench.costs import ethernet_10g

ROWS: list[dict[str, Any]] = json.loads(simulator.RECORD.read_text())["rows"]


@pytest.mark.parametrize("interfaces", [False, True])
def test_simpys_programs_are_the_same_schedules(interfaces: bool) -> None:
    """The same number of messages, and nearly the same virtual time.

    SimPy's ring has no updates, and its server sends the last replies at once.
    """
    ring = simulation(PipeSGD(width=2, collective=Ring()), 8, 6)
    ring.run()
    theirs = simpy_programs.ring(seconds_of(8, 6), ethernet_10g.send_s(MESSAGE_BYTES / 8), interfaces=interfaces)
    assert ring.fabric.num_messages == theirs.messages == 6 * 8 * 14
    assert theirs.seconds == pytest.approx(ring.seconds, rel=0.01)
    server = simulation(AsyncSGD(dedicated=True), 33, 6)
    server.run()
    message_s = ethernet_10g.send_s(MESSAGE_BYTES + 8)
    theirs = simpy_programs.server(seconds_of(32, 6), message_s, COMPUTE.update_s, interfaces=interfaces)
    assert server.fabric.num_messages == theirs.messages == 2 * 6 * 32
    assert theirs.seconds == pytest.approx(server.seconds, rel=0.05)


def test_it_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured in no other process: each imports torch. Garbage is not collected: a search of all objects takes seconds."""
    asked = []

    def run(command: list[str], **how: Any) -> Any:
        asked.append(tuple(command[-2:]))
        return type("Done", (), {"stdout": "1000"})

    monkeypatch.setattr(simulator.subprocess, "run", run)
    monkeypatch.setattr(simulator.gc, "collect", lambda: 0)
    with pytest.raises(SystemExit):
        simulator.main(["--quick", "--write"])
    simulator.main(["--quick"])
    assert {kind for kind, _ in asked} == set(PEAKS)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(ROWS) and all(
        " bytes a worker" in line or " s " in line or "messages/s" in line for line in shown
    )


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.simulator_cases", "times, messages of a server", "40"]
    done = simulator.subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert 40 * 500 < int(done.stdout) < 40 * 100_000


def test_intervals_and_verdicts() -> None:
    found = simulator.spread(np.array([1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.0]))
    assert found["median"] == 1.0 and 0.8 <= found["low"] <= 1.0 <= found["high"] <= 1.2 and found["rounds"] == 7
    row = {"ratio": found, "aim": {"ratio": "at least", "value": 0.5}}
    assert simulator.verdict(row).endswith(": met")
    assert simulator.verdict({**row, "aim": {"ratio": "at most", "value": 0.5}}).endswith("not met")
    assert simulator.verdict({**row, "aim": {"ratio": "at least", "value": 1.0}}).endswith("undecided")
    assert simulator.verdict({"ratio": found}) == ""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']}: {row['what']}")
def test_the_record_is_of_the_sizes_that_are_measured(row: dict[str, Any]) -> None:
    assert row["verdict"] == simulator.verdict(row)
    for value in row.values():
        if isinstance(value, dict) and "median" in value:
            assert 0 < value["low"] <= value["median"] <= value["high"]
    if row["what"].startswith("SimPy"):
        ours = next(other for other in ROWS if other["case"] == row["case"] and other["what"] == "ours")
        assert ours["messages"] == row["messages"] and ours["virtual_s"] == pytest.approx(row["virtual_s"], rel=0.05)
        quotient = ours["messages_per_s"]["median"] / row["messages_per_s"]["median"]
        assert row["ratio"]["median"] == pytest.approx(quotient, rel=0.2), "a median of ratios, not a ratio of medians"


def test_times_and_memory_are_what_was_aimed_at() -> None:
    """Every message of a ring of 64 over 100 steps; 4,096 workers x 1,000 steps; memory that does not grow with gradients."""
    aims = {row["case"]: row for row in ROWS if row.get("aim", {}).get("seconds")}
    assert {(case, row["aim"]["value"]) for case, row in aims.items()} >= {("Pipe-SGD, ring of 64, 100 steps", 20.0)}
    assert len(aims) == 3 and all(simulator.verdict(row).endswith(": met") for row in aims.values())
    memory = {row["case"].removeprefix("memory: "): row for row in ROWS if "peak_bytes" in row}
    assert set(memory) == set(PEAKS)
    one, each = memory["gradients, one program"], memory["gradients, a replica each"]
    assert set(one["peak_bytes"]) == {"10", "100", "1000"} and one["bytes_per_worker"] < 0.05 * each["bytes_per_worker"]


def test_what_missed_its_aim_is_known() -> None:
    """A step of a simulated server is ten requests, and SimPy's twin has three time-outs; of small gradients noise decides."""
    missed = {
        (row["case"].partition(",")[0], row["what"])
        for row in ROWS
        if row["verdict"] and not row["verdict"].endswith(": met")
    }
    assert missed <= {("async-sgd", "SimPy, bare"), ("async-sgd", "SimPy, interfaces"), ("digits-mlp", "ours")}
