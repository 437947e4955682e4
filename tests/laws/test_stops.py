"""A callback stops every simulated algorithm after the very step, at an evaluation or a step."""

from __future__ import annotations

import pytest

import workbench as wb
from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK
from tests.laws.variants import name_of, representatives
from workbench.callbacks import Callback
from workbench.callbacks.base import Row
from workbench.program import Algorithm
from workbench.trace.run import Run

STEPS, STOP = 9, 4


class StopsAfter(Callback):
    """Asks to stop at the first evaluation, or step, that is not before a step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.told: list[tuple[str, int]] = []
        self.status = ""

    def _told(self, kind: str, row: Row) -> bool:
        self.told.append((kind, row["step"]))
        return kind == self.kind and row["step"] >= STOP

    def on_step(self, row: Row) -> bool:
        return self._told("step", row)

    def on_evaluation(self, row: Row) -> bool:
        return self._told("evaluation", row)

    def on_end(self, run: Run) -> None:
        self.status = run.info["status"]


@pytest.mark.parametrize("kind", ["step", "evaluation"])
@pytest.mark.parametrize("algorithm", representatives(), ids=name_of)
def test_a_callback_stops_a_simulation_after_that_step(algorithm: Algorithm, kind: str) -> None:
    """Later rows are not told, and rows until then are those of the whole run."""
    how = {"workers": 3, "network": NETWORK, "compute": COMPUTE, "batch_size": 3, "steps": STEPS, "evaluate_every": 2}
    whole = wb.simulate(algorithm, tiny.problem(), **how)
    callback = StopsAfter(kind)
    run = wb.simulate(algorithm, tiny.problem(), callbacks=[callback], **how)
    asked = callback.told[-1][1]
    assert asked in (STOP, STOP + 1) and callback.told[-1][0] == kind
    assert (run.info["status"], callback.status) == ("stopped", "stopped")
    assert run.info["result"]["last_step"] == asked
    assert [row["step"] for row in run.steps()] == list(range(asked + 1))
    if not algorithm.asynchronous:  # else a worker that has ended sends nothing to the others
        assert run.steps() == whole.steps()[: asked + 1]
