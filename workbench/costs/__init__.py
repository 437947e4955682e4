"""What compute and communication cost in virtual time."""

from workbench.costs.compute import Compute, measure_compute
from workbench.costs.network import AnyNetwork, Network, Route, ethernet, ethernet_1g, ethernet_10g, ethernet_25g, ethernet_100g, free
from workbench.costs.stragglers import Lognormal, SlowMachines, Stragglers
from workbench.naming import unknown

__all__ = [
    "AnyNetwork",
    "Compute",
    "Lognormal",
    "Network",
    "Route",
    "SlowMachines",
    "Stragglers",
    "ethernet",
    "ethernet_1g",
    "ethernet_10g",
    "ethernet_25g",
    "ethernet_100g",
    "free",
    "get",
    "measure_compute",
]

_NETWORKS = {
    "ethernet-1g": ethernet_1g,
    "ethernet-10g": ethernet_10g,
    "ethernet-25g": ethernet_25g,
    "ethernet-100g": ethernet_100g,
    "free": free,
}


def get(name: str) -> Network:
    """A network by name.

    >>> get("ethernet-10g").name
    '10 Gbit/s Ethernet'

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _NETWORKS:
        raise unknown("network", name, _NETWORKS)
    return _NETWORKS[name]
