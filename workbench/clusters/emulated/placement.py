"""Places ranks on the hosts of an emulated network, if this process runs in one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from workbench.errors import ConfigError

VARIABLE = "WORKBENCH_EMULATED"
ENTER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("enter.py"))]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Ranks on hosts in blocks: the first `ranks_per_host` on the first host, and so on.

    >>> two = Placement(hosts=("host0", "host1"), ranks_per_host=2)
    >>> [two.host(rank) for rank in range(4)], [two.local_rank(rank) for rank in range(4)]
    (['host0', 'host0', 'host1', 'host1'], [0, 1, 0, 1])
    """

    hosts: tuple[str, ...]
    ranks_per_host: int = 1

    @classmethod
    def here(cls) -> Placement | None:
        """Return the placement of the network that this process runs in; None outside of a network."""
        value = os.environ.get(VARIABLE)
        if value is None:
            return None
        found = json.loads(value)
        return cls(hosts=tuple(found["hosts"]), ranks_per_host=found["ranks_per_host"])

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which processes on the hosts find the placement."""
        return {VARIABLE: json.dumps({"hosts": self.hosts, "ranks_per_host": self.ranks_per_host})}

    def check_num_ranks(self, num_ranks: int) -> None:
        """Check that there is a place for each rank.

        Raises:
            ConfigError: there are fewer places; the message says how to get more.
        """
        places = len(self.hosts) * self.ranks_per_host
        if num_ranks > places:
            enough = -(-num_ranks // len(self.hosts))
            raise ConfigError(
                f"{num_ranks} ranks on {len(self.hosts)} emulated hosts with places for {places}: "
                f"use {num_ranks} hosts (--hosts {num_ranks}), or {enough} ranks on each (--ranks-per-host {enough})"
            )

    def host(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.hosts[rank // self.ranks_per_host]

    def local_rank(self, rank: int) -> int:
        """Return a rank's number among the ranks of its host."""
        return rank % self.ranks_per_host

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on that rank's host, for a process in the network."""
        return [*ENTER, "in", self.host(rank), *argv]
