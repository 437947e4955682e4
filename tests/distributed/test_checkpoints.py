"""Checkpoints on the disk: complete even if their writer is killed, skipped if damaged, usable by another number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from tests.distributed.commands import train as train_by_command
from tests.distributed.commands import workbench
from tests.distributed.pool import shared_pool
from tests.forked import forked
from tests.laws import tiny
from tests.laws.train import Trained, make_job, on_real_runtimes, relative_error, train
from workbench.algorithms import AsyncSGD, LayerwiseSGD, LocalSGD, PipeSGD, SynchronousSGD
from workbench.clusters.jobs import checkpoint_of
from workbench.codecs import ErrorFeedback, TopK
from workbench.collectives import Once
from workbench.errors import ConfigError
from workbench.problems.base import Sampler
from workbench.program import Algorithm
from workbench.runtimes.checkpoint import writer as keeper
from workbench.runtimes.checkpoint.files import (
    FORMAT,
    Checkpoint,
    CorruptFile,
    complete_checkpoints,
    find_source,
    rank_file_path,
    record_path,
    remove_old_rank_files,
    split_source,
    verify_rank_file,
    write_rank_file,
)
from workbench.runtimes.checkpoint.reader import save_rank_file
from workbench.runtimes.checkpoint.replicated import read_whole_state, without_replicated
from workbench.runtimes.checkpoint.staging import StagingBuffers
from workbench.runtimes.rank.main import run_rank
from workbench.runtimes.transport.base import SoloTransport
from workbench.settings import Settings
from workbench.trace.run import Run
from workbench.trace.store import new_run, read_info

COMMAND = [sys.executable, "-m", "workbench"]
settings = partial(Settings, steps=8, batch_size=4, timeout_s=30, seed=3, checkpoint_every=2)

# -- one part ---------------------------------------------------------------------------------------------------


def write(folder: Path, step: int, rank: int = 0, num_ranks: int = 1, content: bytes = b"x" * 100) -> Path:
    path = rank_file_path(folder, step, rank)
    write_rank_file(path, lambda file: file.write(content), {"step": step, "rank": rank, "num_workers": num_ranks})
    return path


def test_a_part_is_what_was_written_or_says_what_is_wrong(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    verify_rank_file(path)
    for damage, words in (
        (b"x" * 99, "99 bytes, 100 were written"),
        (b"x" * 99 + b"y", "checksum"),
        (None, "does not exist"),
    ):
        path.write_bytes(damage) if damage else path.unlink()
        with pytest.raises(CorruptFile, match=words):
            verify_rank_file(path)
    record = write(tmp_path, 3).with_suffix(".json")
    for number, fix in (
        (FORMAT + 1, "update workbench"),
        (FORMAT - 1, "resume with the version that wrote it, or train again from the start"),
    ):
        record.write_text(json.dumps({**json.loads(record.read_text()), "format": number}))
        with pytest.raises(ConfigError, match=f"format {number}, this version reads format {FORMAT}: {fix}"):
            verify_rank_file(path)
    record.write_text('{"form')
    with pytest.raises(CorruptFile, match="cannot be read"):
        verify_rank_file(path)


def test_a_parts_sums_are_ours_and_not_torchs_too(tmp_path: Path) -> None:
    """All bytes are summed up once, by us; others' `torch.save` does as it did."""
    path = rank_file_path(tmp_path, 3, 0)
    write_rank_file(
        path, partial(save_rank_file, {"weights": torch.ones(1000)}), {"step": 3, "rank": 0, "num_workers": 1}
    )
    assert json.loads(record_path(path).read_text())["crc32"] == zlib.crc32(path.read_bytes())
    verify_rank_file(path)
    assert torch.equal(torch.load(path, weights_only=True)["weights"], torch.ones(1000))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None
    torch.save({"weights": torch.ones(1000)}, tmp_path / "another.pt")
    with zipfile.ZipFile(tmp_path / "another.pt") as archive:
        assert archive.testzip() is None


