"""`record` in one process: spans of a plain loop, equal numbers, nothing left in torch, and refused calls."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, TensorDataset, dataloader

from workbench.analysis import compare, summary
from workbench.cli.record import _record
from workbench.errors import ConfigError
from workbench.runtimes.user_loop import record_command, torch_events
from workbench.runtimes.user_loop.record import Recording, record
from workbench.trace import Run, list_runs

STEPS, BATCH = 6, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Tanh(), nn.Linear(16, 1))


def data() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.linspace(-1, 1, STEPS * BATCH * 8).reshape(-1, 8)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)


def train(net: nn.Module, each: Callable[[int], object] = int) -> Tensor:
    """Train one epoch with dropout and a shuffled loader. Return the parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(data()):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
        each(step)
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def kinds(run: Run, step: int) -> list[str]:
    return [str(kind) for kind in run.spans.select(steps=slice(step, step + 1)).kind_names]


def state_of_torch() -> list[Any]:
    """All that a recording replaces or adds to."""
    operations = [torch._C._dispatch_dump(f"c10d::{name}") for name in ("allreduce_", "send", "barrier")]
    hooks = [dict(torch_optimizer._global_optimizer_pre_hooks), dict(torch_optimizer._global_optimizer_post_hooks)]
    functions = [torch.autograd.backward, vars(dataloader._BaseDataLoaderIter)["__next__"], vars(dist.Work)["wait"]]
    return [*operations, *hooks, *functions]


@pytest.fixture(autouse=True)
def torch_is_as_before() -> Iterator[None]:
    before = state_of_torch()
    yield
    assert state_of_torch() == before


def test_a_plain_loop_leaves_a_run_with_all_phases(runs: Path) -> None:
    with record() as recording:
        train(model())
    run = recording.run
    assert run.info["status"] == "finished"
    assert [run.folder for run in list_runs()] == [run.folder]
    assert run.info["result"] == {"steps": STEPS, "seconds": run.metrics[0][-1]["seconds"]}
    assert [row["step"] for row in run.metrics[0]] == list(range(STEPS))
    for step in range(STEPS):
        assert kinds(run, step) == ["load", "forward", "backward", "apply"]
    assert run.overlap().num_steps == STEPS
    assert set(run.critical_path().kind_names) >= {"forward", "backward", "apply"}
    assert "loop" in str(compare([run]))
    run.timeline()


def test_spans_do_not_overlap_and_lie_within_their_step(runs: Path) -> None:
    with record() as recording:
        train(model())
    table = recording.run.spans.table
    assert (table["start_s"][1:] >= table["end_s"][:-1] - 1e-7).all()
    ends = [row["seconds"] for row in recording.run.metrics[0]]
    for step, end_s in enumerate(ends):
        mine = table[table["step"] == step]
        assert mine["end_s"].max() <= end_s + 1e-7
        assert mine["start_s"].min() >= (ends[step - 1] if step else 0) - 1e-7


def test_numbers_are_bit_identical_and_so_is_the_random_state_afterwards(runs: Path) -> None:
    plain = train(model())
    after = torch.get_rng_state()
    with record():
        recorded = train(model())
    assert torch.equal(recorded, plain)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_loss_and_the_rate_are_those_of_the_loop(runs: Path) -> None:
    net = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    nn.init.constant_(net.weight, 3.0)
    with record() as recording:
        for _ in range(2):
            for part in (1.0, 2.0):
                (net(torch.ones(1, 1)).sum() * part).backward()
            optimizer.step()
    assert [(row["loss"], row["lr"]) for row in recording.run.metrics[0]] == [(9.0, 0.0)] * 2


def test_accumulated_gradients_are_one_step(runs: Path) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    with record() as recording:
        for number, (x, _) in enumerate(data()):
            net(x).mean().backward()
            if number % 3 == 2:
                optimizer.step()
    assert kinds(recording.run, 1) == ["load", "forward", "backward"] * 3 + ["apply"]
    assert len(recording.run.metrics[0]) == STEPS // 3


