"""Corrupt and forged checkpoints: skipped or refused with the file's name; no code in them is ever run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.laws import tiny
from tests.laws.train import make_job
from tests.unit.hostile import OFTEN, SLOW, calm, damaged, places, twisted, values
from workbench.algorithms import PipeSGD
from workbench.errors import ConfigError
from workbench.program import Context
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.checkpoint import restore
from workbench.runtimes.checkpoint.files import (
    FORMAT,
    CorruptFile,
    complete_checkpoints,
    rank_file_path,
    record_path,
    run_name_of,
    verify_rank_file,
    write_rank_file,
)
from workbench.runtimes.checkpoint.rank_state import random_state, restore_random_state, resume
from workbench.runtimes.checkpoint.reader import read_rank_file
from workbench.runtimes.checkpoint.restore import fits
from workbench.runtimes.rank.main import run_rank
from workbench.runtimes.transport.base import SoloTransport
from workbench.settings import Settings
from workbench.trace.run import Run

HOW = Settings(steps=8, batch_size=4, timeout_s=30, seed=3, checkpoint_every=2, optimizer=tiny.momentum)
NEWEST, BEFORE = 5, 3


def train(resume: Path | None = None) -> Run:
    """Alone, with two gradients in flight."""
    job = replace(
        make_job("torch", 1, PipeSGD(width=3), tiny.problem(), HOW), resume=None if resume is None else str(resume)
    )
    run_rank(job, SoloTransport())
    return Run.load(job.folder)


@pytest.fixture(scope="module")
def trained() -> Path:
    """A run's folder with two checkpoints."""
    folder = train().folder
    assert folder is not None
    assert [checkpoint.step for checkpoint in complete_checkpoints(folder)] == [NEWEST, BEFORE]
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(trained, tmp_path / "a-run"))


@pytest.fixture(scope="module")
def place(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all examples of a test, each of which writes its own newest part."""
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("spoilt") / "a-run"))


def put(folder: Path, content: bytes, **facts: Any) -> Path:
    """The newest part, and a record that agrees with it."""
    path = rank_file_path(folder, NEWEST, 0)
    path.write_bytes(content)
    known = {"format": FORMAT, "step": NEWEST, "rank": 0, "num_workers": 1}
    record = {**known, "bytes": len(content), "crc32": zlib.crc32(content), **facts}
    record_path(path).write_text(json.dumps(record))
    return path


def packed(tree: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file, **how)
    return file.getvalue()


def good(folder: Path) -> dict[str, Any]:
    """What the newest part holds."""
    tree: dict[str, Any] = torch.load(rank_file_path(folder, NEWEST, 0), weights_only=True)
    return tree


class Bomb:
    """Makes a file called "harmed" where it is unpickled without care."""

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return os.mkdir, ("harmed",)


def deflated(content: bytes, num_bytes: int) -> bytes:
    """The same archive, compressed, with that many zeros in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry) if "data/0" not in entry.filename else bytes(num_bytes))
    return file.getvalue()


