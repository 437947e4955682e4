"""A dashboard for JupyterLab: choose an algorithm, a problem and settings; start, compare and stop trainings.

- `board`: the widgets. `form`: a field for each setting of an algorithm.
- `session`: the trainings, without widgets.

Imports `catalogue` and the layers below it. No package imports `dashboard`; it is imported when it is first used.
Begin with `board`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.dashboard.board import Dashboard

__all__ = ["Dashboard"]


def __getattr__(name: str) -> Any:
    if name != "Dashboard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"{__name__}.board").Dashboard
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "workbench":
            raise
        raise ConfigError(f"the dashboard needs {error.name}: pip install 'sgd-workbench[notebooks]'") from error
