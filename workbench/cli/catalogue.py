"""`workbench algorithms`, `collectives`, `codecs` and `problems`: list what is available, or describe one of it."""

from __future__ import annotations

import argparse
import json
from shutil import get_terminal_size


def add_catalogue_options(listing: argparse.ArgumentParser, what: str) -> None:
    """Add the options of `workbench algorithms`, `collectives` or `codecs`, and set its function.

    Args:
        listing: the command's parser.
        what: its name.
    """
    own = "; also file.py:Class" if what == "algorithms" else ""
    listing.add_argument("name", nargs="?", help=f"describe this one{own}")
    listing.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    listing.add_argument("--json", action="store_true", help="print a JSON array; with a name, an object")
    listing.set_defaults(command=_catalogue, what=what)


def add_problems_options(problems: argparse.ArgumentParser) -> None:
    """Add the options of `workbench problems`, and set its function."""
    problems.add_argument("name", nargs="?", help="describe this one; also file.py:name")
    problems.set_defaults(command=_problems)


def _catalogue(options: argparse.Namespace) -> int:
    from workbench import catalogue

    if options.json:
        found = catalogue.describe(options.what, options.name) if options.name else catalogue.describe_all(options.what)
        text = json.dumps(found)
    elif options.name:
        text = catalogue.show(options.what, options.name)
    elif options.markdown:
        text = catalogue.markdown(options.what)
    else:
        text = catalogue.listing(options.what, min(140, max(100, get_terminal_size().columns)))
    print(text)
    return 0


def _problems(options: argparse.Namespace) -> int:
    from workbench import problems
    from workbench.problems import summaries

    if options.name:
        print(problems.describe(options.name))
    else:
        print(f"{summaries.table()}\n\n`workbench problems NAME` describes one and its options.")
    return 0
