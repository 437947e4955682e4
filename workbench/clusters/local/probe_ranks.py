"""Measure messages on new ranks of this machine: `workbench calibrate --probe` starts them, and runs as each of them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from workbench.calibration.probe import Probe, probe
from workbench.clusters.local.spawn import FOLDER_VARIABLE, spawn_ranks
from workbench.trace.store import write_info

TIMEOUT_S = 120.0
FILE = "probe.json"  # what rank 0 writes into the folder


def probe_new_ranks(runtime: Literal["mpi", "torch"], num_ranks: int, arguments: Sequence[str]) -> Probe:
    """Start ranks that run `workbench ARGUMENTS`, and return what they have measured.

    Args:
        runtime: of the ranks.
        num_ranks: number of ranks.
        arguments: `calibrate ... --probe`, which calls `probe_as_rank`.

    Raises:
        LaunchError: the ranks did not start.
        WorkbenchError: the error of a rank.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_info(folder, {"status": "starting", "id": "probe"})
        spawn_ranks(runtime, num_ranks, arguments, folder, lambda: None)
        return Probe.from_record(json.loads((folder / FILE).read_text()))


def probe_as_rank(runtime: Literal["mpi", "torch"], codecs: Sequence[str]) -> None:
    """Measure as one of the ranks. Rank 0 writes the result: for `probe_new_ranks`, else into the working directory.

    Args:
        runtime: of these ranks.
        codecs: names of the codecs to measure.
    """
    from workbench.replica.local_training import share_cores
    from workbench.runtimes.rank.main import leave_world, make_transport
    from workbench.runtimes.transport.base import Deadline

    folder = Path(os.environ.get(FOLDER_VARIABLE) or ".")
    transport = make_transport(runtime, TIMEOUT_S, folder if FOLDER_VARIABLE in os.environ else None)
    try:
        share_cores(None, transport.num_workers)
        found = probe(transport, lambda what: Deadline(what, transport.peer_failure, TIMEOUT_S), codecs)
        if transport.rank == 0:
            (folder / FILE).write_text(json.dumps(found.as_record()))
    finally:
        transport.close()
    leave_world()
