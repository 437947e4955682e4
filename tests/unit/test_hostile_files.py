"""Foreign files, and damaged ones of ours: an error that names the fix, or they are left out; no code in them is ever run."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import hostile
from tests.unit.hostile import OFTEN, SLOW, calm, damaged, twisted
from workbench.analysis import compare, run_overlap, runs_table, summary
from workbench.analysis.export import export_runs
from workbench.errors import RunNotFound, WorkbenchError
from workbench.experiments.cell_states import is_alive, read_attempts
from workbench.experiments.grid import read_grid
from workbench.experiments.yaml_file import read_yaml
from workbench.papers.claims import Expectation, read_claims
from workbench.runtimes.control.commands import CommandReader
from workbench.trace import Run, from_profiler, list_runs
from workbench.trace.follow import Follower
from workbench.trace.store import FORMAT, read_info
from workbench.trace.tail import read_tail

INFO = {
    "format": FORMAT,
    "id": "a-run",
    "created": "2026-01-02T03:04:05+00:00",
    "status": "finished",
    "clock": "wall",
    "algorithm": {"name": "PipeSGD", "settings": {"width": 2, "collective": "Ring()"}, "defaults": ["collective"]},
    "problem": {"name": "digits-mlp", "note": "", "optimizer": "SGD(lr=0.1)"},
    "runtime": "torch",
    "num_workers": 2,
    "settings": {"seed": 0, "lr": 0.1, "batch_size": 8},
    "model": {"parameters": 10, "message_bytes": 40, "buckets": 1, "itemsize": 4, "shapes": [["w", [2, 5]]]},
    "result": {"steps": 2, "seconds": 0.2, "last_step": 1},
    "notes": ["made up"],
    "steering": [{"number": 1, "set": {"lr": 0.1}, "step": 1}],
    "sweep": {"id": "s", "cell": "c", "axes": {"seed": 0}},
    "process": {"host": "h", "pid": 1, "process_started": 1.0},
}
METRICS: list[Any] = [
    {
        "step": 0,
        "seconds": 0.1,
        "samples": 8,
        "bytes_sent": 40,
        "staleness": 0,
        "loss": 2.0,
        "num_samples": 4,
        "lr": 0.1,
    },
    {
        "step": 1,
        "seconds": 0.2,
        "samples": 16,
        "bytes_sent": 80,
        "staleness": 1,
        "loss": 1.5,
        "num_samples": 4,
        "lr": 0.1,
    },
    {
        "step": 1,
        "seconds": 0.2,
        "samples": 16,
        "bytes_sent": 80,
        "evaluation": {"loss_sum": 5.0, "correct": 3, "judged": 4, "count": 4},
    },
]
TRACE: list[Any] = [
    {"host": "h", "pid": 1, "device": "cpu", "origin_s": 0.0, "unix_s": 1.0, "rank": 0},
    {"clock": {"at_s": 0.0, "offset_s": 0.0}},
    ["forward", "compute", 0.0, 0.1, 0, -1, 0, -1],
    ["send", "comm", 0.1, 0.2, 0, 0, 40, 1],
    ["recv", "comm", 0.1, 0.3, 0, 0, 40, 1],
]
EVENTS: list[Any] = [
    {"task": 0, "any": 0, "source": 1},
    {"update": 0, "bucket": 0, "seconds": 0.1, "staleness": [0], "sources": [0]},
]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, in a store of its own, for all examples."""
    return tmp_path_factory.mktemp("hostile")


def write(root: Path, info: Any = INFO, **files: bytes) -> Path:
    """A run made of these files."""
    run = root / "a-run"
    run.mkdir(exist_ok=True)
    (run / "run.json").write_bytes(info if isinstance(info, bytes) else json.dumps(info).encode())
    whole = {"metrics": lines(METRICS), "trace": lines(TRACE), "events": lines(EVENTS), **files}
    for name, content in whole.items():
        (run / f"{name}-00000.jsonl").write_bytes(content)
    return run


def look(root: Path) -> None:
    """All that readers of a store do."""
    listing = list_runs(root)
    assert len(listing) + sum("a cache" not in words for words in listing.damaged) == 1, (
        "a run is listed, or named as damaged"
    )
    table = runs_table(root=root, sort="created")
    assert str(table) and table._repr_html_()
    for run in listing:
        export_runs(table.rows, root.parent / "out", "csv")
        loaded = Run.load(run.folder)
        assert repr(loaded) and loaded.label is not None
        (
            loaded.steps(),
            loaded.evaluations(),
            loaded.spans,
            loaded.messages,
            loaded.headers,
            loaded.events,
            loaded.failures,
            loaded.updates(),
        )
        summary(loaded), str(compare([loaded]))
        loaded.export_chrome(root.parent / "trace.json")
        assert read_tail(run.folder).spans is not None
        Follower(run.folder).poll()
        with calm("overlap"):
            run_overlap(loaded)
        with calm("Chakra"):
            loaded.export_chakra(root.parent / "graph")