def with_pickle(content: bytes, opcodes: bytes) -> bytes:
    """The same archive with another pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, opcodes if entry.filename.endswith("data.pkl") else old.read(entry))
    return file.getvalue()


def without(tree: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name not in names}


UNREADABLE = "cannot be read as a checkpoint"
TERABYTES = b"\x80\x02cbuiltins\nbytearray\n\x8a\x07" + b"\xff" * 6 + b"\x0f\x85R."  # bytearray(2**52 - 1), as a pickle
LISTS = b"\x80\x02" + b"(" * 200_000 + b"l" * 200_000 + b"."  # one in the other
GARBAGE: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "nothing": (lambda tree: b"", UNREADABLE),
    "noise": (lambda tree: bytes(range(256)) * 40, UNREADABLE),
    "half": (lambda tree: packed(tree)[: len(packed(tree)) // 2], UNREADABLE),
    "a bomb": (lambda tree: packed({**tree, "random": Bomb()}), UNREADABLE),
    "a bomb for a model": (
        lambda tree: packed({**tree, "replica": {**tree["replica"], "model": Bomb()}}),
        "cannot be read as a checkpoint",
    ),
    "a plain pickle": (lambda tree: pickle.dumps(Bomb()), UNREADABLE),
    "of an old torch": (lambda tree: packed(tree, _use_new_zipfile_serialization=False), UNREADABLE),
    "packed": (lambda tree: deflated(packed(tree), 300_000_000), "unpacks to more than its size"),
    "much memory": (
        lambda tree: with_pickle(packed(tree), TERABYTES),
        "cannot be",
    ),
    "deep": (
        lambda tree: with_pickle(packed(tree), LISTS),
        "it holds a list|cannot be read",
    ),
    "a long tensor": (
        lambda tree: packed({**tree, "memory": {"x": torch.zeros(1).expand(10**12)}}),
        "larger than its storage",
    ),
    "a list": (lambda tree: packed([tree]), "it holds a list"),
    "no weights": (lambda tree: packed(without(tree, "replica")), "its 'replica' is no dict"),
    "no optimizer": (
        lambda tree: packed({**tree, "replica": without(tree["replica"], "optimizer")}),
        "lacks 'optimizer'",
    ),
    "a step that is none": (lambda tree: packed({**tree, "step": True}), "its 'step' is no int"),
}


def test_a_part_that_says_its_model_is_elsewhere_where_it_should_be_here(folder: Path) -> None:
    tree = good(folder)
    put(folder, packed({**tree, "replica": {**without(tree["replica"], "optimizer"), "alike": 3}}))
    again = train(folder)
    assert again.metrics[0][0]["step"] == BEFORE + 1
    assert any("holds no model" in note for note in again.info["notes"])


@pytest.mark.parametrize("kind", sorted(GARBAGE))
def test_garbage_with_a_checksum_is_named_and_passed_over(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that can write the rank file can write its record too."""
    monkeypatch.chdir(tmp_path)
    make, words = GARBAGE[kind]
    path = put(folder, make(good(folder)))
    with pytest.raises(CorruptFile, match=words) as caught:
        verify_rank_file(path), read_rank_file(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000
    assert not (tmp_path / "harmed").exists()
    if kind in ("a bomb", "no weights", "packed"):  # all come the same way
        run = train(folder)
        assert run.metrics[0][0]["step"] == BEFORE + 1
        (note,) = [note for note in run.info["notes"] if "skipped" in note]
        assert path.name in note and f"step {NEWEST}" in note
        assert not (tmp_path / "harmed").exists()


def test_the_bomb_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.load(io.BytesIO(packed(Bomb())), weights_only=False)
    assert (tmp_path / "harmed").is_dir()


def test_where_all_are_garbage_it_is_refused(folder: Path) -> None:
    for checkpoint in complete_checkpoints(folder):
        checkpoint.rank_file(0).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no undamaged checkpoint.*step 5.*step 3.*restore the files from a copy"):
        train(folder)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"rank": 1}, "describes rank 1 .*another rank file"),
        ({"format": "2"}, "in format '2'"),
        ({"format": None}, "in format None"),
        ({"bytes": "7"}, "7 were written"),
        ({"crc32": 5}, "checksum differs"),
        ({"crc32": "5"}, "checksum differs"),
    ],
)
def test_a_record_that_cannot_be_is_damage(folder: Path, facts: dict[str, Any], words: str) -> None:
    with pytest.raises(CorruptFile, match=words):
        verify_rank_file(put(folder, packed(good(folder)), **facts))


def test_a_later_version_is_refused_by_its_name(folder: Path) -> None:
    path = put(folder, packed(good(folder)), format=FORMAT + 1)
    with pytest.raises(
        ConfigError, match=f"{path.name} has format {FORMAT + 1}, this version reads format {FORMAT}: update workbench"
    ):
        train(folder)


@pytest.mark.parametrize("how", ["pipe", "folder", "loop"])
def test_what_is_no_file_is_damage(folder: Path, how: str) -> None:
    """Also where no record says how long it is: a pipe would keep its reader forever."""
    path = rank_file_path(folder, NEWEST, 0)
    path.unlink()
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "loop": lambda: path.symlink_to(path)}[how]()
    for read in (verify_rank_file, read_rank_file):
        with pytest.raises(CorruptFile, match="not a file"):
            read(path)


# ---------------------------------------------------------------- whole, but of something else


def changed(tree: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {**tree, "replica": {**tree["replica"], **parts}}


def shorter(tree: dict[str, Any]) -> dict[str, Any]:
    first, *others = tree["program"]["fields"]["in_flight"]
    return with_state(
        tree, in_flight=[{**first, "value": {**first["value"], "flat": torch.zeros(1, dtype=torch.float64)}}, *others]
    )


def with_state(tree: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**tree, "program": {**tree["program"], "fields": {**tree["program"]["fields"], **fields}}}


UNFIT: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "weights of other shapes": lambda tree: changed(
        tree, model={name: torch.zeros(2) for name in tree["replica"]["model"]}
    ),
    "other weights": lambda tree: changed(tree, model={"x": torch.zeros(2)}),
    "another optimizer": lambda tree: changed(tree, optimizer={"state": {}, "param_groups": []}),
    "no optimizer at all": lambda tree: changed(tree, optimizer=7),
    "updates of nothing": lambda tree: changed(tree, updates=None),
    "a short gradient in flight": shorter,
    "a gradient without values": lambda tree: with_state(tree, in_flight=[{"ticket": True, "value": {"step": 1}}]),
    "another state": lambda tree: {**tree, "program": {"in_flight": []}},
    "another memory": lambda tree: {**tree, "memory": {"a": 1}},
    "another place in the data": lambda tree: {**tree, "data": {"samples": 1, "global_batch": 4, "origin": [0]}},
    "no generator's state": lambda tree: {**tree, "random": {"torch": torch.zeros(3)}},
    "a word for a generator": lambda tree: {**tree, "random": "x"},
}


