"""MPI requests as handles, and tensors as MPI buffers."""

from __future__ import annotations

import time
from typing import Any, final

import torch
from mpi4py import MPI
from torch import Tensor

from workbench.errors import PeerFailed, RankMismatch, Stalled
from workbench.runtimes.transport.base import Deadline, Handle

_ABANDONED: list[MpiHandle] = []  # abandoned requests: the library may still write to their memory
TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
}


@final
class MpiHandle(Handle):
    """An MPI request, completed by polling it."""

    def __init__(self, request: Any, then: Any = None, keep: Any = None) -> None:
        self._request = request
        self._then = then
        self._keep = keep  # memory that the library still reads
        self._status = MPI.Status()
        self.source = -1
        self.started_s = time.perf_counter()

    @property
    def num_bytes(self) -> int:
        """Length of the received message."""
        return int(self._status.Get_count(MPI.BYTE))

    def poll(self) -> bool:
        if self.finished_s is None and self._test():
            self.finished_s = time.perf_counter()
            self.source = self._status.Get_source()
            if self._then is not None:
                self._then()
        return self.finished_s is not None

    def _test(self) -> bool:
        try:
            return bool(self._request.Test(self._status))
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            source, tag = self._status.Get_source(), self._status.Get_tag()
            reason = f"rank {source} sent with tag {tag} more than it had announced; the rest was cut off"
            raise RankMismatch(
                f"{reason}. Run one version of workbench, one algorithm and one model on all ranks"
            ) from error

    def wait(self, deadline: Deadline) -> None:
        try:
            while not self.poll():
                try:
                    deadline.pause()
                except (PeerFailed, Stalled):
                    # It may be complete after all; an abandoned request would match a later message.
                    if not self.poll():
                        raise
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        if self.finished_s is None:
            _ABANDONED.append(self)


def buffer_of(flat: Tensor) -> list[Any]:
    """A tensor's memory as an MPI buffer, without a copy.

    Raises:
        TypeError: MPI has no type for it (16-bit floats, which it would sum as integers).
    """
    kind = TYPES.get(flat.dtype)
    if kind is None:
        raise TypeError(
            f"MPI has no type for {flat.dtype}: send a view of its bits (view(torch.int16)), or use float32"
        )
    if flat.is_cuda:
        return [flat, flat.numel(), kind]  # mpi4py uses its __cuda_array_interface__
    return [flat.numpy(), flat.numel(), kind]
