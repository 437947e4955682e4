"""`workbench completion`: prints the script with which a shell completes commands, options and names."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from workbench import config, resources
from workbench.errors import WorkbenchError
from workbench.naming import kebab

ASKED = "_ARGCOMPLETE"  # set by the shell that asks for completions
EXAMPLES = """
  eval "$(workbench completion bash)"      # in ~/.bashrc
  eval "$(workbench completion zsh)"       # in ~/.zshrc, after compinit
"""


def add_completion_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench completion`, and set its function."""
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(command=_completion)


def _completion(options: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["workbench"], shell=options.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that started this process for completions, and end the process."""
    import argcomplete

    for command, action in _arguments(parser):
        names = NAMES.get(f"{command} {action.dest}") or NAMES.get(action.dest)
        if names is not None and action.choices is None:
            action.completer = partial(_completions, names)  # type: ignore[attr-defined]  # argcomplete reads it
    argcomplete.autocomplete(parser, always_complete_options=False)


def _arguments(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """Yield each argument of a parser and of its commands, with its command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _arguments(inner, command or name)
        else:
            yield command, action


def _completions(names: Callable[[], Iterable[str]], **_: Any) -> list[str]:
    try:
        return [*names()]
    except (WorkbenchError, OSError):  # no notebooks here, or a damaged file of defaults
        return []


def _registered(package: str) -> list[str]:
    """Return the names in the registry of a package, from its source, because its import would load torch."""
    source = (resources.PACKAGE / package / "__init__.py").read_text(encoding="utf-8")
    registry = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == f"_{package.upper()}"
    )
    if isinstance(registry, ast.Dict):
        return [ast.literal_eval(key) for key in registry.keys if key is not None]
    assert isinstance(registry, ast.DictComp), f"{package}: names of classes, or a comprehension over classes"
    classes = registry.generators[0].iter
    assert isinstance(classes, ast.Tuple)
    return [kebab(ast.unparse(one)) for one in classes.elts]


def _problems() -> tuple[str, ...]:
    from workbench import problems

    return problems.names()


def _papers() -> list[str]:
    return [path.parent.name for path in resources.shared("papers").glob("*/card.md")]


def _runs() -> list[str]:
    """Return the names of the runs: their folders', because the store's own reader imports numpy."""
    return ["last", *(path.parent.name for path in Path(config.value_of("runs") or "runs").glob("*/run.json"))]


NAMES: MappingProxyType[str, Callable[[], Iterable[str]]] = MappingProxyType(  # argument, or command and argument
    {
        "algorithm": partial(_registered, "algorithms"),
        "algorithms name": partial(_registered, "algorithms"),
        "collectives name": partial(_registered, "collectives"),
        "codecs name": partial(_registered, "codecs"),
        "problem": _problems,
        "problems name": _problems,
        "run": _runs,
        "names": _runs,
        "resume": _runs,
        "runs action": lambda: ("list", "export", "remove"),
        "notebook words": lambda: ("run", "list", *resources.notebooks()),
        "reproduce name": lambda: ("all", "headlines", *_papers(), *resources.notebooks()),
        "key": _papers,
        "runtime": lambda: ("mpi", "torch", "simulated"),
        "size": lambda: ("smoke", "ci", "full"),
    }
)
