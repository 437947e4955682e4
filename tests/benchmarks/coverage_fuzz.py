"""Bad inputs found by the code that they reach, with atheris (libFuzzer) if it is installed. The tests use Hypothesis.

    pip install atheris
    python -m tests.benchmarks.coverage_fuzz headers -max_total_time=60
    python -m tests.benchmarks.coverage_fuzz records -max_total_time=60

Options after the reader's name are libFuzzer's. If a reader raises an unexpected error, the script ends with a status
other than 0 and leaves the input in a file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any


def headers(modules: Any) -> Callable[[bytes], None]:
    """A row of headers to one receiver: noise, and good ones nearly as they should be."""
    header, torch = modules["header"], modules["torch"]

    def read(data: bytes) -> None:
        channel, sender = header.Channel(1, 0, 3), header.Channel(1, 0, 3)
        row = [sender.announcement(48, torch.float64)]
        for begin in range(0, len(data) - 7, 8):
            noise = int.from_bytes(data[begin : begin + 8], "little")
            row += [noise, header.header(noise >> 24), row[data[begin] % len(row)]]
            try:
                channel.accept(row[data[begin + 1] % len(row)], 48, torch.float64)
            except modules["errors"].WorkbenchError:
                channel = header.Channel(1, 0, 3)

    return read


def records(modules: Any) -> Callable[[bytes], None]:
    """The record of a rank file of a checkpoint, with a piece of it replaced."""
    kept, folder = modules["kept"], FilePath(tempfile.mkdtemp(prefix="fuzz-"))
    part = kept.rank_file_path(folder, 1, 0)
    part.parent.mkdir()
    part.write_bytes(b"abc")
    good = json.dumps(
        {"format": 4, "step": 1, "rank": 0, "num_workers": 1, "run": "a", "bytes": 3, "crc32": 0}
    ).encode()

    def read(data: bytes) -> None:
        begin, end = sorted(place % len(good) for place in (*data[:2], 0, 0)[:2])
        kept.record_path(part).write_bytes(good[:begin] + data[2:] + good[end:])
        for checkpoint in kept.complete_checkpoints(folder):
            try:
                kept.run_name_of(checkpoint.rank_file(0)), kept.verify_rank_file(checkpoint.rank_file(0))
            except (kept.CorruptFile, modules["errors"].WorkbenchError):
                continue

    return read


def main(name: str, options: list[str]) -> None:
    """Fuzz until libFuzzer has enough."""
    import atheris  # type: ignore[import-not-found]  # no dependency of ours: its wheel is 35 MB

    with atheris.instrument_imports(include=["workbench"]):
        import torch

        from workbench import errors
        from workbench.runtimes.checkpoint import files as kept
        from workbench.runtimes.transport import framing as header
    atheris.Setup(
        ["coverage_fuzz", *options], globals()[name]({"torch": torch, "errors": errors, "header": header, "kept": kept})
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
