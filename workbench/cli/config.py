"""`workbench config`: which defaults hold here, and where they are from."""

from __future__ import annotations

import argparse
import json

from workbench import config


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench config`, and set its function."""
    parser.epilog = config.__doc__
    parser.add_argument("--json", action="store_true", help="print one JSON object per setting")
    parser.set_defaults(command=_config)


def _config(options: argparse.Namespace) -> int:
    found = [config.find(name) for name in config.KNOWN]
    if options.json:
        for one in found:
            print(json.dumps({"name": one.name, "value": one.value, "from": one.origin}))
        return 0
    width = max(len(one.value or "") for one in found)
    for one in found:
        origin = one.origin if one.value is not None else "not set"
        print(f"{one.name:16}{one.value or '':{width + 2}}{origin:44}{config.KNOWN[one.name]}")
    print(f"\nFiles, the first counts more: {', '.join(map(str, config.files()))}")
    return 0
