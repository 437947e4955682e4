"""The helper process's shared memory is looked at before it is taken."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from workbench.errors import ConfigError
from workbench.runtimes.execution.helper_process import Helper

Usage = namedtuple("Usage", "total used free")


def a_helper(folder: Path) -> Helper:
    """Without its process."""
    helper = Helper.__new__(Helper)
    helper._folder, helper._maps, helper._buffers = SimpleNamespace(name=str(folder)), {}, []  # type: ignore[assignment]  # all that is asked of it
    return helper


def test_memory_that_is_not_there_is_refused_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = a_helper(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 60 << 20, 4 << 20))
    with pytest.raises(ConfigError, match=r"needs 8 MiB more .* 4 MiB free: enlarge it .* or use progress='thread'"):
        helper.allocate(2 << 20, torch.float32)
    assert not list(tmp_path.iterdir())
    assert helper.allocate(1 << 19, torch.float32).numel() == 1 << 19


def test_memory_is_really_taken_so_that_no_first_use_can_fail(tmp_path: Path) -> None:
    """A file with a hole in it ends the process by SIGBUS where the memory has run out meanwhile."""
    helper = a_helper(tmp_path)
    flat = helper.allocate(1 << 18, torch.float32)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_blocks * 512 >= flat.numel() * 4
