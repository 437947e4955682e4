"""CUDA streams and events, where the order of work depends on them. A CPU needs no ordering.

A device runs each stream in order, and streams run concurrently. If one thread enqueues work on its stream and
another thread reads the result from its own stream, an event must connect the two. This package has three rules:

- A started sub-program works on a stream of its lane. It begins after the work that the starting program had enqueued
  (`record_event` at `Start`, `wait` before its first request). `Wait` makes the waiting stream wait for the
  sub-program's end.
- A server on a worker's rank exchanges values with the foreground while both run. It works on the foreground's
  stream.
- A number that the host needs is read on a separate stream, after the event of its tensor (`after`). So the host does
  not wait for work that was enqueued later.

All access goes through the `Streams` interface, so a test can use a model of streams and check the order without a GPU.
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
        """Return a new stream; None if there are no streams."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` the calling thread's stream within the block."""

    @abstractmethod
    def record_event(self) -> Any:
        """Return an event after all work that is enqueued on the calling thread's stream so far."""

    @abstractmethod
    def completed_event(self) -> Any:
        """Return an event that has already happened: for values that the host knows to be complete."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Make later work of the calling thread's stream wait for `event`. The host does not wait."""

    @abstractmethod
    def finish(self) -> None:
        """Make the host wait for all work of the calling thread's stream."""

    @abstractmethod
    def after(self, event: Any) -> AbstractContextManager[Any]:
        """Within the block, reads by the host wait for `event` only; for `record_event()` if `event` is None."""


@final
class HostStreams(Streams):
    """A CPU: every operation is complete when its call returns."""

    def current(self) -> None:
        return None

    def new(self) -> None:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def record_event(self) -> None:
        return None

    def completed_event(self) -> None:
        return None

    def wait(self, event: Any) -> None:
        """Do nothing: all work is complete."""

    def finish(self) -> None:
        """Do nothing: all work is complete."""

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

    def record_event(self) -> Any:
        return self.current().record_event()

    def completed_event(self) -> Any:
        return torch.cuda.Event()  # waiting for an event that was never recorded returns at once

    def wait(self, event: Any) -> None:
        if event is not None:
            self.current().wait_event(event)

    def finish(self) -> None:
        self.current().synchronize()

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        if event is None:
            event = self.record_event()
        if self._reader is None:
            self._reader = self.new()
        self._reader.wait_event(event)
        with torch.cuda.stream(self._reader):
            yield


HOST = HostStreams()


def streams_of(device: torch.device) -> Streams:
    """The streams of a device: `HOST` unless it is a GPU."""
    return CudaStreams(device) if device.type == "cuda" else HOST