@OFTEN
@given(st.one_of(twisted(INFO).map(lambda info: json.dumps(info).encode()), damaged(json.dumps(INFO).encode())))
def test_run_json(folder: Path, info: bytes) -> None:
    write(folder, info)
    with calm("run.json"):
        look(folder)


@OFTEN
@given(st.one_of(twisted(METRICS).map(lines), damaged(lines(METRICS))))
def test_metrics(folder: Path, metrics: bytes) -> None:
    write(folder, metrics=metrics)
    with calm("metrics"):
        look(folder)


@OFTEN
@given(st.one_of(twisted(TRACE).map(lines), damaged(lines(TRACE))))
def test_traces(folder: Path, trace: bytes) -> None:
    write(folder, trace=trace)
    with calm("trace"):
        look(folder)


@SLOW
@given(st.one_of(twisted(EVENTS).map(lines), damaged(lines(EVENTS))))
def test_events(folder: Path, events: bytes) -> None:
    write(folder, events=events)
    with calm("events"):
        look(folder)


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "nothing", "empty", "zeros", "binary"])
def test_what_is_no_file_of_ours_is_skipped_and_named(tmp_path: Path, kind: str) -> None:
    """A reader would wait forever at a pipe without a writer."""
    run = write(tmp_path)
    path = run / "run.json"
    path.unlink()
    make = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to(path),
        "nothing": lambda: None,
        "empty": path.touch,
        "zeros": lambda: path.write_bytes(bytes(5000)),
        "binary": lambda: path.write_bytes(bytes(range(256))),
    }
    make[kind]()
    begun = time.monotonic()
    listing = list_runs(tmp_path)
    assert len(listing) == 0 and len(listing.damaged) == 1 and "a-run" in listing.damaged[0]
    for name in ("metrics", "trace", "events"):
        (run / f"{name}-00001.jsonl").unlink(missing_ok=True)
        os.mkfifo(run / f"{name}-00001.jsonl")
    write(tmp_path) if kind == "nothing" else None
    if kind == "nothing":
        look(tmp_path)
    assert time.monotonic() - begun < 30


# ---------------------------------------------------------------- versions

EARLIER = [
    {"id": "a-run", "status": "finished", "method": {"name": "PipeSGD", "settings": {"width": 2}}, "num_workers": 2},
    {"format": 1, "id": "a-run", "status": "finished", "method": {"name": "PipeSGD"}, "problem": {"name": "digits"}},
    {key: value for key, value in INFO.items() if key not in ("process", "clock", "steering", "sweep")},
]


@pytest.mark.parametrize("info", EARLIER)
def test_a_run_of_an_earlier_version_is_read(tmp_path: Path, info: dict[str, Any]) -> None:
    """Without what later versions wrote too."""
    look(write(tmp_path, info).parent)
    assert [run.status for run in list_runs(tmp_path)] == ["finished"]