def test_a_checkpoint_is_complete_when_all_its_records_are_there(tmp_path: Path) -> None:
    for step in (1, 3):
        for rank in range(3 if step == 1 else 2):
            write(tmp_path, step, rank, 3)
    assert complete_checkpoints(tmp_path) == [Checkpoint(tmp_path, 1, 3)]
    write(tmp_path, 3, 2, 3)
    assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)] == [3, 1]
    (tmp_path / "checkpoint-00000.pt").write_bytes(b"without a record")
    assert complete_checkpoints(tmp_path)[0].step == 3


def test_a_rank_removes_what_is_older_than_the_last_complete_ones(tmp_path: Path) -> None:
    """Rank 0 is ahead of rank 1: what both have stays, though rank 0 has three newer parts."""
    for step in (1, 3):
        write(tmp_path, step, 0, 2), write(tmp_path, step, 1, 2)
    for step in (5, 7):
        write(tmp_path, step, 0, 2)
        remove_old_rank_files(tmp_path, 0, 2, keep=2, step=step)
    assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)] == [3, 1]
    write(tmp_path, 5, 1, 2)
    for rank in range(2):
        remove_old_rank_files(tmp_path, rank, 2, keep=2, step=7)
    assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)] == [5, 3]
    assert {path.name.split("-")[1] for path in (tmp_path / "checkpoints").iterdir()} == {
        "00000003",
        "00000005",
        "00000007",
    }


def test_what_was_just_written_stays_though_a_damaged_or_foreign_one_is_later(tmp_path: Path) -> None:
    write(tmp_path, 9).write_bytes(b"damaged")
    for step in (3, 5):
        write(tmp_path, step)
        remove_old_rank_files(tmp_path, 0, 1, keep=1, step=step)
        assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)] == [9, step]


def test_parts_of_as_many_ranks_make_a_checkpoint(tmp_path: Path) -> None:
    """Three ranks became two while they wrote: what is left of the three is none of the two's, and goes with the old."""
    for rank in range(3):
        write(tmp_path, 1, rank, 3)
    write(tmp_path, 3, 1, 3), write(tmp_path, 3, 2, 3), write(tmp_path, 3, 0, 2)
    assert complete_checkpoints(tmp_path) == [Checkpoint(tmp_path, 1, 3)]
    write(tmp_path, 3, 1, 2)
    assert complete_checkpoints(tmp_path) == [Checkpoint(tmp_path, 3, 2), Checkpoint(tmp_path, 1, 3)]
    for act in (
        lambda rank: write(tmp_path, 5, rank, 2),
        lambda rank: remove_old_rank_files(tmp_path, rank, 2, keep=1, step=5),
    ):
        act(0), act(1)
    assert {path.name[:24] for path in (tmp_path / "checkpoints").iterdir()} == {
        f"step-00000005-rank-{rank:05d}" for rank in range(2)
    }


KILLED = """
import os, signal, sys
from pathlib import Path
from workbench.runtimes.checkpoint.files import rank_file_path, write_rank_file
def save(file):
    file.write(b"n" * 50)
    os.kill(os.getpid(), signal.SIGKILL)
write_rank_file(rank_file_path(Path(sys.argv[1]), int(sys.argv[2]), 0), save, {"step": 0, "rank": 0, "num_workers": 1})
"""


@pytest.mark.parametrize("step", [3, 5])
def test_killed_while_it_writes_it_leaves_the_last_good_one(tmp_path: Path, step: int) -> None:
    """Also if it writes a rank file that exists already (step 3), as a resumed run in the same folder would."""
    write(tmp_path, 1), write(tmp_path, 3)
    done = subprocess.run(forked("-c", KILLED, str(tmp_path), str(step)), timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert complete_checkpoints(tmp_path)[0].step == (3 if step == 5 else 1)
    assert rank_file_path(tmp_path, step, 0).exists() == (step == 3), "half a part under its name"
    verify_rank_file(complete_checkpoints(tmp_path)[0].rank_file(0))


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def full(file: Any) -> None:
        file.write(b"n" * 50)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_rank_file(rank_file_path(tmp_path, 3, 0), full, {"step": 3, "rank": 0, "num_workers": 1})
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000001-rank-00000.json",
        "step-00000001-rank-00000.pt",
    ]


