"""JupyterLab as this project starts it asks for its token, and listens where it would anyway."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import workbench

ROOT = Path(workbench.__file__).parents[1]
OPENS = (
    "token",
    "password",
    "--ip",
    "0.0.0.0",
    "allow_origin",
    "allow_remote",
    "xsrf",
    "no-auth",
    "allow_unauthenticated",
    "certfile",
)


@pytest.mark.skipif(
    not (ROOT / "Makefile").is_file() or shutil.which("make") is None, reason="an installed package has no Makefile"
)
def test_make_lab_takes_no_lock_off() -> None:
    """As make would run it: all that it gives `jupyter lab` is the kernel, the notebook and, to root, leave to start."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "lab"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    commands = done.stdout.replace("\\\n", " ").splitlines()
    (command,) = [line for line in commands if "jupyter lab" in line]
    assert [word for word in OPENS if word in command] == []
    words = command.partition("jupyter lab")[2].split()
    assert {word for word in words if word.startswith("-")} <= {
        "--MultiKernelManager.default_kernel_name=workbench",
        "--allow-root",
    }


def test_no_kernel_and_no_setting_of_ours_takes_a_lock_off() -> None:
    found = [
        path
        for path in (ROOT / "kernels").glob("*/kernel.json")
        if any(word in path.read_text().lower() for word in OPENS)
    ]
    assert found == []
    for path in (ROOT / "kernels").glob("*/kernel.json"):
        assert "env" not in json.loads(path.read_text()) or not any(
            "TOKEN" in name for name in json.loads(path.read_text())["env"]
        )
    for path in (ROOT / "workbench").rglob("*jupyter*.json"):
        assert [word for word in OPENS if word in path.read_text().lower()] == [], path