def test_an_earlier_version_that_was_cut_off_is_told_by_its_age(tmp_path: Path) -> None:
    run = write(tmp_path, {**EARLIER[0], "status": "running"}, trace=lines(TRACE[1:]))
    assert [item.status for item in list_runs(tmp_path)] == ["running"]
    for path in [run, *run.iterdir()]:
        os.utime(path, (1e9, 1e9))
    assert [item.status for item in list_runs(tmp_path)] == ["lost"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (FORMAT + 1, "update workbench"),
        (10**9, "update workbench"),
        (0, "not a format number"),
        ("1", "not a format number"),
    ],
)
def test_a_later_version_is_refused_with_a_word(tmp_path: Path, number: Any, words: str) -> None:
    run = write(tmp_path, {**INFO, "format": number})
    with pytest.raises(RunNotFound, match=words):
        read_info(run)
    assert words in list_runs(tmp_path).damaged[0]


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc/cron.d", "..", "a/b", "new\nline", "\x1b[2J", ""])
def test_a_run_cannot_be_called_what_leads_elsewhere(tmp_path: Path, name: str) -> None:
    """Exports make folders of that name, and remove files in them."""
    with pytest.raises(RunNotFound, match="cannot name a folder"):
        read_info(write(tmp_path, {**INFO, "id": name}))


# ---------------------------------------------------------------- words to a run

SAID = [{"set": {"lr": 0.1, "width": 3}}, {"pause": True}, {"resume": True}, {"stop": True}]


@OFTEN
@given(
    st.one_of(twisted(SAID).map(lambda rows: lines(rows if isinstance(rows, list) else [rows])), damaged(lines(SAID)))
)
def test_words_to_a_run(folder: Path, said: bytes) -> None:
    (folder / "control.jsonl").write_bytes(said)
    with calm("control.jsonl"):
        reader = CommandReader(folder)
        assert reader.poll() == said.count(b"\n"), "every line has its number, whatever it is"
        for word in reader.commands:
            assert set(word) <= {"set", "pause", "resume", "stop"}
            assert isinstance(word.get("set", {}), dict) and all(word[name] is True for name in word if name != "set")


def test_a_word_cannot_pass_for_an_entry_of_the_record(tmp_path: Path) -> None:
    (tmp_path / "control.jsonl").write_bytes(lines([{"stop": 1, "task": 7, "step": -1}, {"pause": True, "number": 99}]))
    reader = CommandReader(tmp_path)
    reader.poll()
    assert reader.commands == [{}, {"pause": True}]


# ---------------------------------------------------------------- Chrome traces

EVENT = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": 1,
    "tid": 1,
    "ts": 1.0,
    "dur": 2.0,
    "args": {"correlation": 1},
}
PROFILE: dict[str, Any] = {
    "distributedInfo": {"rank": 0, "world_size": 2, "backend": "gloo"},
    "baseTimeNanoseconds": 1000,
    "host_name": "h",
    "traceEvents": [
        {**EVENT, "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0.5, "dur": 50.0},
        EVENT,
        {**EVENT, "name": "autograd::engine::evaluate_function: MmBackward0", "ts": 4.0},
        {
            **EVENT,
            "name": "gloo:all_reduce",
            "tid": 2,
            "ts": 7.0,
            "args": {"Input Dims": [[2, 3]], "Input type": ["float"]},
        },
        {**EVENT, "cat": "user_annotation", "name": "Optimizer.step#SGD.step", "ts": 9.0},
        {**EVENT, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.5},
        {
            **EVENT,
            "cat": "kernel",
            "name": "ncclKernel_AllReduce",
            "args": {"correlation": 1, "In msg nelems": 9, "dtype": "Float", "stream": 7},
        },
    ],
}


@OFTEN
@given(
    st.one_of(twisted(PROFILE).map(lambda value: json.dumps(value).encode()), damaged(json.dumps(PROFILE).encode())),
    st.booleans(),
)
def test_profiles(folder: Path, profile: bytes, packed: bool) -> None:
    path = folder / ("trace.json.gz" if packed else "trace.json")
    path.write_bytes(profile)
    with calm("Chrome trace"):
        run = from_profiler(path)
        assert len(run.spans) and run.messages
        run_overlap(run)


EXPORTED: dict[str, Any] = {
    "otherData": {"workbench": {"origin_s": 1.5, "info": INFO, "headers": {"0": {"rank": 0, "host": "h"}}}},
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "compute", "lane": "compute"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "comm", "lane": "comm"}},
        {
            "ph": "X",
            "name": "forward",
            "cat": "forward",
            "pid": 1,
            "tid": 1,
            "ts": 0.0,
            "dur": 5.0,
            "args": {"step": 0},
        },
        {
            "ph": "X",
            "name": "send 0",
            "cat": "send",
            "pid": 1,
            "tid": 2,
            "ts": 5.0,
            "dur": 2.5,
            "args": {"step": 0, "bucket": 0, "peer": 0, "bytes": 80},
        },
    ],
}


@OFTEN
@given(
    st.one_of(twisted(EXPORTED).map(lambda value: json.dumps(value).encode()), damaged(json.dumps(EXPORTED).encode()))
)
def test_exported_runs(folder: Path, exported: bytes) -> None:
    path = folder / "trace.json"
    path.write_bytes(exported)
    with calm("exported run"):
        run = from_profiler(path)
        assert run.messages and repr(run) and run.label and str(compare([run])) and run.headers is not None
        run.export_chakra(folder / "graph")


def test_the_exported_run_that_is_twisted_is_a_good_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(EXPORTED))
    assert from_profiler(path).spans.table["bytes"].tolist() == [0, 80]


def test_the_profile_that_is_twisted_is_a_good_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(PROFILE))
    assert len(from_profiler(path).spans) >= 1


# ---------------------------------------------------------------- YAML

