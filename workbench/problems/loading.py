"""How a rank gets its minibatches: read in its process, by loader processes, or from a stream.

| `Problem(train=...)` | divided among ranks | order of samples |
|---|---|---|
| tensors, a map-style data set, a `DataLoader` of one | by the sampler, equally on every runtime | a permutation, or the loader's sampler |
| an iterable data set, or a `DataLoader` of one | rank r of p takes samples r, r + p, ... | that of the stream |
| a function of (rank, number of ranks) | by the function, which returns batches | that of the function |

What a data set draws at random, such as augmentation, depends only on the seed, rank and step, with any number of
loader processes. So a resumed run reads what an unbroken one reads. (In a stream with loader processes it depends on
the seed, the rank and the loader process.)

A simulation starts no loader processes (`Source.without_processes`).

A stream has no position. A resumed rank reads it again from its beginning, and leaves out as many minibatches as were
taken. With the same number of ranks and the same batch size it continues with the sample that comes next. Otherwise,
also when ranks leave or join, some samples are used twice or not at all.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count, cycle, islice
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils import worker as loader_process

from workbench.errors import ConfigError
from workbench.rng import derive_seed

Batch = Any  # the collated items of the data set; (inputs, targets) for the usual losses
ENDLESS = 1 << 62  # number of samples of a stream


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How items are read and collated.

    Attributes:
        collate: items -> batch.
        num_workers: loader processes of each rank; 0: the rank's own process reads.
        prefetch_factor: batches that each loader process reads ahead.
        pin_memory: whether batches are in pinned host memory, for a faster copy to a GPU.
        worker_init: called in each loader process with its number.
        timeout_s: how long to wait for a loader process; 0: no limit.
        context: how loader processes are started, as in `DataLoader`.
        order: a torch sampler that gives the order of samples; None: a permutation for each seed and epoch.
        drop_last: leave out an epoch's last global batch if it is not full.
    """

    collate: Callable[[list[Any]], Batch] = default_collate
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    worker_init: Callable[[int], None] | None = None
    timeout_s: float = 0
    context: Any = None
    order: Any = None
    drop_last: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Loading:
        """The settings of a `DataLoader`, without its batch size: see `LOADER_OPTIONS`.

        Raises:
            ConfigError: it has no samples to divide among ranks.
        """
        return cls(
            collate=loader.collate_fn,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            pin_memory=loader.pin_memory,
            worker_init=loader.worker_init_fn,
            timeout_s=loader.timeout,
            context=loader.multiprocessing_context,
            order=_order_of(loader),
            drop_last=getattr(loader.batch_sampler, "drop_last", loader.drop_last),
        )

    def loader(self, data: Dataset[Any], **more: Any) -> DataLoader[Any]:
        """A `DataLoader` with these settings."""
        return DataLoader(
            data,
            collate_fn=self.collate,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self.pin_memory,
            worker_init_fn=self.worker_init,
            timeout=self.timeout_s,
            multiprocessing_context=self.context,
            **more,
        )


LOADER_OPTIONS = {  # option of a `DataLoader` -> what becomes of it
    "dataset": "read",
    "batch_size": "not used: that of the problem, or of the training, counts; None is refused",
    "shuffle": "used; the permutation is that of the training's seed",
    "sampler": "used, also of test data; it draws from the training's seed. A `DistributedSampler` is refused",
    "batch_sampler": "a `BatchSampler` is used as its sampler and drop_last; your own class is refused",
    "num_workers": "used, on each rank",
    "collate_fn": "used, for each micro-batch",
    "pin_memory": "used with loader processes",
    "drop_last": "used: an epoch's last global batch is left out unless it is full. A stream always leaves it out, and "
    "test data never",
    "timeout": "used",
    "worker_init_fn": "used",
    "multiprocessing_context": "used",
    "generator": "not used: what is drawn depends on the training's seed",
    "prefetch_factor": "used",
    "persistent_workers": "not used: loader processes always persist",
    "pin_memory_device": "not used: batches are pinned for the rank's device",
    "in_order": "not used: batches are always in order",
}


