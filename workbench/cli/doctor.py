"""`workbench doctor`: tries what works on this machine, and says how to fix the rest."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from workbench.errors import ConfigError

if TYPE_CHECKING:  # `--help` does not need this module's heavy imports
    from workbench.doctor.check_result import CheckResult

SIGNS = {"ok": "ok", "missing": "-", "warning": "!", "fault": "FAULT"}


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench doctor`, and set its function."""
    add = parser.add_argument
    add("--quick", action="store_true", help="start no ranks and no emulated network")
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="limit for ranks to find each other; 60 by default",
    )
    add("--json", action="store_true", help="print a JSON array")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from workbench.doctor import run_checks

    if options.timeout <= 0:
        raise ConfigError(f"--timeout {options.timeout:g}: give seconds above 0")
    found = []
    for item in run_checks(start=not options.quick, timeout_s=options.timeout):
        found.append(item)
        if not options.json:
            _print(item.part, SIGNS[item.state], item.found, item.fix)
    bad = any(item.state == "fault" and item.core for item in found)
    if options.json:
        print(json.dumps([asdict(item) for item in found], indent=1))
    else:
        print(f"\n{_conclusion(found)}")
    return 1 if bad else 0


def _conclusion(found: Sequence[CheckResult]) -> str:
    """Return the last line: the number of faults, or the optional parts that are missing."""
    faults = sum(item.state == "fault" for item in found)
    if faults:
        return f"{faults} to fix: see FAULT above."
    missing = ", ".join(item.part for item in found if item.state == "missing")
    return "All required parts work." + (f" Optional and missing: {missing}." if missing else "")


def _print(part: str, sign: str, found: str, fix: str) -> None:
    width = max(60, get_terminal_size((120, 24)).columns - 26)
    first, *rest = [line for text in found.splitlines() or [""] for line in textwrap.wrap(text, width) or [""]]
    print(f"{sign:6} {part:18} {first}", flush=True)
    for line in rest:
        print(f"{'':25} {line}", flush=True)
    if fix and sign != "ok":
        print(f"{'':25} fix: {fix}", flush=True)
