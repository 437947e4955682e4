"""CUDA streams and events, as far as the order of work depends on them. On a CPU there is nothing to order.

A device works through each stream in order, and streams run side by side. Work that one thread enqueues on its stream and
another thread reads from its own stream needs an event between the two. The rules of this package are few:

- A sub-program that is started works on a stream of its lane. It waits for what its starter's stream had been given
  (`mark` at `Start`, `wait` before its first request). `Wait` makes the waiting stream wait for the sub-program's end.
- A program that serves (a server beside its worker) exchanges values with the foreground while both run. It works on the
  foreground's stream.
- A number that the host needs is read on a stream of its own, after the event of the tensor it is part of (`after`). So
  the host does not wait for the work that was enqueued since.

Everything here goes through the `Streams` port, so that a test can put a model of streams in its place and check the order
without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch


class Streams(ABC):
    """The streams of one device. "The calling thread's stream" is what torch calls the current stream."""

    @abstractmethod
    def current(self) -> Any:
        """The calling thread's stream."""

    @abstractmethod
    def new(self) -> Any:
        """A further stream; None where there are no streams."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, `stream` is the calling thread's."""

    @abstractmethod
    def mark(self) -> Any:
        """An event after everything that the calling thread's stream has been given so far."""

    @abstractmethod
    def past(self) -> Any:
        """An event that has happened: for values that the host knows to be there."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """What the calling thread's stream is given from here on waits for `event`. The host does not."""

    @abstractmethod
    def finish(self) -> None:
        """The host waits for everything that the calling thread's stream has been given."""

    @abstractmethod
    def after(self, event: Any) -> AbstractContextManager[Any]:
        """Inside, what the host reads waits for `event` alone; for `mark()` where `event` is None."""


@final
class HostStreams(Streams):
    """A CPU: every operation is complete when its call returns."""

    def current(self) -> None:
        return None

    def new(self) -> None:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> None:
        return None

    def past(self) -> None:
        return None

    def wait(self, event: Any) -> None:
        """Nothing is outstanding."""

    def finish(self) -> None:
        """Nothing is outstanding."""

    def after(self, event: Any) -> AbstractContextManager[Any]:
        return nullcontext()


@final
class CudaStreams(Streams):
    """One GPU, through torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reader: Any = None  # made when the host first reads

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def new(self) -> Any:
        return torch.cuda.Stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def mark(self) -> Any:
        return self.current().record_event()

    def past(self) -> Any:
        return torch.cuda.Event()  # to wait for an event that was never recorded is to wait for nothing

    def wait(self, event: Any) -> None:
        if event is not None:
            self.current().wait_event(event)

    def finish(self) -> None:
        self.current().synchronize()

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        if event is None:
            event = self.mark()
        if self._reader is None:
            self._reader = self.new()
        self._reader.wait_event(event)
        with torch.cuda.stream(self._reader):
            yield


HOST = HostStreams()


def streams_of(device: torch.device) -> Streams:
    """The streams of a device: `HOST` unless it is a GPU."""
    return CudaStreams(device) if device.type == "cuda" else HOST
