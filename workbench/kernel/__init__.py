"""Cells that run on every rank: the *Workbench MPI* and *Workbench Slurm* kernels, and an extension for other kernels.

In a notebook with another kernel: `%load_ext workbench.kernel`.

- `app`: IPython's kernel, whose cells run on ranks.
- `ranks`: starts the ranks at the first cell, and carries out the commands that control them.
- `cells`, `execution`, `outputs`, `screen`: read a cell, run it on ranks, merge what they print, and show it.
- `questions`, `debugger`, `variables`, `magics`: `input()`, breakpoints, the table of variables, and the commands'
  help.
- `link` and `on_rank`: the two ends of what the notebook and a rank exchange while a cell runs.

Imports `clusters` and the layers below it. Nothing imports `kernel`: Jupyter starts it by a kernelspec. Begin with
`cells`, then `execution`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: Any) -> None:
    """Run the notebook's cells on ranks. A cell with `%%local` runs in the notebook's own process."""
    from workbench.kernel.ranks import Ranks

    Ranks.attach_to(shell)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks, and run cells in the notebook's own process again."""
    from workbench.kernel.ranks import Ranks

    Ranks.detach_from(shell)