def _order_of(loader: DataLoader[Any]) -> Any:
    """The sampler of a `DataLoader` whose order must be kept; None if the order is a permutation or that of the data."""
    if loader.batch_sampler is None and loader.batch_size is None:
        raise ConfigError(
            "train=: a DataLoader with batch_size=None gives whole batches, which have no samples to divide among ranks: "
            "give a function of (rank, num_ranks) that returns each rank's loader"
        )
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            "train=: its sampler is a DistributedSampler, but the workbench divides the data among ranks itself: give "
            "the loader without a sampler, with shuffle=True"
        )
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
        raise ConfigError(
            "train=: a DataLoader with your own batch_sampler has no samples to divide among ranks: give a "
            "function of (rank, num_ranks) that returns each rank's loader"
        )
    if isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return None
    return sampler


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one rank reads.

    Attributes:
        seed, rank, num_ranks: of the run and the rank.
        batch_size: samples of the rank in a step.
        num_micro: micro-batches of a step.
        share: step -> indices of the rank's samples; not called for streams.
        num_steps: number of steps of the run.
    """

    seed: int
    rank: int
    num_ranks: int
    batch_size: int
    num_micro: int
    share: Callable[[int], Tensor]
    num_steps: int

    def seed_of(self, step: int, part: int) -> int:
        """The seed of what the data set draws for a micro-batch."""
        return derive_seed(self.seed, f"data, part {part}", self.rank, step)

    def parts(self, step: int) -> list[list[int]]:
        """The indices of each micro-batch of a step that is not empty."""
        return [part.tolist() for part in torch.tensor_split(self.share(step), self.num_micro) if len(part)]

    def sizes(self) -> list[int]:
        """The number of samples of each micro-batch of a stream."""
        base, extra = divmod(self.batch_size, self.num_micro)
        return [size for part in range(self.num_micro) if (size := base + (part < extra))]


class Reader(ABC):
    """Gives one rank its batches."""

    @abstractmethod
    def read(self, step: int) -> list[tuple[Batch, int]]:
        """Return (batch, number of samples) of each micro-batch of a step. Steps are read in order, except at a resume."""

    def close(self) -> None:
        """End the loader processes."""
        return


class Source(ABC):
    """The samples of a problem, and how they are read.

    Attributes:
        num_samples: number of samples of an epoch; `ENDLESS` for a stream.
    """

    num_samples: int
    gives_batches = False  # whether the user made the batches: each counts the same, as in torch DDP
    drops_last = False  # whether an epoch's last global batch is left out if it is not full
    num_processes = 0  # loader processes of each rank; of a function's loaders, known when there is a reader

    def without_processes(self) -> Source:
        """Return a source whose readers give the same batches, but read them in this process.

        This source itself, with its loader processes, if the loader has a `worker_init_fn`, which prepares a process,
        or if a function returns the loader.
        """
        return self

    @abstractmethod
    def reader(self, reading: Reading) -> Reader:
        """Return the reader of a rank."""

    @abstractmethod
    def some(self, number: int) -> Batch:
        """Return a batch of that many samples, to measure or count computation. Few samples are repeated."""

    def halves(self, size: int) -> tuple[Batch, Batch, Batch] | None:
        """Return a batch of `size` samples, one of other samples, and one of both; None if the user makes the batches."""
        return None

    @abstractmethod
    def batches(self, size: int, share: int = 0, num_shares: int = 1) -> Iterator[tuple[Batch, int]]:
        """Return (batch, number of samples) of every `num_shares`-th batch, from batch `share` on; together all samples.

        The batches are the same for any number of shares, except those that the user makes.
        """

    def order(self, seed: int, epoch: int) -> np.ndarray | None:
        """Return the order of an epoch's samples; None: a permutation for each seed and epoch."""
        return None


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Draw the random numbers of the block from a seed: Python's, NumPy's and torch's. Later ones are as without it."""
    with _generators_kept():
        _seed_generators(seed, seed % (1 << 32))
        yield


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the states of Python's, NumPy's and torch's generators at the end of the block."""
    states = _generator_states()
    try:
        yield
    finally:
        _set_generators(states)


