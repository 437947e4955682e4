"""What papermill finds under the name `workbench`, without papermill.

Papermill loads its entry points while it is itself being imported. A class derived from one of papermill's own cannot be
found then, if it was our module that was imported first and that imports papermill; so the real engine stands behind this one.
"""

from __future__ import annotations

from typing import Any, final


@final
class WorkbenchEngine:
    """`workbench.experiments.papermill_engine.WorkbenchEngine`, found when it is called."""

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Execute the notebook; returns it."""
        from workbench.experiments.papermill_engine import WorkbenchEngine as Engine

        return Engine.execute_notebook(nb, kernel_name, **options)

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> Any:
        """The kernel to use: the one asked for, or the notebook's own."""
        from papermill.utils import nb_kernel_name

        return nb_kernel_name(nb, name)

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> Any:
        """The language of the parameters cell: the one asked for, or the notebook's own."""
        from papermill.utils import nb_language

        return nb_language(nb, language)