@pytest.mark.parametrize("kind", sorted(UNFIT))
def test_what_does_not_fit_is_refused_with_the_files_name(folder: Path, kind: str) -> None:
    put(folder, packed(UNFIT[kind](good(folder))))
    state = random_state(torch.device("cpu"))
    with pytest.raises(ConfigError, match="is undamaged, but does not fit this run's model, optimizer or algorithm"):
        train(folder)
    restore_random_state(state, torch.device("cpu"))


def test_parts_of_two_runs_are_no_checkpoint(tmp_path: Path, trained: Path) -> None:
    """Each is whole; put together they never were."""
    tree = {**good(trained), "num_workers": 2}
    for step, runs in ((1, ("one", "one")), (3, ("one", "other"))):
        for rank, run in enumerate(runs):
            facts = {"step": step, "rank": rank, "num_workers": 2, "run": run}
            write_rank_file(rank_file_path(tmp_path, step, rank), lambda file: torch.save(tree, file), facts)
    assert run_name_of(rank_file_path(tmp_path, 3, 1)) == "other"

    def agree(value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]

    found, words, _ = restore._newest(tmp_path, Context(0, 1), agree)
    assert found.step == 1
    assert "step 3, is damaged and was skipped: its files are of several runs: one, other" in words[0]


# ---------------------------------------------------------------- fuzz


def refused(path: Path) -> dict[str, Any]:
    """What the part holds; `ConfigError` in place of `CorruptFile`, which is our own reader's to catch."""
    try:
        verify_rank_file(path)
        return read_rank_file(path)
    except CorruptFile as error:
        raise ConfigError(str(error)) from error


@OFTEN
@given(st.data())
def test_parts(place: Path, trained: Path, data: st.DataObject) -> None:
    """Of a file cut, changed, doubled: with a record that agrees, with the old one, and without."""
    content = data.draw(damaged(rank_file_path(trained, NEWEST, 0).read_bytes()))
    path = put(place, content)
    how = data.draw(st.sampled_from(["agrees", "old", "none"]))
    if how == "old":
        shutil.copy(record_path(rank_file_path(trained, NEWEST, 0)), record_path(path))
    elif how == "none":
        record_path(path).unlink()
    with calm("checkpoints"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library thinks of it goes to the log
        assert refused(path)["algorithm"]
    if how == "old" and content != rank_file_path(trained, NEWEST, 0).read_bytes():
        with pytest.raises(CorruptFile):
            verify_rank_file(path)


RECORD = {
    "format": FORMAT,
    "step": NEWEST,
    "rank": 0,
    "num_workers": 1,
    "run": "a-run",
    "bytes": 3,
    "crc32": zlib.crc32(b"abc"),
}


@OFTEN
@given(st.one_of(twisted(RECORD).map(lambda record: json.dumps(record).encode()), damaged(json.dumps(RECORD).encode())))
def test_records(place: Path, record: bytes) -> None:
    path = put(place, b"abc")
    record_path(path).write_bytes(record)
    with calm("records of checkpoints"):
        for checkpoint in complete_checkpoints(place):
            assert checkpoint.num_ranks < 10 and isinstance(run_name_of(checkpoint.rank_file(0)), str)
            refused(checkpoint.rank_file(0))


tensors = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 8), max_size=3),
    st.sampled_from([torch.float64, torch.float32, torch.int64, torch.bool, torch.complex64]),
)


@SLOW
@given(st.data())
def test_trees(place: Path, trained: Path, data: st.DataObject) -> None:
    """Of a good tree some parts are something else: it fits, or the file is named."""
    tree = good(trained)
    for _ in range(data.draw(st.integers(1, 2))):
        there = list(places(tree))
        holder, key = there[data.draw(st.integers(0, len(there) - 1))]
        if isinstance(holder, dict) and data.draw(st.booleans()):
            del holder[key]
        else:
            holder[key] = data.draw(st.one_of(values, tensors))
    path = put(place, packed(tree))
    worker = LocalTraining(PipeSGD(width=3), tiny.problem(), HOW, 0, 1, torch.device("cpu"))
    state = random_state(torch.device("cpu"))
    try:
        with calm("trees of checkpoints"), warnings.catch_warnings(), fits(path):
            warnings.simplefilter("ignore")
            saved = refused(path)
            ctx = Context(0, 1, num_steps=8, layout=worker.replica.layout)
            resume(saved, PipeSGD(width=3), worker.replica, ctx)
            if "random" in saved:
                restore_random_state(saved["random"], torch.device("cpu"))
            assert ctx.first_step == saved["step"] + 1
    finally:
        restore_random_state(state, torch.device("cpu"))
        worker.replica.close()
