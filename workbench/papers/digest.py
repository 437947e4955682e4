"""The digest of an experiment's code and parameters. A record keeps it, so that a stale record is detected."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from workbench.papers.findings import RANKS, SLEPT
from workbench.papers.history import PACKAGE

# Code that determines a measured number. Plots, messages and the command line do not.
SHARED = (
    "costs",
    "replica",
    "theory",
    "problems",
    "analysis",
    "gradients.py",
    "ops.py",
    "program.py",
    "rng.py",
    "schedules.py",
)
# Modules of `analysis` that write files, tables and labels of runs: no finding comes from them.
NOT_MEASURING = frozenset(f"analysis/{name}.py" for name in ("export", "frames", "labels", "runs_table"))
CALIBRATION = "calibration"
PREDICTING = frozenset({"calibrate", "calibration", "Calibration", "predict", "recommend"})  # names of its use
SIMULATED = ("runtimes/simulator",)
ON_RANKS = (
    "runtimes/execution",
    "runtimes/transport",
    "runtimes/rank/training_loop.py",
    "clusters/emulated",
)
# Folder of alternatives -> its modules that always count, because `calibration`, the simulator or each other use them
# unnamed. Of the others, an experiment depends on those that it names.
ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "algorithms": ("synchronous", "layerwise", "dear", "pipe", "backup"),
    "codecs": ("base", "feedback", "groups", "linear", "truncate"),
    "collectives": ("algorithm", "auto", "base", "linear", "memory", "wire"),
}
# A module that is imported by one that always counts, but runs only for a setting -> the text of that setting.
FOR_SETTING = {"bucket_plans": re.compile(r"""["']auto["']""")}
IN_LOOPS = {"Trainer": "runtimes/user_loop/trainer.py", "ddp_hook": "runtimes/user_loop/ddp_hook.py"}
RULES = ("papers/verdicts.py",)  # verdicts follow from the numbers
STUDIES = "papers/studies/"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def experiment_digest(notebook: Path, parameters: Mapping[str, Any], where: Collection[str]) -> str:
    """Return a hash of what determines the numbers of a record.

    It covers the notebook's code, its parameters, and the modules of the package on which the numbers depend. Of the
    algorithms, codecs and collectives these are the ones that code or parameters name, and what they import; the
    calibration counts where something is calibrated or predicted. Comments, docstrings, type annotations, the layout of
    code, error messages and text cells do not change it.

    Args:
        notebook: the notebook.
        parameters: those that replace the notebook's defaults.
        where: the `where` of the record's findings.
    """
    import nbformat

    cells = nbformat.read(notebook, as_version=4).cells  # type: ignore[no-untyped-call]
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    code = [source_digest(source) for source in sources]
    studies = {module for source in sources for module in _experiments_of(source)}
    codes = [*sources, *((PACKAGE / study).read_text(encoding="utf-8") for study in sorted(studies))]
    modules = {*_paths(where), *studies, *_named_modules("\n".join([*codes, json.dumps(parameters)]))}
    if any(not PREDICTING.isdisjoint(_names_in(code)) for code in codes):
        modules.add(CALIBRATION)
    what = [code, dict(sorted(parameters.items())), library_digest(tuple(sorted(modules)))]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def source_digest(source: str) -> str:
    """Return a hash of Python code, without comments, docstrings, annotations, layout and error messages.

    Text that is not Python, such as a cell with a magic command, is taken as it is.

    >>> source_digest("x = 1  # one") == source_digest("x=1") != source_digest("x = 2")
    True
    """
    words: list[str] = []
    try:
        _add_words(ast.parse(source), words)
    except SyntaxError:
        words = [source]
    return hashlib.sha256("".join(words).encode()).hexdigest()[:16]


@cache
def library_digest(paths: tuple[str, ...]) -> str:
    """Return a hash of the code in folders and files of the package."""
    total = hashlib.sha256()
    for name in paths:
        place = PACKAGE / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            module = path.relative_to(PACKAGE).as_posix()
            if module not in NOT_MEASURING:
                total.update(f"{module} {_module_digest(path)}\n".encode())
    return total.hexdigest()[:16]


@cache
def _module_digest(path: Path) -> str:
    return source_digest(path.read_text(encoding="utf-8"))


def _paths(where: Collection[str]) -> set[str]:
    paths = set(SHARED)
    if "simulated cluster" in where:
        paths |= set(SIMULATED)
    if any(place.removesuffix(SLEPT) in RANKS for place in where):
        paths |= set(ON_RANKS)
    return paths


def _names_in(source: str) -> set[str]:
    """The names that code uses or imports, without those in texts and comments; all words of text that is not Python.

    >>> sorted(_names_in("wb.predict(run)  # not calibrate"))
    ['predict', 'run', 'wb']
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set(re.findall(r"\w+", source))
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.ImportFrom(module=module, names=names):
                found |= {*(module or "").split("."), *(alias.name for alias in names)}
            case ast.Import(names=names):
                found |= {word for alias in names for word in alias.name.split(".")}
    return found


def _named_modules(text: str) -> set[str]:
    """The modules of `ALTERNATIVES` that code and parameters name, with their imports, and those of user-written loops.

    >>> sorted(_named_modules("wb.AsyncSGD(), 'top-k'") - _named_modules(""))
    ['algorithms/async_sgd.py', 'codecs/top_k.py']
    """
    found = {path for name, path in IN_LOOPS.items() if re.search(rf"\b{name}\b", text)}
    for folder, always in ALTERNATIVES.items():
        words, imports = _modules_of(folder)
        open_ = [name for name in words if name in always or re.search(rf"\b({'|'.join(words[name])})\b", text)]
        while open_:
            name = open_.pop()
            path = f"{folder}/{name}.py"
            if path not in found:
                found.add(path)
                open_ += [one for one in imports[name] if one not in FOR_SETTING or FOR_SETTING[one].search(text)]
    return found


@cache
def _modules_of(folder: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Name of each module of a folder -> words that name what it holds; and -> the modules of the folder it imports."""
    package = import_module(f"workbench.{folder}")
    words: dict[str, set[str]] = {}
    imports: dict[str, set[str]] = {}
    for path in (PACKAGE / folder).glob("*.py"):
        if path.stem == "__init__":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words[path.stem] = {
            f"{folder}.{path.stem}",
            *(one.name for one in tree.body if isinstance(one, ast.ClassDef)),
        }
        imports[path.stem] = _imported_from(folder, tree)
    for name in package.names():
        words[package.find(name).__module__.rpartition(".")[2]].add(name)
    return words, imports


def _imported_from(folder: str, tree: ast.Module) -> set[str]:
    """The modules of a folder that code imports, by `from workbench.folder.one import ...` or `from workbench.folder import one`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"workbench.{folder}"):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {
                name.rpartition(".")[2]
                for name in names
                if (PACKAGE / f"{name.removeprefix('workbench.').replace('.', '/')}.py").is_file()
            }
    return found


def _experiments_of(source: str) -> Iterator[str]:
    """The modules of `workbench.papers` that code imports, which run experiments for it, and those that they import."""
    for file in _imported_from_papers(source):
        yield file
        if file.startswith(STUDIES):
            yield from _experiments_of((PACKAGE / file).read_text(encoding="utf-8"))


def _imported_from_papers(source: str) -> Iterator[str]:
    """Yield the files of `papers`, without `RULES`, that code imports. Text that is not Python imports nothing."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("workbench.papers"):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            files = (f"{name.removeprefix('workbench.').replace('.', '/')}.py" for name in names)
            yield from (file for file in files if (PACKAGE / file).is_file() and file not in RULES)


def _add_words(node: Any, words: list[str]) -> None:
    """Append the code as words. Empty fields are left out, because Python's versions differ in these."""
    if isinstance(node, list):
        words.append("[")
        for item in node:
            _add_words(item, words)
        words.append("]")
        return
    if not isinstance(node, ast.AST):
        words.append(f"{node!r},")
        return
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        node = ast.Raise(node.exc.func, None)  # without the message
    words.append(f"{type(node).__name__}(")
    for name in node._fields:
        value = getattr(node, name, None)
        if name in ("annotation", "returns", "type_comment", "kind") or value is None or value == []:
            continue
        if name == "body" and isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            value = value[1:]
        words.append(f"{name}=")
        _add_words(value, words)
    words.append(")")
