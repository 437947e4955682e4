"""The command line, called from a test: in its process, or in a process of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from tests.forked import forked
from workbench.cli.main import main


def workbench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """The command, in this process."""
    out, told = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(told):
        found = main(arguments)
    return judged(subprocess.CompletedProcess(arguments, found, out.getvalue(), told.getvalue()), status)


def process(*arguments: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    command = forked("-m", "workbench", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env={**os.environ, **env}, check=False)
    return judged(done, status)


def judged(done: subprocess.CompletedProcess[str], status: int) -> subprocess.CompletedProcess[str]:
    assert done.returncode == status, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def train(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(workbench("train", *arguments, "--json").stdout)
    return found