def _seed_generators(seed: int, numpy_seed: Any) -> None:
    random.seed(seed)
    np.random.seed(numpy_seed)  # noqa: NPY002 - a data set may draw from it
    torch.default_generator.manual_seed(seed)


def _generator_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def _set_generators(states: tuple[Any, Any, Tensor]) -> None:
    plain, arrays, tensors = states
    random.setstate(plain)
    np.random.set_state(arrays)  # noqa: NPY002
    torch.set_rng_state(tensors)


# -- data that are read by index ---------------------------------------------------------------------------------------


@final
class IndexedSource(Source):
    """A map-style data set."""

    def __init__(self, data: Dataset[Any], loading: Loading) -> None:
        self.data, self.loading = data, loading
        self.num_samples = len(data if loading.order is None else loading.order)  # type: ignore[arg-type]
        self.num_processes = loading.num_workers
        self.drops_last = loading.drop_last
        self._once: np.ndarray | None = None  # the order in which the samples are read once, by `batches`

    def without_processes(self) -> Source:
        if self.loading.worker_init is not None:
            return self
        here = replace(self.loading, num_workers=0, prefetch_factor=None, context=None, timeout_s=0)
        return IndexedSource(self.data, here)

    def reader(self, reading: Reading) -> Reader:
        if self.loading.num_workers:
            return _ReadsAhead(self.data, self.loading, reading)
        return _ReadsHere(self.data, self.loading.collate, reading)

    def some(self, number: int) -> Batch:
        size = len(self.data)  # type: ignore[arg-type]
        return fetch(self.data, [index % size for index in range(number)], self.loading.collate)

    def halves(self, size: int) -> tuple[Batch, Batch, Batch]:
        length = len(self.data)  # type: ignore[arg-type]
        return _halves(items_of(self.data, [index % length for index in range(2 * size)]), self.loading)

    def batches(self, size: int, share: int = 0, num_shares: int = 1) -> Iterator[tuple[Batch, int]]:
        if self._once is None:
            self._once = self.order(0, 0)
        chosen = range(self.num_samples) if self._once is None else self._once.tolist()
        for begin in range(share * size, len(chosen), num_shares * size):
            part = list(chosen[begin : begin + size])
            yield fetch(self.data, part, self.loading.collate), len(part)

    def order(self, seed: int, epoch: int) -> np.ndarray | None:
        sampler = self.loading.order
        if sampler is None:
            return None
        chosen = derive_seed(seed, "data-order", step=epoch)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(chosen)
        with drawing(chosen):
            return np.fromiter((int(index) for index in sampler), dtype=np.int64)


def fetch(
    data: Dataset[Any], indices: list[int] | Tensor, collate: Callable[[list[Any]], Batch] = default_collate
) -> Batch:
    """Return the samples at `indices`, collated into one batch (tensors are indexed at once)."""
    if isinstance(data, TensorDataset) and collate is default_collate:
        index = torch.as_tensor(indices, dtype=torch.int64)  # also for an empty list
        return tuple(tensor[index] for tensor in data.tensors)
    return collate(items_of(data, [int(index) for index in indices]))


def _halves(items: list[Any], loading: Loading) -> tuple[Batch, Batch, Batch]:
    size = len(items) // 2
    return loading.collate(items[:size]), loading.collate(items[size:]), loading.collate(items)


def items_of(data: Dataset[Any], indices: list[int]) -> list[Any]:
    """Return the items at `indices`, all at once if the data set can."""
    several = getattr(data, "__getitems__", None)
    return list(several(indices)) if several else [data[index] for index in indices]


@final
class _ReadsHere(Reader):
    """Reads in this process."""

    def __init__(self, data: Dataset[Any], collate: Callable[[list[Any]], Batch], reading: Reading) -> None:
        self._data, self._collate, self._reading = data, collate, reading
        self._draws = not isinstance(data, TensorDataset)

    def read(self, step: int) -> list[tuple[Batch, int]]:
        parts = self._reading.parts(step)
        if not self._draws:
            return [(fetch(self._data, part, self._collate), len(part)) for part in parts]
        found = []
        for number, part in enumerate(parts):
            with drawing(self._reading.seed_of(step, number)):
                found.append((fetch(self._data, part, self._collate), len(part)))
        return found