def test_an_evaluation_belongs_to_no_step(runs: Path) -> None:
    net = model()

    def evaluate(step: int) -> None:
        if step == 2:
            net.eval()
            with torch.no_grad():
                for x, _ in data():
                    net(x)
            net.train()

    with record() as recording:
        train(net, evaluate)
    found = recording.run.spans.select(kinds=["evaluate"]).table
    assert found["step"].tolist() == [2]
    assert len(recording.run.spans.select(kinds=["load"]).table) == STEPS
    with_it = recording.run.spans.table
    begin, end = (with_it[with_it["step"] == step]["start_s"].min() for step in (2, 3))
    window_s = recording.run.overlap(slice(2, 3)).window_s[0]
    assert window_s < end - begin + 1e-4


def test_the_seconds_of_a_loop_are_without_its_evaluations(runs: Path) -> None:
    """As in a training by the workbench: evaluations would count as slow steps."""
    net = model()
    pause_s = 0.05

    def evaluate(step: int) -> None:
        with torch.no_grad():
            net(torch.ones(1, 8))
            time.sleep(pause_s)
            net(torch.ones(1, 8))

    begin_s = time.perf_counter()
    with record() as recording:
        train(net, evaluate)
    lasted_s = time.perf_counter() - begin_s
    table = recording.run.spans.select(kinds=["evaluate"]).table
    evaluated_s = float((table["end_s"] - table["start_s"]).sum())
    assert evaluated_s >= STEPS * pause_s
    found = summary(recording.run)
    assert found["seconds"] <= lasted_s - (STEPS - 1) * pause_s
    assert found["step_seconds_median"] < pause_s
    last = recording.run.spans.select(kinds=["apply"]).table["end_s"].max()
    before = table[table["end_s"] <= last]
    assert found["seconds"] == pytest.approx(last - float((before["end_s"] - before["start_s"]).sum()), abs=1e-4)


def test_a_long_evaluation_is_not_kept_in_memory(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_events, "MOST_NOTES", 10)
    net = model()
    with record() as recording:
        train(net)
        with torch.no_grad():
            for _ in range(100):
                net(torch.ones(1, 8))
                assert len(recording._events._notes) <= 10
        train(net)
    assert len(recording.run.spans.select(kinds=["evaluate"]).table) == 1
    assert len(recording.run.metrics[0]) == 2 * STEPS


def test_an_exception_passes_and_the_record_says_so(runs: Path) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise ZeroDivisionError("of the loop")

    with pytest.raises(ZeroDivisionError, match="of the loop"), record() as recording:
        train(model(), fail)
    run = recording.run
    assert len(run.metrics[0]) == 4
    assert run.failure_summary == "failed after step 3: rank 0 failed at step 4: ZeroDivisionError: of the loop"
    assert "train(model(), fail)" in run.failures[0]["traceback"]
    with record():  # another one may begin
        train(model())


def test_only_the_first_steps_are_recorded_if_asked_for(runs: Path) -> None:
    before, inside = state_of_torch(), list[bool]()
    with record(steps=2) as recording:
        recorded = train(model(), lambda _: inside.append(state_of_torch() == before))
    assert inside == [False, False, *[True] * (STEPS - 2)]
    assert len(recording.run.metrics[0]) == 2
    assert torch.equal(recorded, train(model()))


def test_a_user_names_what_torch_does_not_show(runs: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record("mine") as recording:
        for _ in range(3):
            with recording.span("load"):
                x = torch.ones(2, 8)
            net(x).mean().backward()
            with recording.span("all_reduce", num_bytes=800):
                torch.linspace(0, 1, 200_000).sum()
            optimizer.step()
        with pytest.raises(ConfigError, match=r"kind='wire': choose one of load, .*all_reduce"):
            recording.span("wire")
    run = recording.run
    assert run.label == "mine"
    assert sorted(kinds(run, 1)) == ["all_reduce", "apply", "backward", "forward", "load", "wait"]
    assert run.metrics[0][-1]["bytes_sent"] == 2400
    assert (run.overlap(slice(1, 2)).exposed_s > 0).all()


def test_models_of_several_optimizers(runs: Path) -> None:
    """Two optimizers that step together end one step; with a forward between them, each ends a step."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 1)
    one, other = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second))
    with record() as recording:
        for _ in range(2):
            second(first(torch.ones(1, 8))).sum().backward()
            one.step()
            other.step()
        for net, optimizer in ((first, one), (second, other)):
            net(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    assert [kinds(recording.run, step).count("apply") for step in range(4)] == [2, 2, 1, 1]


def test_an_optimizer_may_call_the_loop(runs: Path) -> None:
    net = nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(1, 8)).square().sum()
        loss.backward()
        return loss

    with record() as recording:
        for _ in range(2):
            optimizer.step(closure)
    assert set(kinds(recording.run, 1)) == {"forward", "backward", "apply"}
    assert len(recording.run.metrics[0]) == 2


@pytest.mark.parametrize("begins", ["before the loop", "in the first backward"])
def test_the_loss_of_a_closure_is_that_of_its_first_call(begins: str, runs: Path) -> None:
    """As `optimizer.step(closure)` returns it. `workbench record` begins in the first backward: in the first step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, lr=0.1)
    x, y = torch.randn(12, 8), torch.randn(12, 1)
    recording = record()
    calls: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        calls.append(float(loss.detach()))
        if begins == "in the first backward" and len(calls) == 1:
            recording.__enter__()
        loss.backward()
        return loss

    if begins == "before the loop":
        recording.__enter__()
    returned = [float(optimizer.step(closure).detach()) for _ in range(5)]  # type: ignore[union-attr]
    recording.__exit__(None, None, None)
    assert len(calls) == 15, "each step calls it three times"
    rows = recording.run.metrics[0]
    assert [row["step"] for row in rows] == list(range(5))
    assert [row["loss"] for row in rows] == returned == calls[::3]


