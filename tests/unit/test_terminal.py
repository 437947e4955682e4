"""What a command prints while it works: messages of the logger, their levels, and progress lines."""

from __future__ import annotations

import argparse
import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import workbench as wb
from workbench import progress
from workbench.cli.main import main
from workbench.cli.train import _progress
from workbench.clusters.folder_results import follow_ends
from workbench.clusters.run_handle import RunHandle
from workbench.logs import LOG, UnconfiguredHandler, is_quiet, shown_on_stderr
from workbench.trace.store import list_runs, new_run, update_run

SIMULATED = ["train", "pipe-sgd", "--runtime", "simulated", "--steps", "40"]


def said_by(code: str) -> str:
    """Standard error of a program."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stderr


def test_warnings_are_printed_unless_the_program_configures_logging() -> None:
    code = "import logging, workbench; log = logging.getLogger('workbench'); {}; log.info('one'); log.warning('two')"
    assert said_by(code.format("assert isinstance(log.handlers[0], logging.NullHandler)")) == "two\n"
    configured = said_by(code.format("logging.basicConfig(level=logging.INFO)")).splitlines()
    assert configured == ["INFO:workbench:one", "WARNING:workbench:two"]
    assert said_by(code.format("log.addHandler(logging.FileHandler('/dev/null')); log.propagate = False")) == ""


def test_a_command_shows_each_message_once_and_leaves_the_logger_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before = LOG.handlers[:], LOG.level, LOG.propagate
    with shown_on_stderr(logging.WARNING):
        with shown_on_stderr(logging.INFO):  # a rank is forked from a command
            LOG.debug("unheard")
            LOG.info("progress")
            LOG.warning("a warning")
            assert not is_quiet()
        assert is_quiet()
    assert capsys.readouterr().err == "progress\nworkbench: a warning\n"
    assert (LOG.handlers[:], LOG.level, LOG.propagate) == before
    assert sum(isinstance(one, UnconfiguredHandler) for one in LOG.handlers) == 1


@pytest.mark.parametrize("place", [0, 1, 6])
@pytest.mark.parametrize(
    ("option", "seen"), [("--quiet", (False, False)), ("", (True, False)), ("--verbose", (True, True))]
)
def test_levels_before_and_after_the_command(
    option: str,
    seen: tuple[bool, bool],
    place: int,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    words = [*SIMULATED[:place], *filter(None, [option]), *SIMULATED[place:], "--lr", "1e12"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert (" of 40 steps after " in said, "Traceback" in said) == seen
    assert re.search("^workbench: .*diverged", said, re.MULTILINE), "an error is always printed"


def test_levels_of_commands_in_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "--quiet"]) == main(["kernels", "--quiet", "list"]) == 0
    assert main(["--quiet", "train", "pipe-sgd", "--no-such-setting", "3", "--quiet"]) == 2
    assert "no_such_setting" in capsys.readouterr().err, "--quiet is no setting of the algorithm"


def test_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    assert main(SIMULATED) == 0
    assert capsys.readouterr().err == "", "none in the first 30 seconds"
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    assert (
        main(["train", "async-sgd", "--runtime", "simulated", "--epochs", "2", "--workers", "3", "--timing-only"]) == 0
    )
    lines = capsys.readouterr().err.splitlines()
    steps = [
        found for line in lines if (found := re.fullmatch(r"(\d+) of (\d+) steps after [\d:]+, [\d:?]+ left", line))
    ]
    assert len(steps) == len(lines) > 5
    assert len({found[2] for found in steps if found}) == 1
    numbers = [int(found[1]) for found in steps if found]
    assert numbers == sorted(set(numbers)), "a step counts once, not for each worker"
    assert numbers[-1] >= int(lines[-1].split()[2]) - 1, "it counts to the end"
    assert main([*SIMULATED, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["steps"] == 40 and err == ""


def test_a_terminal_gets_one_line_that_is_updated(runs: Path) -> None:
    said = on_a_terminal([sys.executable, "-m", "workbench", *SIMULATED])
    line, _, table = said.partition("algorithm ")
    assert re.search(r"\d+%\|.*\| \d+/40 \[[\d:]+<[\d:?]+, .* steps/s\]", line), said
    assert "\n" not in line.strip("\r\n") and "PipeSGD" in table


def on_a_terminal(command: Sequence[str]) -> str:
    """Output of a command on a terminal of 90 columns."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("sh", ["sh", "-c", 'stty cols 90 rows 30; exec "$@"', "sh", *command])
    said = b""
    try:
        while part := os.read(terminal, 65536):
            said += part
    except OSError:  # the command has ended
        pass
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return said.decode()