@final
@dataclass(frozen=True, slots=True)
class _Asked:
    """The samples of a micro-batch, for a loader process."""

    seed: int
    indices: list[int]


@final
class _Seeded(Dataset[Any]):
    """A data set for loader processes: it draws from the seed of the micro-batch."""

    def __init__(self, data: Dataset[Any]) -> None:
        self._data = data

    def __getitem__(self, asked: _Asked) -> Any:
        raise AssertionError("all items of a micro-batch are read at once")

    def __getitems__(self, asked: list[_Asked]) -> list[Any]:
        (one,) = asked
        with drawing(one.seed):
            return items_of(self._data, one.indices)


@final
class _ReadsAhead(Reader):
    """Loader processes read the next steps."""

    def __init__(self, data: Dataset[Any], loading: Loading, reading: Reading) -> None:
        self._data, self._loading, self._reading = data, loading, reading
        self._next = -1  # the step that the loader gives next
        self._coming: Iterator[Batch] | None = None

    def read(self, step: int) -> list[tuple[Batch, int]]:
        if self._coming is None or step != self._next:
            self._begin(step)
        assert self._coming is not None
        self._next = step + 1
        return [(next(self._coming), len(part)) for part in self._reading.parts(step)]

    def _begin(self, step: int) -> None:
        self.close()
        reading = self._reading

        class Asks:
            """What the loader reads, from this step on."""

            def __iter__(self) -> Iterator[list[_Asked]]:
                for later in range(step, reading.num_steps):
                    for number, part in enumerate(reading.parts(later)):
                        yield [_Asked(reading.seed_of(later, number), part)]

        self._coming = iter(self._loading.loader(_Seeded(self._data), batch_sampler=Asks()))

    def close(self) -> None:
        self._coming = None  # its processes end with it


# -- streams -----------------------------------------------------------------------------------------------------------


@final
class StreamSource(Source):
    """An iterable data set without a length."""

    num_samples = ENDLESS

    def __init__(self, data: Iterable[Any], loading: Loading, *, reads_here: bool = False) -> None:
        self.data, self.loading = data, loading
        self._reads_here = reads_here  # what the loader processes would read
        self.num_processes = 0 if reads_here else loading.num_workers

    def without_processes(self) -> Source:
        if self.loading.worker_init is not None or not self.loading.num_workers:
            return self
        return StreamSource(self.data, self.loading, reads_here=True)

    def reader(self, reading: Reading) -> Reader:
        part = _Part(self.data, reading.rank, reading.num_ranks)
        return _ReadsStream(lambda: self._batches_of(part, reading.sizes()), reading)

    def _batches_of(self, part: _Part, sizes: Sequence[int]) -> Iterator[tuple[Batch, int]]:
        """Batches of these sizes, in turn, until the part ends; the last incomplete one is left out."""
        if len(set(sizes)) == 1 and self._reads_here:
            for batch in _as_by_processes(part, sizes[0], self.loading):
                yield batch, sizes[0]
        elif len(set(sizes)) == 1:
            for batch in self.loading.loader(part, batch_size=sizes[0], drop_last=True):
                yield batch, sizes[0]
        else:
            samples = iter(part)
            for size in cycle(sizes):
                items = list(islice(samples, size))
                if len(items) < size:
                    return
                yield self.loading.collate(items), size

    def some(self, number: int) -> Batch:
        items = list(islice(iter(self.data), number))
        if not items:
            raise ConfigError("train=: the stream is empty")
        return self.loading.collate([items[index % len(items)] for index in range(number)])

    def halves(self, size: int) -> tuple[Batch, Batch, Batch] | None:
        if self.loading.num_workers:  # their processes interleave the samples in another order
            return None
        items = list(islice(iter(self.data), 2 * size))
        return _halves([items[index % len(items)] for index in range(2 * size)], self.loading)

    def batches(self, size: int, share: int = 0, num_shares: int = 1) -> Iterator[tuple[Batch, int]]:
        samples = iter(self.data)
        for number in count():
            items = list(islice(samples, size))
            if not items:
                return
            if number % num_shares == share:
                yield self.loading.collate(items), len(items)


