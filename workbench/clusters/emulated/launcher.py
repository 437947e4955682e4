"""Makes an emulated network from the text of `launcher=`."""

from __future__ import annotations

from typing import Any

from workbench.clusters.emulated.network import EmulatedNetwork
from workbench.errors import ConfigError

EMULATED = "emulated"
OPTIONS = {"latency": "latency_s", "burst": "burst_s", "up": "up", "down": "down"}
FORM = "'emulated:1gbit', or 'emulated:1gbit,ranks-per-host=2,latency=5ms,slow=2=100mbit'"


def network_of(launcher: str | EmulatedNetwork, num_ranks: int) -> EmulatedNetwork | None:
    """Return a network with a place for each rank: the given one, or a new one. None for "local".

    Raises:
        ConfigError: there is no such launcher or option.
        LaunchError: the machine cannot emulate a network.
    """
    if launcher == "local":
        return None
    if isinstance(launcher, EmulatedNetwork):
        return launcher
    kind, colon, text = str(launcher).partition(":")
    if kind != EMULATED or not colon:
        raise ConfigError(
            f"launcher={launcher!r}: give 'local', 'torch', 'ssh:hostA:2,hostB:2', 'slurm:partition=debug', "
            f"'pbs:queue=gpu', 'lsf:...', 'sge:...', 'htcondor:...', {FORM}, or an EmulatedNetwork"
        )
    rate, *pairs = text.split(",")
    options: dict[str, Any] = {}
    slow: dict[int, str] = {}
    ranks_per_host = 1
    for pair in pairs:
        name, _, value = (part.strip() for part in pair.partition("="))
        if name == "slow" and value.partition("=")[0].isdigit():
            slow[int(value.partition("=")[0])] = value.partition("=")[2]
        elif name == "ranks-per-host" and value.isdigit() and int(value) > 0:
            ranks_per_host = int(value)
        elif name in OPTIONS:
            options[OPTIONS[name]] = value
        else:
            raise ConfigError(f"launcher={launcher!r}: {pair!r} is no option of it; write it like {FORM}")
    hosts = -(-num_ranks // ranks_per_host)
    return EmulatedNetwork(hosts, rate=rate, ranks_per_host=ranks_per_host, slow=slow, **options)
