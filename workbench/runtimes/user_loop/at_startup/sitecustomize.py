"""Imported at the start of each Python process under `workbench record`, because its folder is on PYTHONPATH.

It waits for the process's first backward pass, and begins a recording there. A process without one is not changed. A
sitecustomize module of the environment is executed too.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorchAutograd:
    """Finds `torch.autograd` as usual, and replaces its `backward` once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch.autograd":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _record_from_first_backward(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _record_from_first_backward(autograd: Any) -> None:
    original = autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        autograd.backward = original
        try:
            from workbench.runtimes.user_loop.record_command import begin

            begin()
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because of it
            print(f"workbench record: this process is not recorded: {type(error).__name__}: {error}", file=sys.stderr)
        autograd.backward(*args, **kwargs)

    autograd.backward = backward


def _execute_next_sitecustomize() -> None:
    folders = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_execute_next_sitecustomize()
if "WORKBENCH_RECORD" in os.environ:
    sys.meta_path.insert(0, _AfterTorchAutograd())
