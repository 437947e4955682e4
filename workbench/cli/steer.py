"""`workbench steer`: other settings for a run that goes on, or hold it, let it go on, end it; from a shell."""

from __future__ import annotations

import argparse
import json

from workbench.errors import ConfigError
from workbench.naming import parse_pairs

EXAMPLES = """
The ranks take it at the end of a step, all at the same one where they go in step:

  workbench steer last lr=0.05
  workbench steer last width=3 collective=ring:truncate16
  workbench steer 20240131-1200 pause
  workbench steer last resume
"""
WORDS = ("pause", "resume", "stop")


def add_steer_options(steer: argparse.ArgumentParser) -> None:
    """The options of `workbench steer`, and what runs it."""
    steer.formatter_class = argparse.RawDescriptionHelpFormatter
    steer.epilog = EXAMPLES
    steer.add_argument("run", help="name, beginning of a name, folder, or `last`")
    steer.add_argument(
        "what", nargs="+", metavar="NAME=VALUE", help="lr, or a setting of the method; or one of the words pause, resume, stop"
    )
    steer.set_defaults(command=_steer)


def _steer(options: argparse.Namespace) -> int:
    from workbench.clusters.commands import say, say_set
    from workbench.trace.store import find_run

    folder = find_run(options.run)
    if options.what[0] in WORDS:
        if len(options.what) > 1:
            raise ConfigError(f"{options.what[0]} stands alone: give {' '.join(options.what[1:])} in a command of its own")
        say(folder, {options.what[0]: True})
        print(f"{folder.name}: asked to {options.what[0]} at the end of a step")
        return 0
    try:
        changes = parse_pairs(options.what, "workbench steer")
    except ConfigError as error:
        raise ConfigError(f"{error}; or one of the words {', '.join(WORDS)}") from None
    plain = say_set(folder, changes)
    print(f"{folder.name}: asked to go on with {json.dumps(plain)}")
    return 0