CLAIMS: dict[str, Any] = {
    "experiments": [{"id": "fig-1", "artefact": "Fig. 1", "about": "time"}],
    "questions": [{"id": "q-1", "asked": "review 2", "question": "why?", "cell": "answer"}],
    "claims": [
        {
            "id": "a-claim",
            "source": "Fig. 1",
            "statement": "it is faster",
            "kind": "ordering",
            "metric": "step time",
            "expected": {"value": 2.0, "rel": 0.1},
            "reduced": {"between": [1, 2]},
            "scale": "paper",
            "provenance": "verified",
            "theirs": "2",
            "sizes": ["smoke", "full"],
            "needs": "a cluster",
            "deterministic": True,
        }
    ],
}
GRID: dict[str, Any] = {
    "name": "widths",
    "base": {"problem": "digits-mlp", "runtime": "simulated", "epochs": 1},
    "axes": {
        "algorithm": ["synchronous-sgd", {"pipe-sgd": {"width": 2}}],
        "seed": [0, 1],
        "size": [{"workers": 2, "lr": 0.1}],
    },
    "exclude": [{"algorithm": "pipe-sgd", "seed": [1]}],
    "include": [{"algorithm": "dear", "workers": 2, "set.bucket_bytes": "1MiB"}],
    "jobs": 1,
    "timeout_s": 60,
}
TAGS = [
    "!!python/object/apply:os.system ['touch harmed']",
    "!!python/name:os.system",
    "!!python/object/new:subprocess.Popen [['touch', 'harmed']]",
    "!!int abc",
    "!!bool maybe",
    "!!float ''",
    "!!timestamp 2026-99-99",
    "2026-99-99",
    "!!binary '%%%'",
    "!!set {a, b}",
    "? [a, b]\n: c",
    "&a [*a]",
    "<<: 7",
    "- [",
    "\0",
    "%YAML 9.9\n---\na: 1",
    "a: 1\n---\nb: 2",
]


def as_yaml(value: Any) -> bytes:
    try:
        return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "replace")
    except (yaml.YAMLError, ValueError):
        return b"a: ["


@OFTEN
@given(st.one_of(twisted(CLAIMS).map(as_yaml), damaged(as_yaml(CLAIMS))))
def test_claims(folder: Path, text: bytes) -> None:
    place = folder / "papers" / "key2020word" / "claims"
    place.mkdir(parents=True, exist_ok=True)
    (place / "notebook.yaml").write_bytes(text)
    with calm("claims"):
        for claim in read_claims("key2020word", folder / "papers").claims:
            assert claim.digest and str(claim.expected) and not claim.expected.holds(float("nan"))


@SLOW
@given(st.one_of(twisted(GRID).map(as_yaml), damaged(as_yaml(GRID))))
def test_sweeps(folder: Path, text: bytes) -> None:
    path = folder / "grid.yaml"
    path.write_bytes(text)
    with calm("sweep YAML"):
        for cell in read_grid(path).cells:
            assert cell.key and cell.label is not None and cell.train_arguments()


@pytest.mark.parametrize("text", TAGS)
@pytest.mark.parametrize("under", ["", "base:\n  lr: "])
def test_a_tag_is_never_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, under: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "grid.yaml"
    path.write_text(under + text.replace("\n", "\n    ") if under else text)
    with calm("YAML tags"):
        read_yaml(path)
    with calm("YAML tags"):
        read_grid(path)
    assert not (tmp_path / "harmed").exists()


@OFTEN
@given(hostile.values)
def test_an_expectation_is_one_or_is_refused(words: Any) -> None:
    with calm("expectations"):
        expected = Expectation.of(words)
        assert expected.low <= expected.high and str(expected)
    for form in ("above", "below"):
        with calm("expectations"):
            assert str(Expectation.of({form: words}))
    with calm("expectations"):
        assert str(Expectation.of({"value": words, "rel": 0.1}))


# ---------------------------------------------------------------- attempts of a sweep, and the caches of the store


@SLOW
@given(st.one_of(hostile.values.map(lambda value: json.dumps(value).encode()), st.binary(max_size=40)))
def test_attempts_and_caches(folder: Path, content: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        (Path(place) / "0123456789ab-000.json").write_bytes(content)
        with calm("attempts"):
            for attempt in read_attempts(Path(place)).values():
                assert attempt.state in ("running", "finished", "failed", "interrupted")
                is_alive(attempt)
    root = folder / "cached"
    root.mkdir(exist_ok=True)
    write(root)
    for name in (".index.jsonl", ".results.jsonl"):
        (root / name).write_bytes(content + b"\n")
    with calm("caches"):
        look(root)


def test_an_error_that_is_not_ours_would_be_seen() -> None:
    with pytest.raises(TypeError), calm("nothing"):
        raise TypeError
    with calm("nothing"):
        raise WorkbenchError("this one is ours")
