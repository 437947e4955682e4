"""The entry point `workbench` of papermill, which imports the real engine when it is called.

Papermill loads its entry points during its own import. If the engine's module were the entry point, an import of this
module would import papermill, and papermill would need the engine before the engine's base class exists.
"""

from __future__ import annotations

from typing import Any, final


@final
class WorkbenchEngine:
    """Forwards to `workbench.experiments.papermill_engine.WorkbenchEngine`, and imports it when it is called."""

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Execute the notebook and return it."""
        from workbench.experiments.papermill_engine import WorkbenchEngine as Engine

        return Engine.execute_notebook(nb, kernel_name, **options)

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> Any:
        """Return the kernel to use: the given one, or that of the notebook."""
        from papermill.utils import nb_kernel_name

        return nb_kernel_name(nb, name)

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> Any:
        """Return the language of the parameters cell: the given one, or that of the notebook."""
        from papermill.utils import nb_language

        return nb_language(nb, language)
