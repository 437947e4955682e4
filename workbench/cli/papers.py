"""`workbench papers` and `workbench artefact`: list, check, write and bundle claims and verdicts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_papers_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench papers`, and set its function."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="list | table | check")
    listing = actions.add_parser("list", help="list every claim with its verdict")
    listing.add_argument("key", nargs="*", help="keys of papers; all by default")
    listing.add_argument("--records", type=Path, metavar="FOLDER", help="folder of records; papers/ by default")
    listing.add_argument("--json", action="store_true", help="print one JSON object per claim")
    listing.set_defaults(command=_list)
    table = actions.add_parser(
        "table", help="write the generated parts of papers/README.md, cards and notebooks, from claims and records"
    )
    table.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    table.set_defaults(command=_table)
    check = actions.add_parser(
        "check",
        help="check claims, notebooks, records and pages against each other, and name the stale records",
    )
    check.set_defaults(command=_check)


def add_artefact_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench artefact`, and set its function."""
    parser.add_argument("key", help="key of a paper")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE.zip", help="file to write; KEY.zip in this folder by default"
    )
    parser.set_defaults(command=_artefact)


def _list(options: argparse.Namespace) -> int:
    from workbench.papers.verdict_rows import read_papers

    for paper in read_papers(options.records, options.key):
        for row in paper.rows:
            if options.json:
                mean = row.verdict.mean if row.record else None
                about = {
                    "claim": row.claim.name,
                    "verdict": row.word,
                    "mean": mean,
                    "where": row.where,
                    "date": row.date,
                }
                print(json.dumps({**about, "notebook": row.claim.notebook, "statement": row.claim.statement}))
            else:
                measured = f" ({row.ours}, {row.expectation}; {row.where})" if row.record else ""
                print(f"{row.claim.name}: {row.word}{measured}")
    return 0


def _table(options: argparse.Namespace) -> int:
    from workbench.papers.table import stale_pages, update_amendments, update_notebooks, update_pages

    if options.check:
        stale = stale_pages()
        for page in stale:
            print(f"{page} is not up to date with claims and records: run `workbench papers table`")
        return 1 if stale else 0
    for path in [*update_amendments(), *update_pages(), *update_notebooks()]:
        print(f"written: {path}")
    return 0


def _check(_: argparse.Namespace) -> int:
    from workbench.papers.check import check_papers

    result = check_papers()
    for note in result.notes:
        print(note, file=sys.stderr)
    for line in result.problems:
        print(line)
    if result.stale:
        print(f"{len(result.stale)} of {result.num_records} records are stale:")
        for line in result.stale:
            print(f"  {line}")
    if result.problems:
        return 1
    print(f"{result.num_claims} claims, {result.num_records} records: all in order")
    return 0


def _artefact(options: argparse.Namespace) -> int:
    from workbench.papers.artefact import write_artefact

    path = write_artefact(options.key, options.output or Path(f"{options.key}.zip"))
    print(f"{path}: begin with {options.key}/ARTEFACT.md in it")
    return 0
