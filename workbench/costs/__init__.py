"""What compute and communication cost in virtual time."""

from workbench.costs.compute import Compute, measure_compute
from workbench.costs.network import Network, ethernet, ethernet_1g, ethernet_10g, ethernet_25g, ethernet_100g, free

__all__ = ["Compute", "Network", "ethernet", "ethernet_1g", "ethernet_10g", "ethernet_25g", "ethernet_100g", "free", "measure_compute"]
