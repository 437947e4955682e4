"""`python -m workbench`: as `workbench`, and what every rank is that a command line starts."""

from __future__ import annotations

import os
import sys
import traceback

from workbench.cli.main import main


def leave(status: int) -> None:
    """End this process. A rank that failed does so at once: its library's threads may still wait for a rank that is gone, and one of them

    that came back while the interpreter ends would abort it, or hold it up.
    """
    if status and "RANK" in os.environ and "torch.distributed" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # noqa: BLE001 - told as the interpreter would
        traceback.print_exc()
        code = 1
    leave(code)