@final
class _Part(IterableDataset[Any]):
    """Every p-th sample of a stream, divided again among loader processes.

    Some data sets divide themselves among loader processes. Such a data set does not see that it is in one.
    """

    def __init__(self, data: Iterable[Any], rank: int, num_ranks: int) -> None:
        self._data, self._rank, self._num_ranks = data, rank, num_ranks

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        loader_process._worker_info = None  # of this process, which reads nothing else
        return self.samples() if info is None else self.samples(info.id, info.num_workers)

    def samples(self, process: int = 0, num_processes: int = 1) -> Iterator[Any]:
        """The samples of one of the loader processes."""
        first, step = self._rank * num_processes + process, self._num_ranks * num_processes
        return islice(iter(self._data), first, None, step)


def _as_by_processes(part: _Part, size: int, loading: Loading) -> Iterator[Batch]:
    """The batches of loader processes, read in this process.

    They have the same samples in the same order, and the same random numbers: the processes give one batch each in
    turn, and each has its own generators.
    """

    def batches(process: int) -> Iterator[Batch]:
        samples = part.samples(process, loading.num_workers)
        while len(items := list(islice(samples, size))) == size:
            yield loading.collate(items)

    seed = int(torch.empty((), dtype=torch.int64).random_().item())  # drawn as by a `DataLoader`
    coming = cycle([_with_generators(seed, number, batches(number)) for number in range(loading.num_workers)])
    for num_left in range(loading.num_workers, 0, -1):
        coming = cycle(islice(coming, num_left))
        yield from map(next, coming)  # until one has no more


def _with_generators(seed: int, process: int, items: Iterator[Any]) -> Iterator[Any]:
    """The same items. What they draw comes from separate generators, seeded as those of a loader process."""
    states = None
    while True:
        with _generators_kept():
            if states is None:
                _seed_generators(seed + process, loader_process._generate_state(seed, process))
            else:
                _set_generators(states)
            try:
                item = next(items)
            except StopIteration:
                return
            states = _generator_states()
        yield item


@final
class RankSource(Source):
    """A function of (rank, number of ranks) that returns an iterable of that rank's batches, such as a `DataLoader`."""

    num_samples = ENDLESS
    gives_batches = True

    def __init__(self, make: Callable[[int, int], Iterable[Batch]]) -> None:
        self._make = make

    def reader(self, reading: Reading) -> Reader:
        if reading.num_micro > 1:
            raise ConfigError(
                "train= returns whole batches, which cannot be divided into micro-batches: use smaller batches"
            )
        made = self._make(reading.rank, reading.num_ranks)
        self.num_processes = made.num_workers if isinstance(made, DataLoader) else 0
        return _ReadsStream(lambda: _checked(made, reading.batch_size), reading)

    def some(self, number: int) -> Batch:
        batch = next(iter(self._make(0, 1)), None)
        if batch is None:
            raise ConfigError("train=: the rank's batches are empty")
        index = torch.arange(number) % length_of(batch)
        return _mapped(batch, lambda tensor: tensor[index])

    def batches(self, size: int, share: int = 0, num_shares: int = 1) -> Iterator[tuple[Batch, int]]:
        for batch in self._make(share, num_shares):
            yield batch, length_of(batch)


def _checked(batches: Iterable[Batch], batch_size: int) -> Iterator[tuple[Batch, int]]:
    """Batches with their number of samples. The last one may have fewer."""
    for number, batch in enumerate(batches):
        found = length_of(batch)
        if found > batch_size or (number == 0 and found < batch_size):
            raise ConfigError(
                f"train= returns batches of {found} samples, and batch_size is {batch_size}: give batch_size={found}"
            )
        yield batch, found


