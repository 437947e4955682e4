"""Emulated hosts on one machine: network namespaces connected by a network of a known rate and latency.

- `network`: `EmulatedNetwork`, which makes the hosts and ends them.
- `spec`, `rates`, `placement`: the hosts, rates such as "100mbit", and which rank is on which host.
- `namespaces`, `switch`, `relay`, `enter`: make the namespaces, connect them, forward connections of engines, and run
  a process in one.
- `launcher`: makes a network from the text of `launcher=`. `check` measures its real rate and round trip time.

Imports nothing else of `clusters`. Begin with `network`.
"""

from workbench.clusters.emulated.network import EmulatedNetwork
from workbench.clusters.emulated.placement import Placement
from workbench.clusters.emulated.rates import parse_rate, parse_seconds, rate_text
from workbench.clusters.emulated.spec import Host

__all__ = ["EmulatedNetwork", "Host", "Placement", "parse_rate", "parse_seconds", "rate_text"]
