"""DDP hooks where they cannot work; with real ranks: tests/distributed/test_ddp_hooks.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from workbench.codecs import ErrorFeedback, TopK, Truncate16
from workbench.collectives import Native, Once, Ring
from workbench.errors import ConfigError, LaunchError
from workbench.runtimes.user_loop.ddp_hook import ddp_hook


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_ddp_hook_wants_a_group() -> None:
    with pytest.raises(LaunchError, match="init_process_group"):
        ddp_hook()


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"collective": Native(), "codec": Truncate16()}, "Ring"),
        ({"codec": ErrorFeedback(codec=TopK(fraction=0.1))}, "Once"),
        ({"codec": "truncate16"}, r"Truncate16\(\)"),
        ({"collective": "ring"}, r"Ring\(\)"),
        ({"collective": Once(codec=Truncate16()), "codec": Truncate16()}, "has a codec already"),
    ],
)
@pytest.mark.usefixtures("group_of_one")
def test_a_ddp_hook_refuses_what_does_not_go_together(options: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        ddp_hook(**options)


@pytest.mark.usefixtures("group_of_one")
def test_a_codec_goes_into_the_hops_of_a_ring_unless_another_collective_is_named() -> None:
    found = [
        ddp_hook(**options)[0]
        for options in ({}, {"codec": Truncate16()}, {"collective": Ring(chunks=2), "codec": Truncate16()})
    ]  # type: ignore[arg-type]
    assert [state.collective for state in found] == [
        Native(),
        Ring(codec=Truncate16()),
        Ring(chunks=2, codec=Truncate16()),
    ]
    for state in found:
        state.close()


LAST = """
import atexit, threading
atexit.register(lambda: print([one.name for one in threading.enumerate() if one.name == "workbench-lane"]))
import torch.distributed as dist
from workbench.runtimes.user_loop.ddp_hook import ddp_hook
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept, dropped = ddp_hook()[0], ddp_hook()[0]
print(sum(one.name == "workbench-lane" for one in threading.enumerate()))
del dropped
"""


def test_no_thread_of_a_hook_is_left_when_the_interpreter_ends() -> None:
    """One that releases a process group while the interpreter ends would abort the process."""
    done = subprocess.run([sys.executable, "-c", LAST], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split("\n")[:2] == ["2", "[]"]
