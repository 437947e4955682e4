"""The architecture, as imports: contracts of pyproject.toml, and what import-linter cannot see."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import grimp
import pytest

import workbench

PACKAGE = Path(workbench.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.glob("*/**/__init__.py"))
ONE_KIND = ("algorithms", "cli")  # each module is one algorithm or command


def test_contracts_of_pyproject_are_kept() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache', '--no-logo'])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("library", "doors"),
    [
        ("plotly", ("plots/",)),
        ("mpi4py", ("runtimes/", "bench/peers.py")),  # the benchmark's peers use MPI themselves
        ("torch.distributed", ("runtimes/", "bench/peers.py")),
        ("ipyparallel", ("clusters/",)),
        ("torchvision", ("problems/torchvision_door.py",)),
        ("triton", ("codecs/triton_kernels.py",)),
    ],
)
def test_library_has_one_door(library: str, doors: tuple[str, ...]) -> None:
    users = [
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if any(f"{name}.".startswith(f"{library}.") for name in imported(path))
    ]
    assert users, f"nobody imports {library}: this test would see nothing"
    assert [user for user in users if not user.startswith(doors)] == []


def test_no_module_imports_the_front_page() -> None:
    """`from workbench import Cluster` inside the package would tie every layer to the highest one."""
    graph = grimp.build_graph("workbench", cache_dir=None)
    assert graph.find_modules_that_directly_import("workbench") == set()


def test_only_the_views_of_a_run_import_upward_by_name() -> None:
    """`import_module("workbench.plots")` would escape the contracts: decisions/0033 has the exception."""
    by_name = {
        str(path.relative_to(PACKAGE)): [name for name in imported_by_name(path) if name.startswith("workbench.")]
        for path in MODULES
    }
    assert {path for path, names in by_name.items() if names} == {"__init__.py", "trace/views.py"}
    assert set(by_name["trace/views.py"]) == {"workbench.analysis", "workbench.plots", "workbench.replica.trained"}


def test_the_reaper_imports_nothing_but_machine() -> None:
    """It is a process of its own next to every cluster: small, started at once, and in no need of numpy."""
    ours = {name for name in imported(PACKAGE / "clusters/supervision/reaper.py") if name.startswith("workbench")}
    assert ours == {"workbench.machine.is_running"}
    assert [name for name in imported(PACKAGE / "machine.py") if name.startswith("workbench")] == []


@pytest.mark.parametrize("name", FOLDERS)
def test_docstring_of_a_folder_names_its_modules(name: str) -> None:
    """It says what may be imported and where to begin. What it names exists, and it names every module."""
    folder = PACKAGE / name
    text = " ".join((ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").split())
    assert re.search(r"\b(may import|imports)\b", text, re.IGNORECASE), "what may it import?"
    assert "Begin with `" in text, "where does a reader begin?"
    named = {word.removesuffix(".py").split(".")[0] for word in re.findall(r"`([a-z_]\w*(?:[/.]\w+)*)`", text)}
    defined = set[str]().union(*map(defined_in, folder.rglob("*.py")))
    places = [folder, *(parent for parent in folder.parents if parent.is_relative_to(PACKAGE.parent))]
    modules = {word for word in named if any(is_module(place / word) for place in places)}
    assert named - modules - defined == set(), "no such module"
    if name not in ONE_KIND:
        here = {path.stem for path in folder.iterdir() if is_module(path.with_suffix(""))}
        assert {word for word in here if not word.startswith("__")} - named == set(), "not named"


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Names of all functions and classes of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))


def is_module(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("heavy", ["torch", "numpy", "plotly", "ipyparallel", "mpi4py", "pandas"])
def test_import_of_the_package_loads_nothing_heavy(heavy: str) -> None:
    code = f"import sys, workbench; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0, f"import workbench loads {heavy}"


@pytest.mark.parametrize("package", ["clusters", "plots"])
def test_a_name_that_is_imported_when_asked_for_is_none_of_a_module(package: str) -> None:
    """The first look would import the module, and every later one find it in the name's place."""
    found = import_module(f"workbench.{package}")
    assert set(found._HOMES) == set(found.__all__)
    assert {path.stem for path in (PACKAGE / package).glob("*.py")} & set(found._HOMES) == set()


def imported_by_name(path: Path) -> list[str]:
    """Dotted names that a file gives to `import_module`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    calls = [node for node in calls if ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")]
    return [node.args[0].value for node in calls if isinstance(node.args[0], ast.Constant)]


@cache
def imported(path: Path) -> frozenset[str]:
    """Dotted names of all that a file imports, by `import_module` too, and of attributes it spells out (`torch.distributed.init`)."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                names.update(f"{module}.{alias.name}" for alias in node.names)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                names.add(name)
            case ast.Attribute():
                names.add(ast.unparse(node))
    return frozenset(names)
