"""Cost models of compute and communication, for simulations in virtual time.

- `compute`: seconds of a worker's passes. `stragglers` is a folder: distributions of a worker's slowdown.
- `network`, `topology`: seconds of a message, on a flat network and between hosts on switches. `profiles`: networks by
  name.
- `measure`, `count`: the compute of a real model, measured or counted.

Imports `replica`, `problems` and what lies below. Used by `theory`, `runtimes`, `calibration` and layers above. Begin
with `compute` and `network`.
"""

from workbench.costs import stragglers
from workbench.costs.compute import Compute
from workbench.costs.count import count_compute
from workbench.costs.measure import Measured, measure_compute, measure_steps
from workbench.costs.network import Network, Route
from workbench.costs.profiles import (
    ethernet,
    ethernet_1g,
    ethernet_10g,
    ethernet_25g,
    ethernet_100g,
    ethernet_200g,
    ethernet_400g,
    free,
    get,
    infiniband_hdr,
    infiniband_ndr,
    names,
    nvlink_2,
    nvlink_3,
    nvlink_4,
    pcie_3,
    pcie_4,
    pcie_5,
    shared_memory,
    wan_1g,
    wan_100m,
)
from workbench.costs.stragglers import (
    Bimodal,
    Constant,
    Empirical,
    EmpiricalByRank,
    Failures,
    Independent,
    Lognormal,
    Pareto,
    ShiftedExponential,
    SlowMachines,
    Stragglers,
    TimeVarying,
    Uniform,
    Windows,
)
from workbench.costs.topology import AnyNetwork, Topology

__all__ = [  # noqa: RUF022 - in reading order
    "Network",
    "Topology",
    "AnyNetwork",
    "Route",
    "get",
    "names",
    "ethernet",
    "ethernet_1g",
    "ethernet_10g",
    "ethernet_25g",
    "ethernet_100g",
    "ethernet_200g",
    "ethernet_400g",
    "infiniband_hdr",
    "infiniband_ndr",
    "nvlink_2",
    "nvlink_3",
    "nvlink_4",
    "pcie_3",
    "pcie_4",
    "pcie_5",
    "shared_memory",
    "wan_100m",
    "wan_1g",
    "free",
    "Compute",
    "Measured",
    "measure_compute",
    "count_compute",
    "measure_steps",
    "stragglers",
    "Stragglers",
    "Independent",
    "Constant",
    "Lognormal",
    "ShiftedExponential",
    "Pareto",
    "Uniform",
    "Bimodal",
    "Empirical",
    "EmpiricalByRank",
    "SlowMachines",
    "TimeVarying",
    "Windows",
    "Failures",
]
