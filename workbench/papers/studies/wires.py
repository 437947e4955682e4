"""Where ranks of a study run: a library on hosts of an emulated network, and a network whose gradient has a given size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from workbench import problems
from workbench.clusters.emulated.check import PAYLOAD
from workbench.collectives import native_bytes
from workbench.errors import ConfigError
from workbench.naming import unknown
from workbench.papers.findings import Where
from workbench.papers.pool_client import ranks, where_of, within_reach
from workbench.problems.base import Problem
from workbench.runtimes.rank.main import RuntimeName
from workbench.units import MB

if TYPE_CHECKING:
    from workbench.clusters import Cluster

LIBRARIES: Mapping[str, RuntimeName] = {"gloo": "torch", "MPI": "mpi"}
# A longer burst of the rate limit than usual: the timers of a virtual machine are late by more than the usual one.
BURST = "burst=1ms"
NOMINAL_MBIT = 1000.0  # without an emulated network
NUM_INPUTS, NUM_CLASSES = {"digits": 64, "mnist1d": 40}, 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A library on the hosts of an emulated network, or on this machine.

    Attributes:
        library: "gloo" or "MPI".
        hosts: number of hosts.
        mbit: megabits per second of each host's interface; 0: ranks of this machine without a network.
        ranks_per_host: ranks on each host.
    """

    library: str
    hosts: int
    mbit: float = 0.0
    ranks_per_host: int = 1

    @classmethod
    def parse(cls, text: str) -> Wire:
        """Make it from a text.

        >>> str(Wire.parse("gloo:4:200")), str(Wire.parse("MPI:2x2:1000")), str(Wire.parse("gloo:2"))
        ('gloo, 4 hosts, 200 Mbit/s', 'MPI, 2 hosts of 2 ranks, 1000 Mbit/s', 'gloo, 2 ranks')

        Raises:
            ConfigError: it is no such text.
        """
        library, _, rest = text.partition(":")
        places, _, mbit = rest.partition(":")
        hosts, _, ranks_per_host = places.partition("x")
        try:
            numbers = int(hosts), float(mbit or 0), int(ranks_per_host or 1)
        except ValueError:
            numbers = 0, 0.0, 0
        if library not in LIBRARIES or min(numbers[0], numbers[2]) < 1 or not 0 <= numbers[1] < math.inf:
            raise ConfigError(f"{text!r}: write LIBRARY:HOSTS:MBIT, such as gloo:4:200, MPI:2x2:1000, or gloo:2")
        return cls(library=library, hosts=numbers[0], mbit=numbers[1], ranks_per_host=numbers[2])

    def __str__(self) -> str:
        if not self.mbit:
            return f"{self.library}, {self.num_ranks} ranks"
        each = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"{self.library}, {self.hosts} hosts{each}, {self.mbit:g} Mbit/s"

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def where_slept(self) -> Where:
        """A finding's `where`, for trainings with slept compute on these ranks."""
        return where_of(self.launcher, slept=True)

    @property
    def launcher(self) -> str:
        """The launcher, as in `Cluster`; "local", with a message, if this user may not emulate a network."""
        if not self.mbit:
            return "local"
        each = f",ranks-per-host={self.ranks_per_host}" if self.ranks_per_host > 1 else ""
        return within_reach(f"emulated:{self.mbit:g}mbit,{BURST}{each}")

    def megabytes(self, sum_s: float) -> float:
        """Return the size of a gradient whose all-reduce takes `sum_s` on the wire alone.

        On ranks of this machine, a wire of `NOMINAL_MBIT` is assumed.

        >>> round(Wire(library="gloo", hosts=2, mbit=800).megabytes(0.01), 2)
        0.96
        """
        bytes_per_s = (self.mbit or NOMINAL_MBIT) * 1e6 / 8 * PAYLOAD
        sent_share = native_bytes(self.num_ranks, int(MB)) / MB
        return float(sum_s * bytes_per_s / sent_share / MB)

    @contextmanager
    def cluster(self) -> Iterator[Cluster]:
        """Start its ranks for a `with` block."""
        with ranks(self.num_ranks, self.launcher, LIBRARIES[self.library]) as cluster:
            yield cluster


def mlp_of_size(megabytes: float, *, data: str = "digits", layers: int = 5) -> Problem:
    """Return an MLP with equally wide inner layers and a gradient of about this size, on "digits" or "mnist1d".

    >>> problem = mlp_of_size(1.0, data="mnist1d")
    >>> round(4e-6 * sum(weight.numel() for weight in problem.model().parameters()), 2)
    1.0
    """
    if data not in NUM_INPUTS:
        raise unknown("data set", data, NUM_INPUTS)
    linear = NUM_INPUTS[data] + NUM_CLASSES + layers
    square = layers - 1
    numel = megabytes * MB / 4
    width = max(1, round((math.sqrt(linear**2 + 4 * square * numel) - linear) / (2 * square)))
    return problems.get(f"{data}-mlp", hidden=(width,) * layers)
