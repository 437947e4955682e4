"""Minibatches from data sets, loaders, streams and functions: who gets which sample, in which order."""

from __future__ import annotations

import inspect
import multiprocessing.process
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data import Sampler as TorchSampler

import workbench as wb
from workbench.errors import ConfigError
from workbench.problems import loading
from workbench.problems.base import Sampler
from workbench.problems.loading import ENDLESS, Reading, length_of, source_of

NUMBERS = torch.arange(20)
few_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # than loader processes


@pytest.fixture(autouse=True)
def loader_processes_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes the readers of streams, which refer to themselves: garbage collection waits five seconds for each of their processes."""
    made: list[loading._ReadsStream] = []
    begin = loading._ReadsStream.__init__

    def noted(reader: loading._ReadsStream, *given: Any) -> None:
        begin(reader, *given)
        made.append(reader)

    monkeypatch.setattr(loading._ReadsStream, "__init__", noted)
    yield
    for reader in made:
        reader.close()


def noise() -> float:
    return random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002


@final
class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Items with noise from all three generators, as augmentation has it."""

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index, noise()]), NUMBERS[index]


@final
class Stream(IterableDataset[Tensor]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number]) for number in range(self.length))


@final
class NoisyStream(IterableDataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number, noise()]) for number in range(self.length))


