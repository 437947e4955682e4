"""Cases of the wire benchmark: networks, batch sizes, comparisons, and required ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.runtimes.rank.main import RuntimeName

if TYPE_CHECKING:
    from workbench.collectives import Collective

RATE = "1gbit"
NETWORK = f"emulated:{RATE},burst=1ms"  # timers of a virtual machine can be late by more than the usual burst
MEGABYTES = 8.0
HOSTS = (2, 4)
RATIOS = (0.5, 1, 2, 4)  # communication over compute; the batch size is fitted to it at the start (`operating_point`)
BUCKETS_MIB = (1, 5, 25)  # DDP's default is 25, which is larger than the model
OUR_BUCKETS_MIB = (1, 5)
# Concurrent layer-wise sums use the wire while another sum waits, as DDP's do on gloo's two threads. Updates run in
# the meantime.
CONCURRENT: dict[str, Any] = {"lanes": 2, "apply": "any"}
POWER_RANK = 4
STEPS, LEAD, WARM = 3, 2, 1  # `block`, `lead` and `warm` of `alternate`
MAX_ROUNDS = 8
SUMS, BATCHES_OF_SUMS = 10, 4  # to measure the work of sockets
BITS = {"16 bit": "truncate16", "8 bit": "linear8"}
PIECES = (1, 2)  # of an encoded block: more pieces hide more of the codec, but cost more processor time
PIPE = "Pipe-SGD"
LIMIT_TARGETS = {"torch": 1.05, "mpi": 1.10}  # required of Pipe-SGD
ENCODED_OF_LIMIT, LAYERWISE_OF_LIMIT, NO_SLOWER = 1.10, 1.15, 1.02
DDP = "torch DDP, its best"
FASTER: dict[tuple[float, str, str], float] = {  # (communication over compute, way, peer) -> required speed-up
    (1, PIPE, "synchronous"): 1.8,
    (1, PIPE, DDP): 1.2,
    (4, f"{PIPE}, 16 bit", DDP): 1.8,
    (4, f"{PIPE}, 8 bit", DDP): 2.5,
}
LAYERWISE = "layer-wise, its best bucket size"
CHOSEN, CHOSEN_OF_DDP, CHOSEN_OF_SWEEP = "layer-wise, chosen buckets", 0.97, 1.03
HOOKS = ("torch DDP, fp16 hook", "torch DDP, PowerSGD hook")
LIBRARY: dict[RuntimeName, str] = {"torch": "gloo", "mpi": "MPI"}


def title(number: int, runtime: RuntimeName, ratio: float) -> str:
    """Return the title of a case."""
    return f"communication about {ratio:g} of compute, {number} hosts, {LIBRARY[runtime]}"


def encoded(codec: str, pieces: int = 1) -> Collective:
    """Return Pipe-SGD's collective with a codec in the hops, with blocks in this number of pieces."""
    from workbench import codecs, collectives

    return collectives.Direct(codec=codecs.get(codec), chunks=pieces)