@final
class _ReadsStream(Reader):
    """Reads batches one after the other. At the stream's end it begins again."""

    def __init__(self, begin: Callable[[], Iterator[tuple[Batch, int]]], reading: Reading) -> None:
        self._begin, self._reading = begin, reading
        self._next = 0
        self._coming: Iterator[tuple[Batch, int]] | None = None

    def read(self, step: int) -> list[tuple[Batch, int]]:
        if self._coming is None or step < self._next:
            self._coming, self._next = self._endless(), 0
        while self._next < step:  # a resumed run: what was used is read again
            self._take(self._next)
        return self._take(step)

    def _take(self, step: int) -> list[tuple[Batch, int]]:
        assert self._coming is not None
        self._next = step + 1
        with drawing(self._reading.seed_of(step, 0)):
            return list(islice(self._coming, len(self._reading.sizes())))  # fewer than num_micro of a small batch

    def _endless(self) -> Iterator[tuple[Batch, int]]:
        while True:
            begun = self._begin()
            first = next(begun, None)
            if first is None:
                raise ConfigError(
                    f"train=: rank {self._reading.rank} of {self._reading.num_ranks} gets no whole minibatch of "
                    f"{self._reading.batch_size} samples from the stream: use a longer stream, or a smaller batch_size"
                )
            yield from chain([first], begun)

    def close(self) -> None:
        self._coming = None


def length_of(batch: Batch) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor.

    Raises:
        ConfigError: it has no tensor.
    """
    if isinstance(batch, Tensor) and batch.ndim:
        return len(batch)
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        for item in batch:
            try:
                return length_of(item)
            except ConfigError:
                continue
    raise ConfigError(f"train=: a batch has no tensor, so its number of samples is unknown: {type(batch).__name__}")


def describe_batch(batch: Batch) -> str:
    """Return the types and shapes in a batch.

    >>> describe_batch((torch.zeros(4, 6), {"y": torch.zeros(4, dtype=torch.int64)}))
    '(float32 of shape (4, 6), {y: int64 of shape (4,)})'
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} of shape {tuple(batch.shape)}"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key}: {describe_batch(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(describe_batch, batch)) + ")"
    return type(batch).__name__


def _mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Change all tensors of a batch (tuples, lists and dicts of them)."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: _mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [_mapped(item, change) for item in batch]
        # a named tuple takes separate arguments
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device. Tensors already there are not copied."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


# -- what a user gives -------------------------------------------------------------------------------------------------


def source_of(data: Any, what: str) -> Source:
    """Return the source of what a user gives as `train=` or `test=`; see `Problem`.

    Raises:
        ConfigError: it is none of these, or it is empty.
    """
    if callable(data) and not isinstance(data, Dataset | DataLoader):
        if not inspect.isclass(data) and _takes_two(data):
            return RankSource(data)
        data = data()
    loading = Loading()
    if isinstance(data, DataLoader):
        data, loading = data.dataset, Loading.of(data)
    if isinstance(data, Tensor):
        data = (data,)
    if data_is_columns(data):
        tensors = [torch.as_tensor(item) for item in data]
        if len({item.shape[:1] for item in tensors}) > 1 or any(item.ndim == 0 for item in tensors):
            raise ConfigError(f"{what}=: the tensors differ in length: {[tuple(item.shape) for item in tensors]}")
        data = TensorDataset(*tensors)
    # An IterableDataset inherits a __getitem__ that only raises.
    if not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if len(data) == 0:
            raise ConfigError(f"{what}=: the data set is empty")
        return IndexedSource(cast(Dataset[Any], data), loading)
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        raise ConfigError(
            f"{what}=: a {type(data).__name__} is no data set: give tensors, a map-style or iterable data set, a "
            "DataLoader, or a function of (rank, num_ranks) that returns a rank's batches"
        )
    return StreamSource(data, loading)


def _takes_two(make: Callable[..., Any]) -> bool:
    """Return True if a function needs two arguments."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in plain and one.default is inspect.Parameter.empty for one in parameters) == 2


def data_is_columns(data: Any) -> bool:
    """Return whether `data` is a tuple, or a list of tensors or arrays. Any other list is a list of samples."""
    if isinstance(data, tuple):
        return len(data) > 0
    return isinstance(data, list) and len(data) > 0 and all(isinstance(item, Tensor | np.ndarray) for item in data)
