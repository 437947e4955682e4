"""`workbench bench`: measures step times, collectives, codecs and overheads against peers and the physical limit."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError
from workbench.logs import LOG
from workbench.progress import progress_line

if TYPE_CHECKING:
    from workbench import bench
    from workbench.bench.rows import Row

EPILOG = """\
  workbench bench                                   # lists the benchmarks
  workbench bench step --ranks 2 4                  # prints a table: ratios of pairs measured in one run, with their spread
  workbench bench step --only MLP --rounds 10
  workbench bench codecs -o codecs.json             # writes a record
  workbench bench codecs --against codecs.json      # says what has changed; exit status 1 if anything is slower
  workbench bench wire --read records/bench-wire.json --figure wire     # table and figure of a record; measures nothing
"""


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench bench`, and set its function."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("name", nargs="?", help="name of a benchmark; `all` runs all of them")
    add("--rounds", type=int, default=30, help="pairs of measurements per ratio (30 by default)")
    add(
        "--ranks", type=int, nargs="+", default=[], metavar="N", help="numbers of ranks, instead of the benchmark's own"
    )
    add("--only", nargs="+", default=[], metavar="WORD", help="only cases with one of these words in the name")
    add("--json", action="store_true", help="print only the record")
    add("--output", "-o", metavar="FILE", help="write the record there; with `all`, a folder for bench-NAME.json files")
    add("--against", metavar="FILE", help="say what has changed since this record; with `all`, a folder of records")
    add("--read", metavar="FILE", help="show this record; measure nothing")
    add("--figure", metavar="FILE", help="with wire: draw step times and their limits, as FILE.svg")
    parser.set_defaults(command=_bench)


def _bench(options: argparse.Namespace) -> int:
    from workbench import bench

    if options.name is None:
        width = max(map(len, bench.NAMES))
        print("\n".join(f"{name:{width}}  {about}" for name, about in bench.NAMES.items()))
        return 0
    how = bench.BenchOptions(
        rounds=options.rounds,
        ranks=tuple(options.ranks),
        only=tuple(options.only),
        report=(lambda _: None) if options.json else LOG.info,
    )
    every = options.name == "all"
    for given in (options.output, options.against):
        if every and given and Path(given).suffix:
            raise ConfigError(f"{given}: with all benchmarks, give a folder")
    if options.figure and options.name != "wire":
        raise ConfigError(f"--figure draws the results of `workbench bench wire`, and this is {options.name}")
    if options.read and every:
        raise ConfigError("--read shows one record: name its benchmark")
    names = list(bench.NAMES) if every else [options.name]
    records = []
    with progress_line(len(names), "benchmarks", shown=every and not options.json) as line:
        for name in names:
            records.append(_one(name, how, options, every))
            line.update()
    if options.json:
        print(json.dumps([facts for facts, _slower in records] if every else records[0][0]))
    return int(any(slower for _facts, slower in records))


def _one(
    name: str, how: bench.BenchOptions, options: argparse.Namespace, every: bool
) -> tuple[dict[str, object], bool]:
    """Run one benchmark. Return its record, and whether anything is slower than in the earlier record."""
    from workbench.bench.records import changes, unchanged, write_record
    from workbench.bench.rows import Row, table_of

    earlier = _place(options.against, name, every)
    if earlier and every and not earlier.exists():
        _say(options, f"{name}: no earlier record to compare with ({earlier})")
        earlier = None
    before = _record_of(name, earlier, "--against") if earlier else None  # first, because the file may be unreadable
    facts = _record_of(name, Path(options.read), "--read") if options.read else _measured(name, how, options, before)
    rows = [Row.from_record(row) for row in facts["rows"]]
    if options.figure:
        _say(options, _draw(rows, Path(options.figure)))
    if not options.json:
        _say(options, f"\n{table_of(rows, f'{name}: medians, and ratios of pairs with their 95 % intervals')}\n")
    if path := _place(options.output, name, every):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, facts)
        _say(options, f"record: {path}")
    found = changes(rows, before) if before else []
    for move in found:
        then, now = move.before, move.now
        _say(
            options,
            f"{move.word} than before: {now.case}, {now.what} over {now.over}: "
            f"{now.ratio:.3f} [{now.low:.3f}, {now.high:.3f}], was {then.ratio:.3f} [{then.low:.3f}, {then.high:.3f}]",
        )
    if before and not found:
        _say(options, unchanged(rows, before))
    return facts, any(move.word == "slower" for move in found)


def _record_of(name: str, path: Path, option: str) -> dict[str, Any]:
    """Read a record of a benchmark.

    Raises:
        ConfigError: the file is not a record, or is the record of another benchmark.
    """
    from workbench.bench.records import read_record

    facts = read_record(path)
    if facts["bench"] != name:
        raise ConfigError(f"{path} is a record of {facts['bench']}: workbench bench {facts['bench']} {option} {path}")
    return facts


def _measured(
    name: str, how: bench.BenchOptions, options: argparse.Namespace, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Measure. Return the record. The earlier record says how many results there will be."""
    from workbench import bench
    from workbench.bench.records import facts_of

    rows = []
    total = len(before["rows"]) if before and not how.only else None
    with progress_line(total, f"results of {name}", shown=not options.json) as line:
        for row in bench.run(name, how):
            rows.append(row)
            spread = f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]"
            how.report(f"{row.case}: {row.what} over {row.over}: {spread} {row.word}".rstrip())
            line.update()
    if not rows and options.only and options.name != "all":
        raise ConfigError(
            f"--only {' '.join(options.only)}: no case has such a name; `workbench bench {name}` shows its cases"
        )
    return facts_of(name, rows)


def _say(options: argparse.Namespace, message: str) -> None:
    """Print a result above the progress line; on standard error if the record is on standard output."""
    from tqdm import tqdm

    output = sys.stderr if options.json else sys.stdout
    with tqdm.external_write_mode(file=output):
        print(message, file=output, flush=True)


def _draw(rows: Sequence[Row], path: Path) -> str:
    from workbench.bench.wire_chart import chart
    from workbench.plots.pictures import write_pictures

    place = path.with_suffix("") if path.suffix == ".svg" else path
    return f"figure: {write_pictures({place: chart(rows).to_plotly_json()})[place]}"


def _place(given: str | None, name: str, every: bool) -> Path | None:
    if given is None:
        return None
    return Path(given) / f"bench-{name}.json" if every else Path(given)
