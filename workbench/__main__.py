"""`python -m workbench`: the command `workbench`, and the entry of every rank that the command line starts."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence

from workbench.cli.main import main


def leave(status: int) -> None:
    """End this process. A failed rank ends at once, without Python's finalisation.

    Threads of its communication library may still wait for a rank that has left. A thread that returns during
    finalisation can abort the process, or delay its end.

    Any other process ends normally. `gc.freeze` avoids the last garbage collection, which takes 0.4 s if torch is
    imported.
    """
    if status and "RANK" in os.environ and "torch.distributed" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    gc.freeze()
    raise SystemExit(status)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run one command, and end this process with its exit status."""
    try:
        code = main(arguments)
    except Exception:  # noqa: BLE001 - printed as the interpreter would
        traceback.print_exc()
        code = 1
    leave(code)


if __name__ == "__main__":
    run()