def test_a_snapshot_is_a_copy_in_the_same_memory_each_time() -> None:
    weights = torch.arange(6.0).reshape(2, 3).t()
    tree = {"a": [weights, weights], "b": (weights[0], 3, None), "c": torch.zeros(0)}
    snapshot = StagingBuffers()
    first = snapshot.take(tree)
    assert torch.equal(first["a"][0], weights) and first["a"][0].stride() == weights.stride()
    assert first["a"][0] is first["a"][1]
    place = first["a"][0].data_ptr()
    weights.add_(1)
    assert first["b"][0][0] == 0.0
    second = snapshot.take(tree)
    assert second["a"][0].data_ptr() == place and torch.equal(second["b"][0], weights[0])


# -- during the training ----------------------------------------------------------------------------------------


def solo(tmp_path: Path, problem: Any, how: Settings) -> Run:
    job = replace(make_job("torch", 1, SynchronousSGD(), problem, how))
    run_rank(job, SoloTransport())
    return Run.load(job.folder)


class Waits(nn.Module):
    """Its `step`-th forward waits until a part is being written."""

    begun, enough = threading.Event(), threading.Event()

    def __init__(self, step: int) -> None:
        super().__init__()
        self.body, self.step, self.count = tiny.mlp(), step, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.count == self.step:
            assert self.begun.wait(20)
            self.enough.set()
        self.count += self.training
        return self.body(x)


