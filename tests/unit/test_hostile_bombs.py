"""Small files that expand to much data: read, or refused with a message, within a gigabyte of memory and in seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # the first test waits for all bombs

MEMORY_BYTES = 2_000_000_000  # of address space; the imports take half a gigabyte of it
SECONDS = 60  # on a crowded machine; each takes one or two
READER = f"""
import resource, sys
from pathlib import Path
from workbench.errors import WorkbenchError
from workbench.experiments.yaml_file import read_yaml
from workbench.naming import build, parse_value, unknown
from workbench.papers.claims import Expectation
from workbench.runtimes.control.commands import CommandReader
from workbench.trace import Run, from_profiler, list_runs
from workbench.trace.follow import Follower

resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
what, folder = sys.argv[1], Path(sys.argv[2])

def all_of_run(folder):
    run = Run.load(folder)
    run.steps(), run.spans, run.events, run.failures
    Follower(folder).poll()

def words(folder):
    reader = CommandReader(folder)
    for _ in range(200):  # a line that has no end is waited for, some megabytes a look
        reader.poll()

readers = {{
    "info": lambda: print(len(list_runs(folder)), *list_runs(folder).damaged),
    "run": lambda: all_of_run(folder / "a-run"),
    "words": lambda: words(folder),
    "profile": lambda: from_profiler(next(folder.glob("*.json*"))),
    "yaml": lambda: str(read_yaml(folder / "grid.yaml"))[:100],
    "text": lambda: [parse_value((folder / "text").read_text()), str(unknown("algorithm", (folder / "text").read_text(), ["a"]))],
    "build": lambda: build((folder / "text").read_text(), {{"Ring": dict}}),
}}
try:
    readers[what]()
except WorkbenchError as error:
    assert len(str(error)) < 5000
    print("refused:", str(error)[:200])
"""
DEEP, LONG = 200_000, 150_000_000
RUN = '{"format": 1, "status": "finished"}'


def sparse(path: Path, begin: bytes) -> None:
    """As large as `LONG` says, of zeros that take no room on the disk."""
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(LONG)


def make(what: str, folder: Path) -> str:
    """Lay the bomb; which reader meets it."""
    run = folder / "a-run"
    run.mkdir()
    (run / "run.json").write_text(RUN)
    kind, _, how = what.partition(", ")
    files = {
        "metrics": run / "metrics-00000.jsonl",
        "trace": run / "trace-00000.jsonl",
        "events": run / "events-00000.jsonl",
    }
    files |= {
        "run.json": run / "run.json",
        "words": folder / "control.jsonl",
        "profile": folder / "p.json",
        "YAML": folder / "grid.yaml",
    }
    files |= {"value": folder / "text", "expression": folder / "text"}
    path = files[kind]
    if how == "deep":
        path.write_text(
            ("{a: " if kind == "YAML" else '{"a":' if kind == "run.json" else "(" if kind == "value" else "[") * DEEP
            + "\n"
        )
        if kind == "expression":
            path.write_text("Ring(" * DEEP + ")" * DEEP)
    elif how == "digits":
        path.write_text('{"step": ' + "9" * 5_000_000 + "}\n")
    elif how == "long":
        sparse(path, b'{"name": "')
    elif how == "aliases":
        rows = ["a0: &a0 [x, x]"] + [
            f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 30)
        ]
        path.write_text("\n".join(rows))
    elif how == "merges":
        rows = ["a0: &a0 {x: 1}"] + [
            f"a{level}: &a{level} {{<<: [*a{level - 1}, *a{level - 1}]}}" for level in range(1, 40)
        ]
        path.write_text("\n".join(rows))
    elif how == "itself":
        path.write_text("a: &a [*a]")
    elif how == "packed":
        import zlib

        packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        path = folder / "p.json.gz"
        path.write_bytes(b"".join(packer.compress(b" " * 10_000_000) for _ in range(60)) + packer.flush())
    readers = {
        "run.json": "info",
        "words": "words",
        "profile": "profile",
        "YAML": "yaml",
        "value": "text",
        "expression": "build",
    }
    return readers.get(kind, "run")


BOMBS = [
    *(f"{kind}, {how}" for kind in ("run.json", "metrics", "words") for how in ("deep", "digits", "long")),
    *(f"{kind}, {how}" for kind in ("trace", "events") for how in ("deep", "long")),
    *(f"profile, {how}" for how in ("deep", "long", "packed")),
    *(f"YAML, {how}" for how in ("deep", "digits", "long", "aliases", "merges", "itself")),
    *("value, deep", "value, digits", "expression, deep"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """bomb -> exit status and output of a process that read it: forks of one that has imported, each with its own limit."""
    fork_server = (
        READER.partition("resource.setrlimit")[0]
        + f"""
import os, signal, json
for line in sys.stdin:
    out, *argv = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.alarm({SECONDS})
        file = os.open(out, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, 1); os.dup2(file, 2)
        sys.argv = ["", *argv]
        status = 1
        try:
            exec(compile(BODY, "reader", "exec"), globals())
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
    )
    body = "resource.setrlimit" + READER.partition("resource.setrlimit")[2]
    found = {}
    import json

    with subprocess.Popen(
        [sys.executable, "-c", f"BODY = {body!r}\n{fork_server}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        for what in BOMBS:
            folder = tmp_path_factory.mktemp("bomb")
            reader, out = make(what, folder), folder.parent / f"{folder.name}.out"
            process.stdin.write(json.dumps([str(out), reader, str(folder)]) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            found[what] = (status, out.read_text(errors="replace"), reader)
        process.stdin.close()
    return found


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_is_read_or_refused(outcomes: dict[str, tuple[int, str, str]], what: str) -> None:
    status, said, _ = outcomes[what]
    assert status == 0, f"{what}: status {status}: {said[-1500:]}"
    assert "Traceback" not in said
