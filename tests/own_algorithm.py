"""A user's file with algorithms, for tests that name them as `file.py:Class`."""

from __future__ import annotations

import textwrap
from pathlib import Path

SOURCE = """
    from dataclasses import dataclass

    import workbench as wb
    from beside_algorithm import FACTOR
    from workbench import PipeSGD, ops


    @dataclass(frozen=True, slots=True, kw_only=True)
    class WarmStart(wb.Algorithm):
        '''Raises the learning rate during the first steps.'''

        warm_steps: int = 10

        def worker(self, ctx):
            for step in ctx.steps():
                gradient = yield ops.Backward(step)
                total = yield ops.AllReduce(gradient)
                yield ops.Apply(total, lr_scale=FACTOR * min(1.0, (step + 1) / self.warm_steps))
                yield ops.EndStep(step)


    class Warmer(WarmStart):
        pass


    class Undecorated(WarmStart):
        cool_steps: int = 3


    made, number = WarmStart(), 3
"""


def write_own_algorithm(folder: Path) -> str:
    """Write the file, and one that it imports. Return its path."""
    (folder / "beside_algorithm.py").write_text("FACTOR = 0.5\n")
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(SOURCE))
    return str(file)