def test_training_goes_on_while_a_part_is_written_and_never_two_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write after step 1 does not end before step 3 is computed.

    That of step 3 waits for it, and the record says so.
    """
    Waits.begun.clear(), Waits.enough.clear()
    writing, most = [], []
    plain = keeper.write_rank_file

    def slow(path: Path, *args: Any) -> None:
        writing.append(path), most.append(len(writing))
        Waits.begun.set()
        assert Waits.enough.wait(20), "training waits for a write"
        time.sleep(0.2)
        plain(path, *args)
        writing.remove(path)

    monkeypatch.setattr(keeper, "write_rank_file", slow)
    run = solo(tmp_path, tiny.problem(partial(Waits, 3)), settings())
    assert most == [1, 1, 1]
    assert any("training waited" in note and "raise checkpoint_every" in note for note in run.info["notes"])
    assert run.folder is not None
    assert [checkpoint.step for checkpoint in complete_checkpoints(run.folder)] == [5, 3]


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = keeper.write_rank_file

    def full(path: Path, *args: Any) -> None:
        if "step-00000003" in path.name:
            raise OSError(28, "No space left on device")
        plain(path, *args)

    monkeypatch.setattr(keeper, "write_rank_file", full)
    run = solo(tmp_path, tiny.problem(), settings())
    assert run.info["status"] == "finished"
    assert any(
        "rank 0 could not write its checkpoint of step 3" in note and "No space" in note for note in run.info["notes"]
    )
    assert run.folder is not None
    assert [checkpoint.step for checkpoint in complete_checkpoints(run.folder)] == [5, 1]


# -- damage -----------------------------------------------------------------------------------------------------


@on_real_runtimes
def test_a_damaged_one_is_named_and_the_one_before_it_is_used(runtime: str) -> None:
    how = settings(optimizer=tiny.momentum)
    unbroken = train(runtime, 3, PipeSGD(), tiny.problem(), how)
    newest, before = complete_checkpoints(Path(unbroken.checkpoint))
    path = newest.rank_file(1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again = train(runtime, 3, PipeSGD(), tiny.problem(), how, resume=unbroken.checkpoint)
    assert again.rows(0)[0]["step"] == before.step + 1 == 4
    assert torch.equal(again.final, unbroken.final)
    (note,) = [note for note in again.run.info["notes"] if "damaged" in note]
    assert path.name in note and "step 5" in note and "skipped" in note
    before.rank_file(0).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no undamaged checkpoint.*step 5.*step 3.*restore"):
        failing(runtime, 3, PipeSGD(), how, unbroken)


@on_real_runtimes
def test_a_run_continues_from_the_checkpoint_that_is_chosen(runtime: str) -> None:
    how = settings(optimizer=tiny.momentum, keep_checkpoints=3)
    unbroken = train(runtime, 3, PipeSGD(), tiny.problem(), how)
    assert [checkpoint.num_steps for checkpoint in complete_checkpoints(Path(unbroken.checkpoint))] == [6, 4, 2]
    again = train(runtime, 3, PipeSGD(), tiny.problem(), how, resume=f"{unbroken.checkpoint}@2")
    assert again.rows(0)[0]["step"] == 2
    assert torch.equal(again.final, unbroken.final)
    with pytest.raises(ConfigError, match="has no checkpoint after 3 steps: there are those after 2, 4, 6 steps"):
        failing(runtime, 3, PipeSGD(), how, unbroken, "@3")
    chosen = complete_checkpoints(Path(unbroken.checkpoint))[1]
    chosen.rank_file(0).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no undamaged checkpoint.*step 3"):  # and no other one is taken
        failing(runtime, 3, PipeSGD(), how, unbroken, "@4")


def test_a_resumed_run_notes_that_another_learning_rate_is_not_used() -> None:
    how = settings(optimizer=tiny.momentum, schedule=tiny.step_lr)
    first = train("torch", 2, SynchronousSGD(), tiny.problem(), how)
    same, other = (
        train("torch", 2, SynchronousSGD(), tiny.problem(), one, resume=first.checkpoint)
        for one in (how, replace(how, lr=0.007))
    )
    assert torch.equal(same.final, other.final)
    assert not [note for note in same.run.info["notes"] if "learning rate" in note]
    (note,) = [note for note in other.run.info["notes"] if "learning rate" in note]
    assert "not from 0.007: change it while the run trains" in note


def test_a_source_names_a_run_and_perhaps_a_checkpoint(tmp_path: Path, runs: Path) -> None:
    assert split_source("first@20") == ("first", 20)
    assert [split_source(name)[1] for name in ("first", "first@", "@20", "first@x", "a@b/c", "first@-1")] == [None] * 6
    (tmp_path / "kept@20").mkdir()
    assert split_source(f"{tmp_path}/kept@20")[1] is None, "a folder of this name"
    folder = new_run({"algorithm": {"name": "PipeSGD"}})
    write(folder, 3), write(folder, 5)
    write_rank_file(rank_file_path(folder, None, 0), lambda file: None, {"step": 6, "rank": 0, "num_workers": 1})
    assert find_source(f"{folder.name}@4") == f"{folder.resolve()}@4"
    assert checkpoint_of("last@7") == f"{folder.resolve()}@7", "that of the stop"
    assert checkpoint_of(folder) == find_source("last") == str(folder.resolve())
    with pytest.raises(ConfigError, match="no checkpoint after 5 steps: there are those after 4, 6, 7 steps"):
        checkpoint_of(f"{folder.name}@5")


def failing(
    runtime: str, num_ranks: int, algorithm: Algorithm, how: Settings, first: Trained, chosen: str = ""
) -> None:
    """Raise the error of rank 0 when it resumes that run, from the chosen checkpoint."""
    job = make_job(runtime, num_ranks, algorithm, tiny.problem(), how, resume=f"{first.checkpoint}{chosen}")
    found = shared_pool(runtime, num_ranks).outcomes([(run_rank, (job,))] * num_ranks)  # type: ignore[arg-type]
    assert all(outcome.error is not None for outcome in found)
    raise next(outcome.error for outcome in found if isinstance(outcome.error, ConfigError))


def test_a_stop_without_records_is_no_checkpoint() -> None:
    """An earlier version wrote none."""
    how = settings(optimizer=tiny.momentum, checkpoint_every=None)
    first = train("torch", 2, PipeSGD(), tiny.problem(), how, stop_after=3)
    (checkpoint,) = complete_checkpoints(Path(first.checkpoint))
    for rank in (0, 1):
        record_path(checkpoint.rank_file(rank)).unlink()
    with pytest.raises(
        ConfigError,
        match=r"has no complete checkpoint .* checkpoint-00000\.pt has no record: an earlier version wrote it",
    ):
        failing("torch", 2, PipeSGD(), how, first)


# -- state that is equal on all ranks ----------------------------------------------------------------------------------


@on_real_runtimes
@pytest.mark.parametrize(
    "algorithm", [SynchronousSGD(), PipeSGD(width=3)], ids=lambda algorithm: type(algorithm).__name__
)
def test_model_and_optimizer_lie_in_rank_0s_part_alone(algorithm: Algorithm, runtime: str) -> None:
    """The others' files have only their own state; all ranks continue as without a stop."""
    problem, how = tiny.problem(tiny.batchnorm_mlp), settings(optimizer=tiny.momentum, ema_decay=0.9)
    unbroken = train(runtime, 3, algorithm, problem, how)
    checkpoint = complete_checkpoints(Path(unbroken.checkpoint))[0]
    replicas = [torch.load(checkpoint.rank_file(rank), weights_only=True)["replica"] for rank in range(3)]
    assert set(replicas[0]["model"]) == set(tiny.batchnorm_mlp().state_dict())
    assert "alike" not in replicas[0]
    for rank in (1, 2):
        assert set(replicas[rank]["model"]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        assert not {"optimizer", "average"} & set(replicas[rank])
        assert read_whole_state(checkpoint, rank)[1] == ""
    again = train(runtime, 3, algorithm, problem, how, resume=unbroken.checkpoint)
    assert len(again.rows(1)) < len(unbroken.rows(1))
    for rank in range(3):
        assert torch.equal(again.parameters[rank][-1], unbroken.parameters[rank][-1])


@pytest.mark.parametrize("now", [2, 1])
def test_a_rank_that_held_another_model_goes_on_with_rank_0s_and_it_is_said(now: int) -> None:
    first = train("torch", 2, SynchronousSGD(), tiny.problem(), settings(optimizer=tiny.momentum), stop_after=3)
    (checkpoint, *_) = complete_checkpoints(Path(first.checkpoint))
    saved = torch.load(checkpoint.rank_file(1), weights_only=True)
    saved["replica"]["alike"] ^= 1
    write_rank_file(
        checkpoint.rank_file(1), lambda file: torch.save(saved, file), {"step": 3, "rank": 1, "num_workers": 2}
    )
    again = train(
        "torch",
        now,
        SynchronousSGD(),
        tiny.problem(),
        settings(optimizer=tiny.momentum, batch_size=8 // now),
        resume=first.checkpoint,
    )
    assert any("rank 1's parameters or optimizer differed from rank 0's" in note for note in again.run.info["notes"])


def test_a_model_that_is_damaged_is_told_once_and_the_checkpoint_before_it_taken() -> None:
    first = train("torch", 3, SynchronousSGD(), tiny.problem(), settings(optimizer=tiny.momentum))
    newest, before = complete_checkpoints(Path(first.checkpoint))
    newest.rank_file(0).write_bytes(b"x" * newest.rank_file(0).stat().st_size)
    again = train(
        "torch", 3, SynchronousSGD(), tiny.problem(), settings(optimizer=tiny.momentum), resume=first.checkpoint
    )
    assert again.rows(0)[0]["step"] == before.step + 1
    (note,) = (note for note in again.run.info["notes"] if "skipped" in note)
    assert note.count("checksum") == 1
    assert torch.equal(again.final, first.final)


def part(bias: float, mean: float) -> dict[str, Any]:
    """What a rank keeps whose parameters and optimizer are all ranks', and whose buffer is not."""
    model = {"a.weight": torch.arange(7.0)[1:6], "a.bias": torch.tensor(bias), "mean": torch.tensor(mean)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(3, dtype=torch.float16)}}, "lr": 0.1}
    replica = {
        "model": model,
        "optimizer": optimizer,
        "schedule": None,
        "average": None,
        "updates": [1],
        "loss_scale": None,
        "master": None,
    }
    return {
        "step": 3,
        "algorithm": "m",
        "num_workers": 2,
        "layout": [],
        "replica": replica,
        "program": {"kind": None, "fields": {"": []}},
        "memory": {},
    }