@final
class DividesItself(IterableDataset[Tensor]):
    """As torch's documentation recommends for loader processes."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor([number]) for number in range(first, 24, step))


def reading(
    data: Any,
    rank: int = 0,
    num_ranks: int = 2,
    batch_size: int = 3,
    num_micro: int = 1,
    seed: int = 0,
    here: bool = False,
) -> Any:
    source = source_of(data, "train")
    source = source.without_processes() if here else source
    sampler = Sampler(source.num_samples, batch_size, num_ranks, seed, source=source)
    return source.reader(
        Reading(
            seed=seed,
            rank=rank,
            num_ranks=num_ranks,
            batch_size=batch_size,
            num_micro=num_micro,
            share=lambda step: sampler.share(step, rank),
            num_steps=8,
        )
    )


def numbers(batches: list[tuple[Any, int]]) -> list[int]:
    """The samples of a step, by their numbers."""
    found: list[int] = []
    for batch, number in batches:
        while isinstance(batch, tuple | list):
            batch = batch[-1]
        assert len(batch) == number
        found += [int(item) for item in batch.reshape(number, -1)[:, 0]]
    return found


@few_cores
@pytest.mark.parametrize("num_micro", [1, 2])
def test_loader_processes_read_what_the_rank_itself_reads(num_micro: int) -> None:
    """Also the noise is the same, because it depends on the step only."""
    here = reading(Noisy(), num_micro=num_micro)
    ahead = reading(DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2), num_micro=num_micro)
    for step in (0, 1, 2, 3, 6, 7, 2):  # a resumed run begins in the middle
        mine, theirs = here.read(step), ahead.read(step)
        assert len(mine) == len(theirs) == (num_micro if step == 0 else len(mine))
        for (batch, number), (other, count) in zip(mine, theirs, strict=True):
            assert number == count
            assert all(torch.equal(one, two) for one, two in zip(batch, other, strict=True))
    ahead.close()


def test_what_a_data_set_draws_leaves_the_generators_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    reading(Noisy()).read(0)
    assert torch.equal(torch.rand(2), expected)


def test_a_shuffling_loader_has_the_samplers_order() -> None:
    plain, loader = reading(TensorDataset(NUMBERS)), reading(DataLoader(TensorDataset(NUMBERS), shuffle=True))
    assert [numbers(plain.read(step)) for step in range(8)] == [numbers(loader.read(step)) for step in range(8)]


def test_a_loader_that_does_not_shuffle_keeps_its_order() -> None:
    loader = DataLoader(TensorDataset(NUMBERS), batch_size=5)
    assert isinstance(loader.sampler, SequentialSampler)
    ranks = [reading(loader, rank) for rank in range(2)]
    assert [numbers(rank.read(0)) for rank in ranks] == [[0, 1, 2], [3, 4, 5]]
    assert [numbers(rank.read(1)) for rank in ranks] == [[6, 7, 8], [9, 10, 11]]


def test_a_sampler_of_ones_own_gives_all_ranks_one_order() -> None:
    weights = WeightedRandomSampler([0.0] * 10 + [1.0] * 10, num_samples=12)
    loader = DataLoader(TensorDataset(NUMBERS), sampler=weights)
    first, second = reading(loader, 0), reading(loader, 1)
    steps = [numbers(rank.read(step)) for step in range(4) for rank in (first, second)]
    assert all(number >= 10 for step in steps for number in step)
    again = reading(loader, 0)
    assert [numbers(again.read(step)) for step in range(4)] == steps[::2], "the order is that of seed and epoch"
    assert steps[:4] != steps[4:], "another epoch has another order"
    assert numbers(reading(loader, 0, seed=1).read(0)) != steps[0]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(TensorDataset(NUMBERS), sampler=DistributedSampler(TensorDataset(NUMBERS), 2, 0)),
            "the workbench divides the data among ranks itself",
        ),
        (
            DataLoader(TensorDataset(NUMBERS), batch_sampler=type("Mine", (BatchSampler,), {})(range(20), 4, False)),
            r"give a function of \(rank, num_ranks\)",
        ),
    ],
)
def test_a_loader_that_divides_the_data_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source_of(loader, "train")


def test_a_collate_function_is_kept() -> None:
    loader = DataLoader(TensorDataset(NUMBERS), collate_fn=lambda items: -default_collate(items)[0])
    assert numbers(reading(loader).read(0)) == [0, -1, -2]
    assert source_of(loader, "train").some(2).tolist() == [0, -1]


@few_cores
@pytest.mark.parametrize("data", [Stream(24), DividesItself()], ids=lambda data: type(data).__name__)
@pytest.mark.parametrize("processes", [0, 2])
def test_ranks_divide_a_stream(processes: int, data: IterableDataset[Tensor]) -> None:
    stream = DataLoader(data, num_workers=processes) if processes else data
    ranks = [reading(stream, rank, batch_size=3) for rank in range(2)]
    steps = [[numbers(rank.read(step)) for rank in ranks] for step in range(4)]
    assert sorted(number for step in steps for share in step for number in share) == list(range(24))
    if not processes:
        assert steps[0] == [[0, 2, 4], [1, 3, 5]]
    assert [numbers(rank.read(4)) for rank in ranks] == steps[0], "it begins again"


def test_a_resumed_rank_goes_on_in_the_stream() -> None:
    unbroken, resumed = reading(Stream()), reading(Stream())
    expected = [numbers(unbroken.read(step)) for step in range(6)]
    assert [numbers(resumed.read(step)) for step in (4, 5)] == expected[4:]


def test_micro_batches_of_a_stream_add_up() -> None:
    found = reading(Stream(), num_micro=2).read(0)
    assert [number for _, number in found] == [2, 1] and numbers(found) == [0, 2, 4]


def test_a_stream_without_a_whole_minibatch_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 1 of 2 gets no whole minibatch of 3 samples"):
        reading(Stream(5), rank=1).read(0)


def test_a_stream_gives_no_more_samples_than_the_batch_has() -> None:
    """Two samples in four micro-batches are two micro-batches of one."""
    rank = reading(Stream(36), num_ranks=1, batch_size=2, num_micro=4)
    assert [numbers(rank.read(step)) for step in range(18)] == [[2 * step, 2 * step + 1] for step in range(18)]


# -- the options of a DataLoader ---------------------------------------------------------------------------------------


def test_each_option_of_a_loader_is_in_the_list() -> None:
    options = [name for name in inspect.signature(DataLoader.__init__).parameters if name != "self"]
    assert set(options) <= set(loading.LOADER_OPTIONS)


def test_the_list_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "your-data.md").read_text()
    for name, words in loading.LOADER_OPTIONS.items():
        assert f"| `{name}` | {words} |" in page


@final
class Backwards(TorchSampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(19, -1, -2))

    def __len__(self) -> int:
        return 10


def doubled(items: list[Any]) -> list[Tensor]:
    return [2 * torch.stack([item[0] for item in items])]


DATA = TensorDataset(NUMBERS)
LOADERS: dict[str, Any] = {
    "shuffle=False": lambda: DataLoader(DATA, batch_size=6),
    "drop_last": lambda: DataLoader(DATA, batch_size=6, drop_last=True),
    "sampler": lambda: DataLoader(DATA, batch_size=6, sampler=Backwards()),
    "sampler, drop_last": lambda: DataLoader(DATA, batch_size=6, sampler=Backwards(), drop_last=True),
    "batch_sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Backwards(), 6, drop_last=False)),
    "batch_sampler, drop_last": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Backwards(), 6, drop_last=True)),
    "collate_fn": lambda: DataLoader(DATA, batch_size=6, collate_fn=doubled),
    "num_workers": lambda: DataLoader(DATA, batch_size=6, drop_last=True, num_workers=1, timeout=60),
    "a generator": lambda: DataLoader(DATA, batch_size=6, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("options", LOADERS)
def test_one_rank_reads_what_a_plain_loop_reads(options: str) -> None:
    """Two epochs, batch by batch."""
    loader = LOADERS[options]()
    expected = [[int(value) for value in batch[0]] for _ in range(2) for batch in loader]
    rank = reading(loader, num_ranks=1, batch_size=6)
    found = [[int(value) for batch, _ in rank.read(step) for value in batch[0]] for step in range(len(expected))]
    rank.close()
    assert found == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_with_drop_last_all_batches_are_full(num_ranks: int) -> None:
    source = source_of(DataLoader(DATA, drop_last=True), "train")
    sampler = Sampler(source.num_samples, 3, num_ranks, 0, source=source)
    assert sampler.steps_of(2) == 2 * (20 // (3 * num_ranks))
    for step in range(sampler.steps_of(2)):
        sizes = [len(sampler.share(step, rank)) for rank in range(num_ranks)]
        assert sizes == [sampler.share_size(step, rank) for rank in range(num_ranks)] == [3] * num_ranks
        assert sampler.total_weight(step) == 1
    assert sampler.ends_epoch(sampler.steps_per_epoch - 1)


def test_batch_norm_then_sees_no_batch_of_one() -> None:
    """21 samples in batches of 4."""
    data = TensorDataset(torch.randn(21, 3), torch.zeros(21, dtype=torch.int64))
    parts: dict[str, Any] = {
        "model": lambda: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)),
        "loss": torch.nn.functional.cross_entropy,
    }
    good = wb.Problem(train=DataLoader(data, shuffle=True, drop_last=True), **parts)
    for algorithm in (wb.SynchronousSGD(), wb.DPSGD()):
        run = wb.simulate(algorithm, good, workers=1, epochs=2, batch_size=4)
        assert [row["num_samples"] for row in run.metrics[0]] == [4] * 10
    with pytest.raises((ConfigError, ValueError), match="more than 1 value per channel"):
        wb.simulate(wb.SynchronousSGD(), wb.Problem(train=data, **parts), workers=1, epochs=2, batch_size=4)
    with pytest.raises(ConfigError, match="drop_last=True leaves nothing of 21 samples"):
        wb.simulate(wb.SynchronousSGD(), good, workers=2, epochs=2, batch_size=16)


def test_a_sampler_of_test_data_chooses_them() -> None:
    """One data set, divided by two samplers, as torch's examples do it."""
    held_out = SubsetRandomSampler([1, 5, 7, 11])
    source = source_of(DataLoader(DATA, sampler=held_out), "test")
    for num_shares in (1, 2, 3):
        batches = [batch for share in range(num_shares) for batch, _ in source.batches(2, share, num_shares)]
        assert sorted(int(value) for batch in batches for value in batch[0]) == [1, 5, 7, 11]


