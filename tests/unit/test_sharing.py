"""Workers share the tests: every test is run once, a file by one worker, and those that must be alone when all others have ended."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xdist", reason="needs pytest-xdist: pip install 'sgd-workbench[dev]'")

from xdist.remote import Producer

from tests.sharing import ALONE, ALONE_UNIT, LONG, NETWORKS, NETWORKS_UNIT, Sharing, place_of, unit_of

ROOT = Path(__file__).parents[2]
FILES = (
    "tests/distributed/test_slurm.py",
    "tests/distributed/test_doctor.py",
    "tests/laws/test_a.py",
    "tests/unit/test_b.py",
    "workbench/c.py",
)
MUST_BE_ALONE = (
    "tests/distributed/test_leaks.py",
    "tests/distributed/test_emulated.py::test_rates_are_those_of_the_slower_end",
)


@dataclass(eq=False)
class Worker:
    """A worker as xdist sees it. It begins a test only when it has the next one, or knows that there is none."""

    number: int
    shutting_down: bool = False
    tests: list[int] = field(default_factory=list)

    @property
    def gateway(self) -> Any:
        return SimpleNamespace(id=f"gw{self.number}")

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down, "it would not hear of these"
        self.tests += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def can_move(self) -> bool:
        return self.shutting_down or len(self.tests) >= 2


@dataclass
class Session:
    """What xdist's own session does between the scheduler and workers, of which any may be the next to move."""

    collection: list[str]
    chance: Random
    crashes: int = 0
    ran: list[tuple[int, str]] = field(default_factory=list)

    def run(self, num_workers: int) -> None:
        self.start(num_workers)
        self.end()

    def start(self, num_workers: int) -> None:
        config: Any = SimpleNamespace(
            getvalue=lambda name: ["popen"] * num_workers, option=SimpleNamespace(loadscopereorder=True)
        )
        self.sharing: Any = Sharing(config, Producer("quiet", enabled=False))
        self.workers = [Worker(number) for number in range(num_workers)]
        self.num_workers = self.num_begun = num_workers
        for worker in self.workers:
            self.sharing.add_node(worker)
        for worker in self.workers:
            self.sharing.add_node_collection(worker, self.collection)
        self.sharing.schedule()

    def end(self) -> None:
        while self.workers:
            self.end_if_done()
            able = [worker for worker in self.workers if worker.can_move]
            assert able, "all workers wait for each other"
            self.move(self.chance.choice(able))

    def end_if_done(self) -> None:
        if self.sharing.tests_finished:
            for worker in self.sharing.nodes:
                worker.shutdown()

    def move(self, worker: Worker) -> None:
        if not worker.tests:
            self.workers.remove(worker)
            if worker in self.sharing.nodes:
                assert self.sharing.remove_node(worker) is None
            return
        test = worker.tests.pop(0)
        name = self.collection[test]
        if unit_of(name) == ALONE_UNIT:
            others = [other for other in self.workers if other is not worker]
            assert not any(other.tests for other in others), "it is not alone"
            if self.num_workers == self.num_begun:  # else one may just come, in the place of one that crashed
                assert not {other.number for other in others} & {number for number, _ in self.ran}, (
                    "what another left is still to end"
                )
        self.ran.append((worker.number, name))
        if self.crashes and self.chance.random() < 0.2:
            self.crashes -= 1
            self.replace(worker, name)
        else:
            self.sharing.mark_test_complete(worker, test)

    def replace(self, worker: Worker, name: str) -> None:
        """The worker ended in that test; another takes its place."""
        self.workers.remove(worker)
        assert self.sharing.remove_node(worker) == name
        other = Worker(self.num_workers)
        self.num_workers += 1
        self.workers.append(other)
        self.sharing.add_node(other)
        self.sharing.add_node_collection(other, self.collection)
        self.sharing.schedule()


def test_two_that_come_in_the_place_of_two_that_crashed_need_not_come_at_once() -> None:
    session = Session([f"{path}::test_{number}" for path in FILES for number in range(3)], Random(0))
    session.start(2)
    names = [session.collection[worker.tests[0]] for worker in session.workers]
    assert [session.sharing.remove_node(worker) for worker in session.workers] == names
    session.workers = [Worker(2), Worker(3)]
    for worker in session.workers:
        session.sharing.add_node(worker)
    for worker, num_with_work in zip(session.workers, (1, 2), strict=True):
        session.sharing.add_node_collection(worker, session.collection)
        session.sharing.schedule()
        assert sum(bool(one.tests) for one in session.workers) == num_with_work
    session.end()
    assert sorted([*names, *(name for _, name in session.ran)]) == sorted(session.collection)


def names_of(sizes: list[int]) -> list[str]:
    """That many tests of each of the files, and of the tests that run alone."""
    names = [f"{path}::test_{number}" for path, size in zip(FILES, sizes, strict=False) for number in range(size)]
    alone = [
        f"{name}[{number}]" if "::" in name else f"{name}::test_{number}"
        for name in MUST_BE_ALONE
        for number in range(sizes[-1])
    ]
    return [*alone, *names]


SIZES = st.lists(st.integers(0, 5), min_size=len(FILES) + 1, max_size=len(FILES) + 1).filter(any)


@given(SIZES, st.integers(1, 4), st.integers(0, 10**6))
def test_every_test_is_run_once_and_a_file_by_one_worker(sizes: list[int], num_workers: int, seed: int) -> None:
    session = Session(names_of(sizes), Random(seed))
    session.run(num_workers)
    assert sorted(name for _, name in session.ran) == sorted(session.collection)
    by_unit: dict[str, set[int]] = {}
    for number, name in session.ran:
        by_unit.setdefault(unit_of(name), set()).add(number)
    assert all(len(numbers) == 1 for numbers in by_unit.values())


@given(SIZES, st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_a_worker_that_ends_takes_one_test_with_it(sizes: list[int], num_workers: int, crashes: int, seed: int) -> None:
    session = Session(names_of(sizes), Random(seed), crashes)
    session.run(num_workers)
    assert sorted(name for _, name in session.ran) == sorted(session.collection)


@pytest.mark.parametrize("seed", range(5))
def test_two_workers_begin_at_both_ends(seed: int) -> None:
    """One worker begins with the longest unit: if it came last, one worker would run it alone."""
    names = names_of([4, 4, 4, 4, 4, 0]) + [f"tests/distributed/test_{letter}.py::test_one" for letter in "abc"]
    Random(seed).shuffle(names)
    session = Session(names, Random(1))
    session.run(2)
    first = {number: next(name for who, name in session.ran if who == number) for number in (0, 1)}
    assert unit_of(first[0]) == NETWORKS_UNIT and first[1].startswith("tests/laws/")


@pytest.mark.parametrize("seed", range(5))
def test_long_files_come_before_the_others_of_their_folder(seed: int) -> None:
    names = [f"{path}::test_one" for path in (*LONG, *(f"tests/distributed/test_{letter}.py" for letter in "abcdef"))]
    Random(seed).shuffle(names)
    session = Session(names, Random(seed))
    session.run(1)
    assert [unit_of(name) for _, name in session.ran[: len(LONG)]] == [*LONG]


def test_what_is_named_is_there() -> None:
    """A test that was given another name would share the machine again."""
    for name in (*ALONE, *NETWORKS, *LONG):
        path, _, test = name.partition("::")
        functions = {
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert functions and (not test or test in functions), name


def test_folders_of_tests_have_a_place() -> None:
    """What has none would come last, among those that have few processes."""
    folders = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {folder for folder in folders if place_of(f"{folder}/") == place_of("nowhere")} == set()
