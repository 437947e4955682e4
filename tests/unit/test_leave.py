"""How a rank's process ends: one that failed does not wait for its library's threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAILS = """
import os, sys, threading, time, types
sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
from workbench.__main__ import leave
threading.Thread(target=time.sleep, args=(seconds,)).start()
print("said")
leave(3)
"""


@pytest.mark.parametrize(("rank", "seconds"), [({"RANK": "0"}, 60.0), ({}, 0.1)], ids=["a rank", "no rank"])
def test_who_failed_ends_with_what_it_said_and_its_status(rank: dict[str, str], seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", f"seconds = {seconds}{FAILS}"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "")