@pytest.mark.parametrize("data", [DATA, Stream()], ids=["map-style", "stream"])
def test_a_loader_of_whole_batches_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_size=None gives whole batches.*function of \(rank, num_ranks\)"):
        source_of(DataLoader(data, batch_size=None), "train")


# -- a function of the rank --------------------------------------------------------------------------------------------


def test_a_function_of_the_rank_gives_its_batches() -> None:
    def batches(rank: int, num_ranks: int) -> list[Tensor]:
        return [torch.full((4, 1), 10 * rank + number) for number in range(num_ranks)]

    rank = reading(batches, rank=1, batch_size=4)
    assert [numbers(rank.read(step)) for step in range(3)] == [[10] * 4, [11] * 4, [10] * 4]
    with pytest.raises(ConfigError, match="cannot be divided into micro-batches"):
        reading(batches, num_micro=2)
    with pytest.raises(ConfigError, match="batches of 4 samples, and batch_size is 3: give batch_size=4"):
        reading(batches).read(0)


def test_epochs_of_a_stream_are_refused() -> None:
    task = wb.Problem(model=lambda: torch.nn.Linear(1, 1), loss=loss, train=Stream(), whole_batch=True, correct=None)
    assert task.train_source().num_samples == ENDLESS
    with pytest.raises(ConfigError, match="give steps= instead of epochs="):
        wb.simulate(wb.SynchronousSGD(), task, workers=2, epochs=1)
    with pytest.raises(ConfigError, match="whose length is unknown"):
        task.num_samples()


def loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return (model(batch.float()) ** 2).mean()


def test_a_stream_trains_as_its_samples_do_in_its_order() -> None:
    """Sequential data, dealt out one by one, against a data set whose order is that of the ranks' minibatches."""
    how: dict[str, Any] = {"workers": 2, "steps": 3, "batch_size": 3, "lr": 1e-3, "evaluate_every": 0}
    dealt = torch.arange(18).reshape(3, 3, 2).transpose(1, 2).reshape(18, 1)
    parts: dict[str, Any] = {"model": lambda: torch.nn.Linear(1, 1), "whole_batch": True, "correct": None}
    stream = wb.Problem(loss=loss, train=Stream(18), **parts)
    rows = wb.Problem(loss=lambda model, batch: loss(model, batch[0]), train=DataLoader(TensorDataset(dealt)), **parts)
    own = wb.Problem(loss=loss, train=lambda rank, _: list(dealt.reshape(3, 2, 3, 1)[:, rank]), **parts)
    found = [wb.simulate(wb.SynchronousSGD(), task, **how).curve("steps", "loss")[1] for task in (stream, rows, own)]
    assert found[1].tolist() == pytest.approx(found[0].tolist(), rel=1e-6)
    assert found[2].tolist() == pytest.approx(found[0].tolist(), rel=1e-6), "also the ranks' own batches"


def test_the_length_of_a_batch() -> None:
    assert length_of({"text": ["a", "b"], "ids": torch.zeros(3, 2)}) == 3
    with pytest.raises(ConfigError, match="has no tensor"):
        length_of({"text": "a"})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"train": (torch.randn(8, 5), torch.zeros(8, dtype=torch.int64))},
            r"cannot take the batch \(float32 of shape \(\d, 5\), int64 of shape \(\d,\)\): RuntimeError: mat1",
        ),
        ({"train": [{"x": torch.zeros(3), "y": 1}] * 8}, r"\{x: float32 of shape .*give whole_batch=True"),
        ({"train": DataLoader([], shuffle=False)}, "train=: the data set is empty"),
        ({"train": Stream(0)}, "the stream is empty|gets no whole minibatch"),
        ({"test": Stream(0)}, "test=: it has no samples"),
    ],
    ids=["another shape", "no pairs", "an empty loader", "an empty stream", "an empty test stream"],
)
def test_what_the_model_cannot_take_is_said(parts: dict[str, Any], words: str) -> None:
    good = (torch.randn(8, 3), torch.zeros(8, dtype=torch.int64))
    task = wb.Problem(
        model=lambda: torch.nn.Linear(3, 2),
        loss=torch.nn.functional.cross_entropy,
        **{"train": good, "test": None, **parts},
    )
    with pytest.raises(ConfigError, match=words):
        wb.simulate(wb.SynchronousSGD(), task, workers=2, steps=2, batch_size=2)
    with pytest.raises(ConfigError, match=words):
        wb.simulate(
            wb.SynchronousSGD(),
            task,
            workers=2,
            steps=2,
            batch_size=2,
            compute=wb.costs.Compute(forward_s=1.0, backward_s=1.0),
        )