def test_a_block_without_a_step_is_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"no optimizer took a step.*Call optimizer\.step\(\)"), record():
        model()(torch.ones(1, 8)).sum().backward()
    assert len(list_runs()) == 0


def test_recordings_do_not_nest(runs: Path) -> None:
    with record() as recording:
        with pytest.raises(ConfigError, match="a recording is active in this process: leave its block"), record():
            pass
        train(model())
    assert len(recording.run.metrics[0]) == STEPS
    with pytest.raises(ConfigError, match="has ended: call record"):
        recording.__enter__()


def test_the_run_is_read_after_the_block(runs: Path) -> None:
    with record() as recording:
        with pytest.raises(ConfigError, match=r"read \.run after its block"):
            recording.run  # noqa: B018 - the property raises
        train(model())


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_a_number_of_steps_is_a_whole_number(steps: Any) -> None:
    with pytest.raises(ConfigError, match="give the number of steps to record, 1 or more"):
        record(steps=steps)


def test_ranks_without_a_process_group_are_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group before record"), record():
        pass


def test_a_run_in_a_folder_of_its_own(tmp_path: Path) -> None:
    with record(tmp_path / "new" / "run") as recording:
        train(model())
    assert Run.load(tmp_path / "new" / "run").info["status"] == "finished"
    with pytest.raises(ConfigError, match="not an empty folder"), record(str(recording.folder)):
        pass


def test_a_profile_of_the_loop_is_not_disturbed(runs: Path, tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, record():
        train(model())
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    names = {event.get("name") for event in json.loads((tmp_path / "profile.json").read_text())["traceEvents"]}
    assert "Optimizer.step#SGD.step" in names


def test_a_recording_has_one_thread(runs: Path) -> None:
    """What other threads compute is not the loop's."""
    import threading

    def elsewhere(step: int) -> None:
        other = threading.Thread(target=lambda: model()(torch.ones(1, 8)).sum().backward())
        other.start()
        other.join()

    with record() as recording:
        train(model(), elsewhere)
    assert kinds(recording.run, 3) == ["load", "forward", "backward", "apply"]
    assert isinstance(recording, Recording)


def test_a_command_that_is_another_rank_leaves_the_report_to_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of `workbench emulate --each -- workbench record -- COMMAND`: each rank has its own file of names."""
    options = argparse.Namespace(argv=["mine"], name=None, steps=None)

    def command_with(ranks: list[int]) -> str:
        def run(argv: list[str], env: dict[str, str]) -> int:
            monkeypatch.setenv(record_command.VARIABLE, env[record_command.VARIABLE])
            for rank in ranks:
                recording = MagicMock(rank=rank, folder=tmp_path / "removed, because it has no step")
                monkeypatch.setattr(record_command, "Recording", lambda *_, made=recording, **__: made)
                record_command.begin()
            return 0

        monkeypatch.setattr("workbench.cli.record._run", run)
        _record(options)
        return capsys.readouterr().out

    monkeypatch.setattr(record_command, "Finalize", lambda *_, **__: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert command_with([1]) == ""
    assert all("nothing was recorded" in command_with(ranks) for ranks in ([], [0], [1, 0]))
