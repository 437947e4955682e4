"""Emulated hosts on one machine: network namespaces connected by a network of a known rate and latency."""

from workbench.clusters.emulated.network import EmulatedNetwork
from workbench.clusters.emulated.placement import Placement
from workbench.clusters.emulated.rates import parse_rate, parse_seconds, rate_text
from workbench.clusters.emulated.spec import Host

__all__ = ["EmulatedNetwork", "Host", "Placement", "parse_rate", "parse_seconds", "rate_text"]
