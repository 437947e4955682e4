"""A cable is pulled, or a link becomes slow, while ranks train over an emulated network: for a while, or permanently."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.pool import ForkServer
from tests.distributed.test_emulated import told
from tests.waiting import within
from workbench.cli.main import main
from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.emulated.check import measure
from workbench.errors import ConfigError
from workbench.trace.follow import Follower
from workbench.trace.run import Run

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("no_process_left", "runs"), pytest.mark.timeout(240)]

STEPS, AT_STEP, CUT_S = 40, 8, 2.0
TRAIN = f"--problem wide-mlp --option megabytes=1 --workers 2 --steps {STEPS} --batch-size 4 --evaluate-every 0 --seed 3 --threads 1 --json"
RUN = "2*"  # what a run's folder is called once it is one


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedNetwork]:
    """A step sends a megabyte either way, which takes 80 ms."""
    with EmulatedNetwork(2, rate="100mbit") as network:
        yield network


@pytest.fixture(autouse=True)
def whole(network: EmulatedNetwork) -> Iterator[None]:
    """A test that fails leaves no cut to the next one."""
    yield
    network.reconnect(1)


@pytest.fixture(scope="module")
def python(network: EmulatedNetwork) -> Iterator[str]:
    """The program by which processes on both hosts are forked."""
    server = ForkServer(begin=partial(network.run, 0))
    yield server.python
    server.close()


class Training:
    """`workbench train` on the first host, which starts its other rank on the second."""

    def __init__(
        self,
        network: EmulatedNetwork,
        runs: Path,
        algorithm: str,
        runtime: str,
        *more: str,
        python: str = sys.executable,
    ) -> None:
        runs.mkdir(exist_ok=True)
        before = set(runs.glob(RUN))
        command = [python, "-m", "workbench", "train", algorithm, "--runtime", runtime, *TRAIN.split(), *more]
        self.process = network.run(0, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert within(60, lambda: set(runs.glob(RUN)) - before), "the run was not opened"
        (self.folder,) = set(runs.glob(RUN)) - before
        self._follower = Follower(self.folder)

    def num_steps(self) -> int:
        """Wait until rank 0 has finished."""
        return len(self._follower.poll().metrics.get(0) or [])

    def reach(self, step: int) -> None:
        assert within(90, lambda: self.num_steps() >= step or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()

    def end(self, timeout_s: float = 90.0) -> tuple[int, str, str]:
        """Exit status, and output."""
        said, error = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, said, error

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = load_file(self.folder / "model.safetensors")
        return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def expected(forked_starts: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The result of an unbroken run without a network. A sum of two ranks has only one order, with any library."""
    runs = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(runs))
        assert main(["train", "synchronous-sgd", "--runtime", "torch", *TRAIN.split()]) == 0
    (folder,) = runs.glob(RUN)
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found


def test_a_cable_can_be_pulled_and_put_in_again(network: EmulatedNetwork) -> None:
    """A host keeps its addresses of the others meanwhile."""
    probe = f"{sys.executable} -I -S -c \"import socket; socket.create_connection(('host1', 9), 1)\" 2>&1 | tail -1"
    assert "refused" in told(network, 0, probe)
    network.cut(1)
    assert "timed out" in told(network, 0, probe)
    network.reconnect("host1")
    assert "refused" in told(network, 0, probe)


def test_a_rate_can_be_changed_in_both_directions(network: EmulatedNetwork) -> None:
    network.set_rate(1, "20mbit")
    try:
        assert all(14e6 < measure(network, *ends).found < 21e6 for ends in ((0, 1), (1, 0)))
    finally:
        network.set_rate(1, "100mbit")
    assert 60e6 < measure(network, 0, 1).found < 105e6


def test_what_cannot_be_cut_is_told(network: EmulatedNetwork) -> None:
    with pytest.raises(ConfigError, match="no host 7"):
        network.cut(7)
    with pytest.raises(ConfigError, match="no host 'switch'"):
        network.reconnect("switch")


@pytest.mark.parametrize(
    ("runtime", "fault"), [("torch", "cut"), ("torch", "slow"), pytest.param("mpi", "cut", marks=pytest.mark.mpi)]
)
def test_a_run_goes_on_behind_it(
    network: EmulatedNetwork, python: str, runs: Path, runtime: str, fault: str, expected: dict[str, Tensor]
) -> None:
    """To the same weights; no rank is reported as dead. On MPI with new interpreters, as a user starts them."""
    python = sys.executable if runtime == "mpi" else python
    training = Training(network, runs, "synchronous-sgd", runtime, "--timeout", "60", python=python)
    training.reach(AT_STEP)
    network.cut(1) if fault == "cut" else network.set_rate(1, "1mbit")
    time.sleep(0.5)
    there = training.num_steps()
    time.sleep(CUT_S)
    assert training.num_steps() <= there + 1, "it was not held up"
    network.reconnect(1) if fault == "cut" else network.set_rate(1, "100mbit")
    assert training.end()[0] == 0
    assert same(training.weights(), expected)
    info = Run.load(training.folder).info
    assert info["status"] == "finished" and "departures" not in info


def test_a_worker_that_was_cut_off_comes_back_to_its_server(network: EmulatedNetwork, python: str, runs: Path) -> None:
    """Its process is there: it is not counted out, and none of its gradients is lost."""
    training = Training(network, runs, "async-sgd", "torch", "--timeout", "60", python=python)
    training.reach(AT_STEP)
    network.cut(1)
    time.sleep(CUT_S)
    network.reconnect(1)
    assert training.end()[0] == 0
    run = Run.load(training.folder)
    assert run.info["status"] == "finished" and "departures" not in run.info
    by = [source for update in run.updates() for source in update["sources"]]
    assert (by.count(0), by.count(1)) == (STEPS, STEPS)


def test_a_cut_for_good_ends_the_run_which_goes_on_from_its_checkpoint(
    network: EmulatedNetwork, python: str, runs: Path, expected: dict[str, Tensor]
) -> None:
    """The run ends within the deadline, with an error that distinguishes a network failure from a death."""
    more = ("--timeout", "8", "--checkpoint-every", "3")  # what a rank waits for is known after two heartbeats
    training = Training(network, runs, "synchronous-sgd", "torch", *more, python=python)
    training.reach(AT_STEP)
    network.cut(1)
    begin = time.monotonic()
    status, _, error = training.end()
    assert status != 0
    assert time.monotonic() - begin < 8 + 20
    assert "is the network between them cut, or slow?" in error, error
    assert Run.load(training.folder).info["status"] == "failed"
    assert f"--resume {training.folder.name} continues from it" in error
    network.reconnect(1)
    again = Training(network, runs, "synchronous-sgd", "torch", "--resume", training.folder.name, python=python)
    status, said, error = again.end()
    assert status == 0, error
    assert 0 < json.loads(said)["steps"] <= STEPS
    assert same(again.weights(), expected)