def test_a_message_stands_above_the_progress_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown_on_stderr(logging.INFO), progress.progress_line(9, "steps") as line:
        line.update(3)
        LOG.warning("the disk is nearly full")
    said = capsys.readouterr().err
    assert re.search(r"0/9 .*\r +\rworkbench: the disk is nearly full\n\r.*3/9 ", said), repr(said)


def test_the_command_says_who_is_waited_for_and_who_has_left(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks write it into their log, and into the record."""
    folder = new_run({"algorithm": {"name": "BackupSGD"}, "num_workers": 3})
    options = argparse.Namespace(json=True)
    waits = "waiting 10 s for the all-reduce of step 3: rank 2 has not arrived (stopped, in backward of step 3)"
    with _progress(folder, options) as watch, (folder / "ranks.log").open("w") as log:
        watch()
        print("words of a rank", f"workbench: {waits}", "workbench: waiting 20", sep="\n", end="", file=log, flush=True)
        watch()
        watch()
        print(" s for the barrier", file=log, flush=True)
        watch()
        left = {"rank": 2, "why": "its process has ended", "unix_s": 1.0, "seen_by": 0, "seconds": 1.5, "step": 3}
        update_run(folder, departures=[left])
        watch()
        watch()
    assert [record.message for record in caplog.records] == [
        f"a rank is {waits}",
        "a rank is waiting 20 s for the barrier",
        "the run continues with 2 of 3 ranks: rank 2 left at step 3 (its process has ended)",
    ]


def test_a_wait_tells_the_step_of_how_many_and_the_time_left(runs: Path) -> None:
    folder = new_run({"algorithm": {"name": "PipeSGD"}, "num_workers": 1})
    rows = [
        {"step": step, "seconds": 2.0 * step, "loss": 0.5, "num_samples": 1, "samples": step, "bytes_sent": 0}
        for step in range(11)
    ]
    (folder / "metrics-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    update_run(folder, status="running")
    elsewhere = {"host": "elsewhere", "place": "there", "pid": 1, "started_s": 0.0}
    handle = RunHandle(folder, follow_ends(folder, None, [elsewhere]), None)  # type: ignore[arg-type]
    assert "running, step 11, loss 0.5" in str(handle)
    update_run(folder, num_steps=41)
    assert "running, step 11 of 41, 01:00 left, loss 0.5" in str(handle)
    handle.abandon("enough")


def test_a_simulation_is_stored_if_asked_and_a_refused_one_is_not(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def simulate(**how: bool) -> wb.Run:
        problem = wb.problems.digits_softmax()
        return wb.simulate(
            wb.PipeSGD(width=2), problem, workers=2, steps=2, compute=wb.costs.Compute(forward_s=1, backward_s=1), **how
        )

    assert "in memory: save() stores it" in repr(simulate())
    assert not list_runs()
    assert main(["runs"]) == 0 and "save=True" in capsys.readouterr().err
    stored = simulate(save=True)
    assert [run.id for run in list_runs()] == [stored.id] and "memory" not in repr(stored)
    assert main(["runs"]) == 0 and stored.id in capsys.readouterr().out
    refused = ["--runtime", "simulated", "--steps", "2", "--clip-norm", "1", "--set", "apply=any"]
    assert main(["train", "layerwise-sgd", *refused]) == 2
    assert len(list_runs()) == 1, "no failed run of a training that did not begin"
