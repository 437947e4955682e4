"""The phases of a training loop, from what happens on its thread: reading data, forward, backward, update, waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

Emit = Callable[[str, float, float, int], object]  # kind, start_s, end_s, step
MIN_WAIT_S = 20e-6  # a shorter wait stays a part of its phase


@final
@dataclass(slots=True)
class Step:
    """A step that has ended.

    Attributes:
        number: its number, from 0.
        end_s: end of its last update.
        evaluated_s: seconds of evaluations before that.
        loss: what backward was called on, summed over the step's calls; None if it was not read. If an optimizer calls a
            closure again and again (L-BFGS), the loss of its first call.
        lr: learning rate of the optimizer's first group.
    """

    number: int
    end_s: float = 0.0
    evaluated_s: float = 0.0
    loss: float | None = None
    lr: float | None = None


@final
class LoopPhases:
    """Turns what a loop does into spans that do not overlap.

    A step ends with an update, and the next step begins with the next forward. So two optimizers that step one after
    the other end one step together, and several backward passes before an update belong to one step. Forward lasts from
    the call of a model to the call of backward, so it includes the loss. If no model was seen, forward begins where
    the phase before ended.

    A model that is called in evaluation mode or without gradients evaluates. Neighbouring evaluations are one span,
    with the reading of their data.

    Args:
        emit: called with each span.
        end_step: called with each step, when the next one begins.
        begin_s: the time at which the recording begins.
    """

    def __init__(self, emit: Emit, end_step: Callable[[Step], object], begin_s: float) -> None:
        self._emit, self._end_step = emit, end_step
        self.step = Step(0)
        self._updated = False  # the step's update has ended
        self._kind, self._since_s = "", 0.0  # the open phase; "": none
        self._last_s = begin_s  # end of the last phase
        self._forward_end_s: float | None = None  # when the model of the open forward returned
        self._loads: list[tuple[float, float]] = []  # they belong to what follows them
        self._evaluation: tuple[float, float] | None = None
        self._evaluated_s = 0.0  # of the evaluations that were emitted
        self._is_updating = False
        self._first_loss: float | None = None  # of the step

    def load(self, begin_s: float, end_s: float) -> None:
        """Data was read."""
        self._end_forward(begin_s)
        self._loads.append((begin_s, end_s))
        self._last_s = end_s

    def begin_evaluation(self, now_s: float) -> None:
        """A model is called, and will not be differentiated."""
        if self._kind:
            return  # inside another phase, such as a teacher's forward inside the student's
        begin_s = self._loads[0][0] if self._loads else now_s
        self._loads = []
        self._evaluation = (begin_s if self._evaluation is None else self._evaluation[0], now_s)

    def end_evaluation(self, now_s: float) -> None:
        """Such a model returns."""
        if self._kind or self._evaluation is None:
            return
        self._evaluation, self._last_s = (self._evaluation[0], now_s), now_s

    def begin_forward(self, now_s: float) -> None:
        """A model is called in training."""
        self.settle()
        if self._kind != "forward":
            self._turn("forward", now_s)

    def end_forward(self, now_s: float) -> None:
        """Such a model returns: the loss may follow."""
        if self._kind == "forward":
            self._forward_end_s = now_s

    def begin_backward(self, now_s: float) -> None:
        """Backward is called."""
        self.settle()
        if not self._kind:
            self._turn("forward", self._last_s)
        self._turn("backward", now_s)

    def end_backward(self, now_s: float, computed_s: float | None, communicated_s: float | None) -> None:
        """Backward returns.

        Args:
            now_s: the time.
            computed_s: when all gradients of this rank were known; None if that was not seen.
            communicated_s: end of the communication that backward waited for; None without.
        """
        if computed_s is not None and communicated_s is not None:
            until_s = min(communicated_s, now_s)
            if until_s - computed_s > MIN_WAIT_S:
                self.wait(computed_s, until_s)
        self._turn("apply" if self._is_updating else "", now_s)  # an optimizer may call it (L-BFGS)

    def add_loss(self, loss: float) -> None:
        """Backward is called on this loss."""
        if self.step.loss is None:
            self._first_loss = self.step.loss = loss
        elif not self._is_updating:
            self.step.loss += loss

    def begin_update(self, now_s: float) -> None:
        """An optimizer begins its step."""
        self._end_forward(now_s)
        self._is_updating = True
        self._turn("apply", now_s)

    def end_update(self, now_s: float, lr: float | None, *, is_whole: bool = True) -> None:
        """An optimizer ends its step.

        Args:
            now_s: the time.
            lr: the learning rate of its first group.
            is_whole: its begin was seen. Otherwise the recording began in it, and the losses so far are a closure's.
        """
        if not is_whole:
            self.step.loss = self._first_loss
        self._is_updating = False
        self._turn("", now_s)
        self._updated = True
        self.step.end_s, self.step.lr = now_s, lr

    def wait(self, begin_s: float, end_s: float) -> None:
        """The thread waited for communication, inside the open phase or outside of phases."""
        if end_s - begin_s <= MIN_WAIT_S:
            return
        kind = self._kind
        begin_s = max(begin_s, self._since_s if kind else self._last_s)
        self._turn("wait", begin_s)
        self._turn(kind, end_s)

    def close(self, now_s: float) -> None:
        """The recording ends."""
        self._end_forward(now_s)
        self._turn("", now_s)
        self.settle()

    def _end_forward(self, now_s: float) -> None:
        """End a forward that no backward follows."""
        if self._kind == "forward":
            self._turn("", now_s if self._forward_end_s is None else self._forward_end_s)

    def _turn(self, kind: str, now_s: float) -> None:
        """End the open phase and begin another."""
        if self._kind and now_s > self._since_s:
            self._emit(self._kind, self._since_s, now_s, self.step.number)
        if self._kind:
            self._last_s = now_s
        self._kind, self._since_s, self._forward_end_s = kind, now_s, None

    def settle(self) -> None:
        """Record what waited for its successor: an evaluation, the end of a step, and the data of this one."""
        evaluated_s = self._evaluated_s
        if self._evaluation is not None:
            begin_s, end_s = self._evaluation
            self._emit("evaluate", begin_s, end_s, self.step.number)
            self._evaluated_s += end_s - begin_s
            self._evaluation = None
        if self._updated:
            ended, self._updated = self.step, False
            ended.evaluated_s = evaluated_s  # without an evaluation after its update
            self.step = Step(ended.number + 1)
            self._end_step(ended)
        for load in self._loads:
            self._emit("load", *load, self.step.number)
        self._loads = []
