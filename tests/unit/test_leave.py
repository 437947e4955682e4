"""How a command's process ends: a rank that failed does not wait for its library's threads, and no end searches all objects."""

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
def test_who_failed_ends_with_what_it_said_and_its_status(
    rank: dict[str, str], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-c", f"seconds = {seconds}{FAILS}"], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "")


def test_the_end_does_not_search_all_objects_for_garbage() -> None:
    code = "import atexit, gc, workbench.__main__ as main; atexit.register(lambda: print(gc.get_freeze_count() > 0)); main.run(['runs'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "True")
