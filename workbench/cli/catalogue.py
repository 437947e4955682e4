"""`workbench algorithms`, `collectives`, `codecs` and `problems`: list what is available, or describe one of it."""

from __future__ import annotations

import argparse
import json
from shutil import get_terminal_size

from workbench.user_file import is_in_user_file


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
        text = catalogue.show(options.what, options.name, table_width())
    elif options.markdown:
        text = catalogue.markdown(options.what)
    else:
        text = catalogue.listing(options.what, max(100, table_width()))
    print(text)
    return 0


def table_width() -> int:
    """Return the width of the terminal, from 80 to 140 characters, for a table."""
    return min(140, max(80, get_terminal_size((100, 24)).columns))


def _problems(options: argparse.Namespace) -> int:
    from workbench import problems
    from workbench.problems import summaries

    if options.name and is_in_user_file(options.name):
        print(_own_problem(options.name))
    elif options.name:
        print(problems.describe(options.name))
    else:
        print(f"{summaries.table()}\n\n`workbench problems NAME` describes one and its options.")
    return 0


def _own_problem(name: str) -> str:
    """Return the facts about a problem in your own file, without its data."""
    from workbench import problems
    from workbench.problems.loading import ENDLESS

    problem = problems.get(name)
    num_samples = problem.train_source().num_samples
    loss = getattr(problem.loss, "__name__", type(problem.loss).__name__)
    facts = {
        "name": problem.name,
        "parameters": f"{problem.num_parameters():,}",
        "samples": "a stream" if num_samples == ENDLESS else f"{num_samples:,}",
        "test data": "no" if problem.test is None else "yes",
        "batch size": f"{problem.batch_size} a worker",
        "loss": f"{loss}{' of the whole batch' if problem.whole_batch else ''}",
        "metrics": ", ".join(problem.metrics),
        "note": problem.note,
    }
    return "\n".join([name, "", *(f"{title + ':':12}{fact}" for title, fact in facts.items() if fact)])
