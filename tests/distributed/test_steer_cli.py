"""`workbench steer` during a `workbench train` of another process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.forked import forked
from tests.waiting import within
from workbench.cli.main import main
from workbench.trace.run import Run
from workbench.trace.store import read_info


@pytest.mark.timeout(300)
def test_a_run_is_told_other_settings_held_and_ended_from_another_shell(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = forked(
        "-m", "workbench", "train", "pipe-sgd", "--runtime", "torch", "--steps", "1000000", "--evaluate-every", "0"
    )
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert within(90, lambda: any(path.stat().st_size > 2000 for path in runs.glob("*/metrics-00001.jsonl"))), (
            process.poll()
        )
        (folder,) = (path.parent for path in runs.glob("*/run.json"))
        assert main(["steer", "last", "widht=3"]) == 2
        assert "did you mean width" in capsys.readouterr().err
        assert main(["steer", "last", "lr=0.025", "width=3"]) == 0
        assert main(["steer", "last", "pause"]) == 0
        assert within(60, lambda: read_info(folder)["status"] == "paused")
        assert main(["steer", folder.name, "resume"]) == 0
        assert within(60, lambda: read_info(folder)["status"] == "running")
        assert main(["steer", "last", "stop"]) == 0
        said, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert json.loads(said)["run"] == folder.name
    run = Run.load(folder)
    assert run.info["status"] == "stopped"
    assert next((row["number"], row.get("set")) for row in run.info["steering"]) == (1, {"lr": 0.025, "width": 3})
    last = run.metrics[1][-1]
    assert (last["lr"], last["staleness"]) == (0.025, 2)
    assert main(["steer", "last", "pause"]) == 2
    assert "has ended (stopped)" in capsys.readouterr().err