# -- simulations, which start no loader processes -----------------------------------------------------------------------

COMPUTE = wb.costs.Compute(forward_s=1.0, backward_s=1.0)
simulate = partial(wb.simulate, wb.SynchronousSGD(), workers=4, steps=4, batch_size=2, lr=1e-3, compute=COMPUTE)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: Any) -> None:
        pytest.fail(f"started {process}")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


def noisy_problem(**more: Any) -> Any:
    return wb.Problem(
        model=lambda: torch.nn.Linear(2, 1),
        loss=lambda model, batch: (model((batch[0] if isinstance(batch, list) else batch).float()) ** 2).mean(),
        whole_batch=True,
        correct=None,
        **more,
    )


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("how", [{}, {"detail": "messages"}], ids=["one program", "messages"])
def test_a_simulation_starts_no_loader_processes(how: dict[str, Any]) -> None:
    loader = DataLoader(Noisy(), shuffle=True, num_workers=2, prefetch_factor=4, persistent_workers=True)
    found, expected = (
        simulate(noisy_problem(train=train), **how) for train in (loader, DataLoader(Noisy(), shuffle=True))
    )
    assert found.curve("steps", "loss")[1].tolist() == expected.curve("steps", "loss")[1].tolist()
    assert not any("loader processes" in note for note in found.info["notes"])


@few_cores
@pytest.mark.parametrize("length", [24, 29], ids=["equal parts", "unequal parts"])
def test_what_loader_processes_read_of_a_stream_is_read_here(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same samples, order and noise, also when one loader process has more batches, and when the stream begins again."""
    loader = DataLoader(NoisyStream(length), num_workers=2)
    ahead = reading(loader, num_ranks=2, batch_size=2)
    expected = [ahead.read(step) for step in range(16)]
    ahead.close()
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda process: pytest.fail("started"))
    torch.manual_seed(3)
    after = torch.rand(2)
    torch.manual_seed(3)
    found = reading(loader, num_ranks=2, batch_size=2, here=True)
    for step in range(16):
        ((batch, _),), ((other, _),) = found.read(step), expected[step]
        assert torch.equal(batch, other), step
    assert torch.equal(torch.rand(2), after), "the generators are as they were"


@pytest.mark.usefixtures("no_processes")
def test_a_simulation_reads_every_sample_of_a_stream_that_divides_itself() -> None:
    ranks = [reading(DataLoader(DividesItself(), num_workers=2), rank, here=True) for rank in range(2)]
    found = [number for step in range(4) for rank in ranks for number in numbers(rank.read(step))]
    assert sorted(found) == list(range(24))


@few_cores
@pytest.mark.parametrize("kind", ["worker_init_fn", "function of the rank"])
def test_loader_processes_that_a_simulation_needs_are_noted(kind: str) -> None:
    """`worker_init_fn` may open files, and only the user knows what a function's loader does."""
    loader = DataLoader(Stream(64), batch_size=2, num_workers=2, worker_init_fn=prepare)
    train: Any = loader if kind == "worker_init_fn" else lambda rank, num_ranks: loader
    problem = wb.Problem(model=lambda: torch.nn.Linear(1, 1), loss=loss, train=train, whole_batch=True, correct=None)
    run = simulate(problem, workers=1)
    (note,) = (note for note in run.info["notes"] if "loader processes" in note)
    assert "each simulated worker: 2," in note
    timed = simulate(problem, workers=1, timing_only=True)
    assert not any("loader processes" in note for note in timed.info["notes"])


def prepare(process: int) -> None:
    """Prepare a loader process."""
