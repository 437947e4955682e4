"""A problem: a model, a loss and data; and the sampler that gives each rank its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from workbench.errors import ConfigError, WorkbenchError
from workbench.problems import tuned_rates
from workbench.problems.loading import ENDLESS, Batch, IndexedSource, Source, describe_batch, source_of
from workbench.problems.metrics import Metric, named_metrics
from workbench.program import Algorithm
from workbench.rng import generator
from workbench.settings import OptimizerFactory


def supervised(loss: Callable[[Tensor, Tensor], Tensor], model: nn.Module, batch: Batch) -> Tensor:
    """Return `loss(model(inputs), targets)` of a batch (inputs, targets)."""
    inputs, targets = batch
    return loss(model(inputs), targets)


IGNORED = -100  # the target that torch's cross_entropy leaves out
WITH_IGNORED = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)


def accuracy(
    model: nn.Module, batch: Batch, ignored: int = IGNORED, *, names_classes: bool = True
) -> tuple[Tensor, int]:
    """Return (correct predictions, predictions): argmax over the classes, compared with the targets.

    The classes are dimension 1 of the output, as in `cross_entropy`, or the last one: (N, T, V) for targets (N, T).
    Negative targets and those that are `ignored` are left out.

    Args:
        names_classes: the loss takes the classes in dimension 1, so it is that one if both fit.

    Raises:
        ConfigError: the targets are not class numbers (regression, for example), or both dimensions fit.
    """
    inputs, targets = batch
    output = model(inputs)
    tensors = isinstance(output, Tensor) and isinstance(targets, Tensor)
    dim = class_dim(output, targets) if tensors and not targets.is_floating_point() else None
    if dim is None:
        raise ConfigError(
            f"accuracy compares class numbers, but the output is {describe_batch(output)} and the targets are "
            f"{describe_batch(targets)}: give the Problem correct=None, or your own function"
        )
    if not names_classes and output.dim() > 2 and output.shape[1] == output.shape[-1]:
        raise ConfigError(
            f"accuracy: the classes of an output {describe_batch(output)} may be dimension 1 or the last one: give the "
            "Problem correct=None, or your own function"
        )
    judged = (targets >= 0) & (targets != ignored)
    return ((output.argmax(dim) == targets) & judged).sum(), int(judged.sum())


def class_dim(output: Tensor, targets: Tensor) -> int | None:
    """Return the dimension of the classes, 1 or the last one; None if neither fits the targets."""
    if output.dim() < 2 or output.dim() != targets.dim() + 1:
        return None
    for dim in (1, output.dim() - 1):
        if output.shape[:dim] + output.shape[dim + 1 :] == targets.shape:
            return dim
    return None


INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def _function_of(loss: Any) -> Any:
    """Return the function or class that a loss is made of: of a partial, or of a module."""
    while isinstance(loss, partial):
        loss = loss.func
    return type(loss) if isinstance(loss, nn.Module) else loss


def _setting_of(loss: Any, name: str, default: Any) -> Any:
    """Return a setting of a loss: a keyword of a partial, or an attribute of a module."""
    while isinstance(loss, partial):
        if name in loss.keywords:
            return loss.keywords[name]
        loss = loss.func
    return getattr(loss, name, default) if isinstance(loss, nn.Module) else default


@final
@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, a loss and data: your own, or one from `workbench.problems`.

    Attributes:
        model: function that makes the module. Called on every rank after the seed is set. Then rank 0's weights are
            sent to all ranks.
        loss: `loss(output, target)` -> mean over the batch, for data of (input, target) pairs; or, with
            `whole_batch=True`, `loss(model, batch)` -> mean over the batch.
        train, test: the data, as people have them (`test` may be None):
            a tuple of tensors or arrays with equal first dimension;
            a map-style data set (a list of samples is one), also one of Hugging Face `datasets`;
            an iterable data set: rank r of p takes every p-th sample from the r-th on;
            a `DataLoader` of these, whose collate_fn, loader processes, pinned memory and sampler are kept;
            a function that returns one of these: then every rank loads its own data, and no data are sent;
            a function of (rank, num_ranks) that returns an iterable of that rank's batches.
            How they are divided among ranks: `workbench.problems.loading`.
        name: name in records and tables.
        whole_batch: see `loss`.
        correct: `correct(model, batch)` -> (number correct, number of predictions), for accuracy; None for no accuracy.
            The default takes classes in dimension 1 or the last one, and leaves out negative targets.
        loss_weight: `loss_weight(batch)` -> what the mean loss of the batch divides by, such as its number of words. The
            test loss is the mean by these weights. None: the number of targets that are not `ignore_index` (-100, or
            that of a `cross_entropy`, with its class weights); the number of samples for other targets, and with
            `whole_batch=True`.
        metrics: name -> metric on the test data: a function of (outputs, targets), a torchmetrics object, or a
            `problems.Metric`, which says whether higher or lower is better.
        batch_size: default samples of a worker in a step.
        optimizer: default function from parameters to optimizer.
        note: one line shown with every result (for example, that data are synthetic).

    Example:
        >>> import torch
        >>> x = torch.randn(64, 3); y = (x.sum(1) > 0).long()
        >>> mine = Problem(model=lambda: torch.nn.Linear(3, 2), loss=torch.nn.functional.cross_entropy, train=(x, y))
        >>> mine.num_samples()
        64
    """

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    train: Any
    test: Any = None
    name: str = "user"
    whole_batch: bool = False
    correct: Callable[[nn.Module, Batch], tuple[Tensor, int]] | None = accuracy
    loss_weight: Callable[[Batch], Any] | None = field(default=None, repr=False)
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)
    batch_size: int = 32
    optimizer: Callable[..., torch.optim.Optimizer] = field(default=partial(torch.optim.SGD, lr=0.1), repr=False)
    note: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise ConfigError(
                "model= takes a function that returns the module (a class, `lambda: Net()`): every rank makes its own"
            )
        named_metrics(self.metrics)

    def named_metrics(self) -> dict[str, Metric]:
        """Return the problem's own metrics by name."""
        return named_metrics(self.metrics)

    def batch_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch: a scalar with a graph."""
        return self.loss(model, batch) if self.whole_batch else supervised(self.loss, model, batch)

    @property
    def ignored_target(self) -> int:
        """The target that the loss leaves out."""
        return int(_setting_of(self.loss, "ignore_index", IGNORED))

    def weight_of(self, batch: Batch, num_samples: int) -> float:
        """Return what the mean loss of a batch divides by: see `loss_weight`."""
        if self.loss_weight is not None:
            return float(self.loss_weight(batch))
        targets = None if self.whole_batch else batch[1]
        kind = _function_of(self.loss)
        of_torch = getattr(kind, "__module__", "").startswith("torch.nn.") and kind not in WITH_IGNORED
        if not isinstance(targets, Tensor) or targets.dtype not in INTEGERS or of_torch:
            return num_samples
        counted = targets[targets != self.ignored_target]
        weights = _setting_of(self.loss, "weight", None) if kind in WITH_IGNORED else None
        return float(counted.numel() if weights is None else weights.to(counted.device)[counted].sum())

    def count_correct(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return (number correct, number of predictions) of a batch, by `correct`."""
        assert self.correct is not None
        if self.correct is accuracy:
            return accuracy(model, batch, self.ignored_target, names_classes=_function_of(self.loss) in WITH_IGNORED)
        return self.correct(model, batch)

    def first_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return `batch_loss` of the first batch of a training.

        Raises:
            ConfigError: the model or the loss cannot take the batch; the message has its shapes.
        """
        try:
            return self.batch_loss(model, batch)
        except (WorkbenchError, torch.OutOfMemoryError):
            raise
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            unpacked = not self.whole_batch and isinstance(error, TypeError | ValueError)
            hint = ". If its batches are no pairs of inputs and targets, give whole_batch=True" if unpacked else ""
            raise ConfigError(
                f"problem {self.name}: model and loss cannot take the batch {describe_batch(batch)}: "
                f"{type(error).__name__}: {error}{hint}"
            ) from error

    @contextmanager
    def naming(self, batch: Batch) -> Iterator[None]:
        """Name the test batch in an error of the block, which judges it."""
        try:
            yield
        except (WorkbenchError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"problem {self.name}: its test batch {describe_batch(batch)} cannot be judged: "
                f"{type(error).__name__}: {error}. Change correct= or metrics=, or leave them out (correct=None)"
            ) from error

    def train_source(self) -> Source:
        """Return the training samples, and how they are read."""
        return source_of(self.train, "train")

    def test_source(self) -> Source | None:
        """Return the test samples, and how they are read; None without test data."""
        return None if self.test is None else source_of(self.test, "test")

    def train_data(self) -> Dataset[Any]:
        """Return the training set.

        Raises:
            ConfigError: the data are a stream.
        """
        return self._data_of(self.train_source())

    def test_data(self) -> Dataset[Any] | None:
        """Return the test set, or None.

        Raises:
            ConfigError: the data are a stream.
        """
        source = self.test_source()
        return None if source is None else self._data_of(source)

    def _data_of(self, source: Source) -> Dataset[Any]:
        if not isinstance(source, IndexedSource):
            raise ConfigError(f"problem {self.name}: its data are a stream, which has no samples by number")
        return source.data

    def num_samples(self) -> int:
        """Return the size of the training set: the number of samples of an epoch.

        Raises:
            ConfigError: the data are a stream.
        """
        num_samples = self.train_source().num_samples
        if num_samples == ENDLESS:
            raise ConfigError(f"problem {self.name}: its training data are a stream, whose length is unknown")
        return num_samples

    def num_parameters(self) -> int:
        """Return the number of trained values of the model.

        >>> from workbench.problems import digits_softmax
        >>> digits_softmax().num_parameters()
        650
        """
        with torch.random.fork_rng(devices=[]):
            return sum(parameter.numel() for parameter in self.model().parameters())

    def tuned_lr(
        self,
        algorithm: Algorithm,
        *,
        workers: int,
        batch_size: int | None = None,
        optimizer: OptimizerFactory | None = None,
    ) -> float:
        """Return the learning rate that was the best of a grid, from `records/tuned-rates.json`.

        It is the best for the epochs in that record at a constant rate. Other lengths and schedules can need another
        rate.

        Args:
            algorithm: the algorithm, with exactly the settings of a row; only a lossless collective may differ.
            workers: number of workers.
            batch_size: samples of a worker in a step; None: the problem's.
            optimizer: as in `Settings`; None: the problem's. Only its learning rate may differ from the record.

        Raises:
            ConfigError: no rate was tuned for these arguments; the message lists the tuned rates.

        Example:
            >>> from workbench import PipeSGD
            >>> from workbench.problems import mnist1d_cnn
            >>> mnist1d_cnn().tuned_lr(PipeSGD(width=2), workers=4)
            0.025
        """
        rate = tuned_rates.find_rate(self.name, algorithm, workers, batch_size or self.batch_size)
        sizes = {"parameters": self.num_parameters(), "samples": self.num_samples()}
        tuned_rates.check_kind(self.name, optimizer or self.optimizer, sizes)
        return rate.lr


@final
@dataclass(frozen=True, slots=True)
class Sampler:
    """The samples of each rank at each step: a pure function of (seed, step, rank).

    Every epoch is a fresh permutation, cut into global batches of `batch_size * num_workers`. A global batch is cut
    into contiguous, nearly equal shares in order of rank. So one process with the whole batch takes the same samples
    at the same steps. The last batch of an epoch may be shorter. If it has fewer samples than ranks, the last ranks get
    none. Their gradient has weight 0, and they still take part in all communication. If the source drops it, the epoch
    ends before it, and its samples count as passed (`samples_before`).
    """

    num_samples: int
    batch_size: int  # of a worker
    num_workers: int
    seed: int
    # (step, samples taken before it): from this step on, the present batch size and number of workers hold
    origin: tuple[int, int] = (0, 0)
    source: Source | None = field(default=None, compare=False, repr=False)  # of an order of its own

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.num_workers

    @property
    def steps_per_epoch(self) -> int:
        return self._num_batches(self.num_samples)

    @property
    def drops_last(self) -> bool:
        """Return True if an epoch's last global batch is left out unless it is full."""
        return self.source is not None and self.source.drops_last

    def _num_batches(self, num_samples: int) -> int:
        """Return the number of global batches of that many samples."""
        return num_samples // self.global_batch if self.drops_last else -(-num_samples // self.global_batch)

    def size(self, step: int) -> int:
        """Return the number of samples of all ranks at `step`."""
        return min(self.global_batch, self.num_samples - self._place(step)[1])

    def share(self, step: int, rank: int) -> Tensor:
        """Return the indices of the samples of `rank` at `step`: 1-D, possibly empty."""
        epoch, begin = self._place(step)
        batch = epoch_order(self.seed, epoch, self.num_samples, self.source)[begin : begin + self.global_batch]
        base, extra = divmod(len(batch), self.num_workers)
        start = rank * base + min(rank, extra)
        return torch.from_numpy(batch[start : start + base + (rank < extra)].copy())

    def share_size(self, step: int, rank: int) -> int:
        """Return the number of samples of `rank` at `step`."""
        base, extra = divmod(self.size(step), self.num_workers)
        return base + (rank < extra)

    def shares(self, step: int) -> NDArray[np.float64]:
        """Return each worker's number of samples at this step, divided by a full minibatch, shape (num_workers,)."""
        base, extra = divmod(self.size(step), self.num_workers)
        found = np.full(self.num_workers, base / self.batch_size)
        found[:extra] = (base + 1) / self.batch_size
        return found

    def total_weight(self, step: int) -> float:
        """Return the sum of the ranks' weights: their samples at this step, divided by a full global batch."""
        return self.size(step) / self.global_batch

    def samples_before(self, step: int) -> int:
        """Return the number of samples that all ranks together have taken, or dropped, before `step`."""
        epoch, begin = self._place(step)
        return epoch * self.num_samples + begin

    def steps_of(self, epochs: int) -> int:
        """Return the number of steps, from the first one on, that these epochs take."""
        first, before = self.origin
        epoch, taken = divmod(before, self.num_samples)
        if epochs <= epoch:
            return first
        return first + self._num_batches(self.num_samples - taken) + (epochs - epoch - 1) * self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        """Return whether an epoch ends with this step."""
        return self.samples_before(step + 1) % self.num_samples == 0

    def _place(self, step: int) -> tuple[int, int]:
        """Return a step's epoch, and the begin of its batch in the epoch."""
        first, before = self.origin
        epoch, taken = divmod(before, self.num_samples)
        left = self._num_batches(self.num_samples - taken)  # steps of the epoch in which the batches changed
        if step - first < left:
            return epoch, taken + (step - first) * self.global_batch
        more, position = divmod(step - first - left, self.steps_per_epoch)
        return epoch + 1 + more, position * self.global_batch


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_samples: int, source: Source | None = None) -> NDArray[np.int64]:
    """Return the order of one epoch's samples. It is read-only, because it is shared."""
    order = None if source is None else source.order(seed, epoch)
    if order is None:
        order = generator(seed, "data-order", step=epoch).permutation(num_samples)
    order.flags.writeable = False
    return order
