"""Cost models of real steps: of a run of this package, and of a plain DDP loop without it."""

from __future__ import annotations

import json
import math
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

import workbench as wb
from tests.distributed.commands import train, workbench
from tests.forked import forked
from workbench.analysis import run_overlap
from workbench.calibration import Calibration, from_profile, predict
from workbench.errors import ConfigError

pytestmark = pytest.mark.usefixtures("forked_starts", "runs", "no_process_left")

LOOP = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.25)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

for _ in range(3):
    step()
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
    for _ in range(16):
        step()
        prof.step()
prof.export_chrome_trace(f"{folder}/rank{rank}.json")
dist.destroy_process_group()
"""
SHAPES = [(512, 64), (512,), (512, 512), (512,), (10, 512), (10,)]


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Chrome traces of two ranks of a DDP loop."""
    folder = tmp_path_factory.mktemp("ddp")
    command = forked("-c", LOOP)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    ranks: list[subprocess.Popen[str]] = [
        subprocess.Popen([*command, str(rank), str(folder)], **quiet) for rank in (0, 1)
    ]  # type: ignore[call-overload]
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [folder / f"rank{rank}.json" for rank in (0, 1)]


def test_a_real_run_is_calibrated_and_its_own_step_is_foretold(runs: Path, tmp_path: Path) -> None:
    options = ("--option", "megabytes=2", "--batch-size", "64", "--evaluate-every", "0")
    told = train(
        "synchronous-sgd", "--problem", "wide-mlp", "--runtime", "torch", "--workers", "2", "--steps", "30", *options
    )
    file = tmp_path / "c.json"
    arguments = (
        "calibrate",
        "last",
        "-o",
        str(file),
        "--problem",
        "wide-mlp",
        "--option",
        "megabytes=2",
        "--probe",
        "--codecs",
        "truncate16",
    )
    assert str(file) in workbench(*arguments).stdout
    found = Calibration.load(file)
    assert found.origin.num_workers == 2 and found.origin.runtime == "torch" and found.origin.num_steps >= 20
    assert found.shapes.batch_size == 64 and found.shapes.num_bytes == pytest.approx(2e6, rel=0.01)
    assert min(found.pace.forward_s.value, found.pace.backward_s.value, found.pace.update_s.value) > 0
    assert found.host.cores and found.host.cpu_s_per_byte > 0
    assert len(found.pace.backward_shares) == len(found.shapes.parameters) and math.isclose(
        sum(found.pace.backward_shares), 1.0
    )
    assert 0 < found.line.latency_s.value < 0.1 and 1e7 < 1 / found.line.s_per_byte.value < 1e11
    assert [name for name, *_ in found.line.codecs] == ["truncate16"]
    again = predict(found, wb.SynchronousSGD(), workers=2, draws=0)
    # Of a busy machine; what it must not be is another step
    assert again.usual_s == pytest.approx(told["step_seconds_median"], rel=0.5)
    shown = json.loads(workbench("predict", str(file), "--algorithm", "pipe-sgd", "--workers", "2", "--json").stdout)
    assert 0 < shown["step_s"] < 2 * again.step_s


def test_a_ddp_loop_is_calibrated_from_its_profile(profiles: list[Path]) -> None:
    found = from_profile(profiles, batch_size=64)
    assert from_profile(profiles[0].parent, batch_size=64).as_record() == found.as_record(), "a folder is its profiles"
    assert [shape for _, shape in found.shapes.parameters] == SHAPES
    assert found.origin.num_workers == 2 and found.shapes.num_bytes == 4 * sum(map(math.prod, SHAPES))
    assert min(found.pace.forward_s.value, found.pace.backward_s.value, found.pace.update_s.value) > 0
    shares = found.pace.backward_shares
    assert math.isclose(sum(shares), 1.0) and sum(shares[2:4]) > sum(shares[4:])  # of 512 x 512 and of 10 x 512
    # On a busy machine it can come out as none, in all samples: a megabyte over the loopback takes little
    assert 0 < found.line.s_per_byte.value < 1e-6
    step = predict(found, wb.LayerwiseSGD(bucket_bytes=250_000), workers=2, draws=0)
    events = json.loads(profiles[0].read_text())["traceEvents"]
    ends = sorted(
        event["ts"] + event["dur"] for event in events if str(event.get("name")).startswith("Optimizer.step#")
    )
    seen_s = sorted((after - before) * 1e-6 for before, after in pairwise(ends))
    # A busy machine makes steps longer, and the passes from which they are predicted less so
    assert 0.3 * seen_s[0] < step.usual_s < 2 * seen_s[len(ends) // 2]


def test_one_rank_alone_says_what_it_cannot_tell(profiles: list[Path], tmp_path: Path) -> None:
    found = from_profile(profiles[1])
    assert any("one rank of 2" in note for note in found.notes)
    assert (
        str(tmp_path / "c.json")
        in workbench("calibrate", str(profiles[0]), str(profiles[1]), "-o", str(tmp_path / "c.json")).stdout
    )
    made = workbench("calibrate", str(profiles[0].parent), "-o", str(tmp_path / "folder.json"))
    assert str(tmp_path / "folder.json") in made.stdout
    with pytest.raises(ConfigError, match=r"folder of profiles, not of a run: use calibration.from_profile"):
        wb.calibration.calibrate(profiles[0].parent)
    assert Calibration.load(tmp_path / "c.json").origin.algorithm == "DistributedDataParallel"


def test_what_is_no_profile_of_a_ddp_loop_says_what_to_do(profiles: list[Path], tmp_path: Path) -> None:
    trace = json.loads(profiles[0].read_text())
    path = tmp_path / "trace.json"

    def without(*words: str) -> list[object]:
        return [event for event in trace["traceEvents"] if not any(word in str(event.get("name")) for word in words)]

    for told, words in (
        ("no json", "not a Chrome trace"),
        (json.dumps([1]), "traceEvents"),
        (json.dumps({**trace, "distributedInfo": None}), "--workers"),
        (json.dumps({**trace, "traceEvents": without("ProfilerStep", "Optimizer.step")}), "no steps"),
        (json.dumps({**trace, "traceEvents": without("AccumulateGrad")}), "record_shapes"),
    ):
        path.write_text(told)
        with pytest.raises(ConfigError, match=words):
            from_profile(path)
    with pytest.raises(ConfigError, match="of one rank"):
        from_profile([profiles[0], profiles[0]])


def test_the_profiles_are_a_run_of_two_ranks_too(profiles: list[Path]) -> None:
    run = wb.trace.from_profiler(profiles[0].parent)
    spans = run.spans
    assert spans.ranks == [0, 1] and run.info["num_workers"] == 2
    sums = spans.select(kinds=["all_reduce"]).table
    assert sorted(set(sums["bytes"].tolist())) and sums["bytes"][sums["step"] == 3].sum() == 2 * 4 * sum(
        map(math.prod, SHAPES)
    )
    both = [
        {(int(row["step"]), int(row["bucket"]), int(row["bytes"])) for row in sums[sums["rank"] == rank]}
        for rank in (0, 1)
    ]
    assert both[0] == both[1], "a bucket is the same sum on both ranks"
    phases = spans.select(ranks=[0], steps=slice(3, 4), kinds=["forward", "backward", "apply"]).kind_names.tolist()
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "apply"], (
        "a phase in two where the host waited in its midst"
    )
    found = run_overlap(run, slice(1, 15))
    assert found.fraction is not None and 0 <= found.fraction < 1 and found.num_steps == 28
