"""A check, now and then, that replicas are equal where the algorithm keeps them equal.

Without it, nothing reports code that changes parameters on one rank alone: an optimizer step inside a gradient hook,
`nn.Embedding(max_norm=...)`, a user's loop that depends on the rank.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import final

import torch
from torch import Tensor

from workbench.errors import ConfigError, RankMismatch
from workbench.program import Algorithm, Replicas
from workbench.replica.replica import Replica
from workbench.runtimes.checkpoint.replicated import byte_sums
from workbench.runtimes.execution.interpreter import Interpreter

ROUNDING = 1e-3  # of a parameter's largest value: processors of different kinds round differently


@final
class ReplicaCheck:
    """Compares this rank's parameters with those of rank 0.

    The ranks exchange one checksum. Only if checksums differ does rank 0 send its parameters.

    Args:
        every: compare after 1, 2, 4, 8, ... steps up to this number, then each time this number of steps has passed;
            0: never.
    """

    def __init__(self, replica: Replica, interpreter: Interpreter, every: int) -> None:
        self._replica = replica
        self._interpreter = interpreter
        self._every = every
        self._equal_after = 0  # number of steps after which replicas were equal
        self._warned = False
        self._sent: list[tuple[int, int]] | None = None  # checksums of the parameters that servers have sent

    def end_step(self, algorithm: Algorithm, num_steps: int) -> float:
        """Compare after this number of steps, if it is due and the algorithm keeps replicas equal. All ranks call it.

        Returns:
            The seconds that it took.

        Raises:
            RankMismatch: replicas differ by more than rounding; raised on all ranks.
        """
        if not algorithm.replicas.equal_parameters or algorithm.asynchronous or not self._is_due(num_steps):
            return 0.0
        return self._compare(algorithm, f"after step {num_steps - 1}", num_steps)

    def end_run(self, algorithm: Algorithm, num_steps: int) -> float:
        """Compare after the program's end, unless replicas never become equal or ranks do not wait. As `end_step`."""
        if algorithm.replicas == Replicas.NEVER or algorithm.asynchronous or not self._every:
            return 0.0
        return self._compare(algorithm, "at the end", num_steps)

    def note_sent(self, num_steps: int | None) -> None:
        """Remember the parameters that servers have sent after this number of steps, if a comparison is due.

        None: more are to come before the next step.
        """
        self._sent = None if num_steps is None or not self._is_due(num_steps) else self._sums()

    def check_sent(self) -> None:
        """Compare the parameters with those that were remembered last. Call it before the next step.

        Raises:
            ConfigError: the caller has changed them, which the servers do not see.
        """
        if self._sent is None:
            return
        for slot, before, now in zip(self._replica.layout.slots, self._sent, self._sums(), strict=True):
            if before != now:
                raise ConfigError(
                    f"{slot.name} was changed between two steps, and the servers have their own copy, so the change "
                    "would be lost: use an algorithm without servers, such as SynchronousSGD. check_replicas=0 does "
                    "not compare"
                )

    def _sums(self) -> list[tuple[int, int]]:
        return [byte_sums(param.detach()) for param in self._replica.parameters]

    def _is_due(self, num_steps: int) -> bool:
        if not self._every:
            return False
        return num_steps % self._every == 0 or (num_steps < self._every and num_steps & (num_steps - 1) == 0)

    def _compare(self, algorithm: Algorithm, when: str, num_steps: int) -> float:
        transport, clock = self._interpreter.transport, self._interpreter.clock
        if transport.num_workers == 1:
            return 0.0
        begin = clock.now()
        (checksums,) = self._gather(float(self._checksum())).T
        if bool((checksums != checksums[0]).any()):
            self._explain(algorithm, when)
        self._equal_after = num_steps
        return clock.now() - begin

    def _checksum(self) -> int:
        total = 0
        for sums in self._sums():
            for value in sums:
                total = (total * 1_000_003 + value) % 2**53  # exact as a float64
        return total

    def _gather(self, *numbers: float) -> Tensor:
        """Return the numbers of all ranks, shape (ranks, numbers), by one sum."""
        transport = self._interpreter.transport
        table = torch.zeros(transport.num_workers, len(numbers), dtype=torch.float64, device=transport.device)
        table[transport.rank] = torch.tensor(numbers, dtype=torch.float64)
        transport.all_reduce(table.view(-1), self._interpreter.clock.deadline("all ranks to compare their replicas"))
        return table.cpu()

    def _explain(self, algorithm: Algorithm, when: str) -> None:
        """Find the first parameter that differs, and raise or warn on all ranks."""
        transport, clock = self._interpreter.transport, self._interpreter.clock
        own = self._replica.read_parameters()
        first = own.clone()
        transport.broadcast(first, 0, clock.deadline("rank 0's parameters, to compare replicas"))
        shares, slots, differences = self._gather(*self._difference(own, first)).T
        rank = int(shares.argmax())
        name = self._replica.layout.slots[int(slots[rank])].name
        fact = f"{when}, {name} of rank {rank} differs from rank 0's by up to {float(differences[rank]):.3g}"
        if float(shares[rank]) <= ROUNDING:
            if transport.rank == 0 and not self._warned:
                warnings.warn(f"{fact}: that is rounding, and the run continues", RuntimeWarning, stacklevel=2)
            self._warned = True
            return
        before = f"after step {self._equal_after - 1}" if self._equal_after else "at the start"
        raise RankMismatch(
            f"replicas are no longer equal: {fact}. They were equal {before}, and {type(algorithm).__name__} keeps them "
            "so. Something changes the parameters of one rank alone: an optimizer step inside a gradient hook, "
            "nn.Embedding(max_norm=...), or code that depends on the rank. check_replicas=1 compares after each step "
            "and finds the first; check_replicas=0 does not compare"
        )

    def _difference(self, own: Tensor, first: Tensor) -> tuple[float, int, float]:
        """Return (share of the largest value, slot, difference) of a parameter.

        It is the first that differs by more than rounding, else the one that differs most.
        """
        offset, rounded = 0, (0.0, 0, 0.0)
        for slot in self._replica.layout.slots:
            here, there = own[offset : offset + slot.numel], first[offset : offset + slot.numel]
            offset += slot.numel
            if torch.equal(here, there):
                continue
            absolute = float((here - there).abs().max())
            share = absolute / max(float(there.abs().max()), torch.finfo(own.dtype).tiny)
            if not share <= ROUNDING:  # or NaN
                return (share if math.isfinite(share) else sys.float_info.max), slot.index, absolute
            rounded = max(rounded, (share, slot.index, absolute))
        return rounded