@pytest.mark.parametrize("other", [0.0, 2**-23])
def test_what_is_ones_own_stays_ones_own(tmp_path: Path, other: float) -> None:
    names = ("a.weight", "a.bias")
    for rank, tree in enumerate((part(1.0, 5.0), without_replicated(part(1.0 + other, 7.0), names))):
        write_rank_file(
            rank_file_path(tmp_path, 3, rank), partial(torch.save, tree), {"step": 3, "rank": rank, "num_workers": 2}
        )
    whole, word = read_whole_state(Checkpoint(tmp_path, 3, 2), 1)
    assert bool(word) == bool(other)
    expected = part(1.0, 7.0)["replica"]
    assert list(whole["replica"]["model"]) == list(expected["model"])
    assert whole["replica"].keys() == expected.keys()
    assert all(torch.equal(whole["replica"]["model"][name], value) for name, value in expected["model"].items())
    swapped = part(1.0, 5.0)
    swapped["replica"]["model"]["a.weight"] = swapped["replica"]["model"]["a.weight"].reshape(1, 5)
    assert (
        without_replicated(swapped, names)["replica"]["alike"]
        != without_replicated(part(1.0, 5.0), names)["replica"]["alike"]
    )


# -- another number of ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [SynchronousSGD(), LayerwiseSGD(bucket_bytes=200.0), LocalSGD(every=2, after=6)],
    ids=lambda algorithm: type(algorithm).__name__,
)
@pytest.mark.parametrize(("before", "now"), [(3, 2), (2, 3)])
def test_with_the_same_global_batch_other_ranks_compute_the_same(algorithm: Algorithm, before: int, now: int) -> None:
    """To rounding; `LocalSGD` as long as its steps are synchronous."""
    how = settings(optimizer=tiny.momentum, steps=6)
    unbroken = train("torch", before, algorithm, tiny.problem(), replace(how, batch_size=12 // before))
    again = train(
        "torch", now, algorithm, tiny.problem(), replace(how, batch_size=12 // now), resume=unbroken.checkpoint
    )
    assert [row["step"] for row in again.rows(0)] == [4, 5]
    assert relative_error(again.final, unbroken.final) < 1e-12
    assert any(f"resumed on {now} ranks, {before} before" in note for note in again.run.info["notes"])


def test_with_another_global_batch_data_are_dealt_anew_from_where_they_were() -> None:
    """36 of the 46 samples of two epochs were taken by three ranks; two ranks take the others, once each, and the schedule continues."""
    how = settings(optimizer=tiny.sgd, steps=None, epochs=2, checkpoint_every=3)
    first = train("torch", 3, LocalSGD(every=3), tiny.problem(), how)
    again = train("torch", 2, LocalSGD(every=3), tiny.problem(), how, resume=first.checkpoint)
    rows = [(row["step"], row["samples"], row["num_samples"]) for row in again.rows(0)]
    assert first.rows(0)[2]["samples"] == 23 + 12
    assert rows == [(3, 43, 4), (4, 46, 2)]
    assert again.rows(1)[1]["num_samples"] == 1
    notes = " ".join(again.run.info["notes"])
    assert "a global batch has 8 samples; it had 12. Batches differ from sample 35 on" in notes


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5), st.integers(0, 40))
def test_dealt_anew_each_sample_is_taken_once_an_epoch(num_samples: int, before: int, now: int, stop: int) -> None:
    first = Sampler(num_samples, 3, before, seed=1)
    then = Sampler(num_samples, 3, now, seed=1, origin=(stop + 1, first.samples_before(stop + 1)))
    epochs = first.samples_before(stop + 1) // num_samples + 2
    end = then.steps_of(epochs)
    deals = [(first, step) for step in range(stop + 1)] + [(then, step) for step in range(stop + 1, end)]
    taken = [
        int(index)
        for sampler, step in deals
        for rank in range(sampler.num_workers)
        for index in sampler.share(step, rank)
    ]
    assert then.samples_before(end) == len(taken) == epochs * num_samples
    for epoch in range(epochs):
        assert sorted(taken[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))
    assert then.ends_epoch(end - 1)


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "words"),
    [
        (PipeSGD(), tiny.sgd, "PipeSGD keeps gradients, sums or parameters of each rank"),
        (LocalSGD(every=4), tiny.sgd, "the parameters of its ranks differ there.*a multiple of every="),
        (LocalSGD(every=2), tiny.momentum, "the optimizer's state of its ranks differ"),
        (
            SynchronousSGD(collective=Once(codec=ErrorFeedback(codec=TopK(k=5)))),
            tiny.sgd,
            "a codec keeps a residual on each rank",
        ),
        (AsyncSGD(), tiny.sgd, "at different steps"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_what_ranks_do_not_have_in_common_cannot_go_to_other_ranks(
    algorithm: Algorithm, optimizer: Any, words: str
) -> None:
    how = settings(optimizer=optimizer)
    first = train("torch", 3, algorithm, tiny.problem(), how)
    with pytest.raises(ConfigError, match=f"on 3 ranks, and this run has 2.*{words}.*Resume it on 3 ranks"):
        failing("torch", 2, algorithm, how, first)


# -- the whole job is killed ------------------------------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """What a test starts ends with it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(20)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_starts", "no_process_left")
@pytest.mark.parametrize("runtime", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
def test_kill_9_of_all_and_resume_is_unbroken(
    runs: Path, processes: list[subprocess.Popen[bytes]], runtime: str
) -> None:
    """The command and its ranks are killed during the run. The same command with --resume ends as an unbroken run."""
    same = ["--runtime", runtime, "--option", "dtype=float64", "--evaluate-every", "0", "--checkpoint-every", "5"]
    slow = ["--compute", "backward_s=0.04"]  # few steps, which an unbroken run must then take again
    begin = [*COMMAND, "train", "pipe-sgd", "--steps", "1000000", *same, *slow]
    process = subprocess.Popen(begin, stdout=subprocess.DEVNULL)
    processes.append(process)
    deadline = time.monotonic() + 90
    while not any(len(complete_checkpoints(path.parent)) >= 2 for path in runs.glob("*/run.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    for end in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none can hear of another's death and say so
        for pid in family:
            os.kill(pid, end)
    process.wait(20)
    (folder,) = (path.parent for path in runs.glob("*/run.json"))
    newest = complete_checkpoints(folder)[0].step
    assert newest is not None and newest % 5 == 4
    assert read_info(folder)["status"] == "running", "nobody was left to say that it ended"
    assert checkpoint_of(folder) == str(folder.resolve())
    steps = str(newest + 8)
    resumed, unbroken = (
        train_by_command("pipe-sgd", "--steps", steps, *same, *more) for more in (["--resume", folder.name], [])
    )
    assert resumed["steps"] == 7
    assert resumed["loss"] == unbroken["loss"]
    models = [load_file(Path(one["folder"]) / "model.safetensors") for one in (resumed, unbroken)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
    earlier = complete_checkpoints(folder)[1].num_steps
    branch = train_by_command("pipe-sgd", "--steps", str(earlier + 3), *same, "--resume", f"{folder.name}@{earlier}")
    assert branch["steps"] == 3


def test_what_cannot_be_is_refused(runs: Path) -> None:
    for how, words in (
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            Settings(steps=1, **how)
    done = workbench("train", "pipe-sgd", "--runtime", "simulated", "--checkpoint-every", "5", status=2)
    assert "real ranks" in done.stderr
