"""`workbench steer`: change settings of a running training, or pause, resume or stop it."""

from __future__ import annotations

import argparse
import json

from workbench.errors import ConfigError
from workbench.naming import parse_pairs

EXAMPLES = """
The ranks apply the change at the end of a step. Synchronous algorithms apply it on all ranks at the same step:

  workbench steer last lr=0.05
  workbench steer last width=3 collective=ring:truncate16
  workbench steer 20240131-1200 pause
  workbench steer last resume
"""


def add_steer_options(steer: argparse.ArgumentParser) -> None:
    """Add the options of `workbench steer`, and set its function."""
    steer.epilog = EXAMPLES
    steer.add_argument("run", help="name, beginning of a name, folder, or `last`")
    steer.add_argument(
        "what", nargs="+", metavar="NAME=VALUE", help="lr, or a setting of the algorithm; or pause, resume or stop"
    )
    steer.set_defaults(command=_steer)


def _steer(options: argparse.Namespace) -> int:
    from workbench.clusters.commands import WITHOUT_SETTINGS, send_command, send_settings
    from workbench.trace.store import find_run

    folder = find_run(options.run)
    if options.what[0] in WITHOUT_SETTINGS:
        if len(options.what) > 1:
            raise ConfigError(
                f"{options.what[0]} takes no other arguments: give {' '.join(options.what[1:])} in a separate command"
            )
        send_command(folder, {options.what[0]: True})
        print(f"{folder.name}: asked to {options.what[0]} at the end of a step")
        return 0
    try:
        changes = parse_pairs(options.what, "workbench steer")
    except ConfigError as error:
        raise ConfigError(f"{error}; or give one of {', '.join(WITHOUT_SETTINGS)}") from None
    plain = send_settings(folder, changes)
    print(f"{folder.name}: asked to continue with {json.dumps(plain)}")
    return 0
