"""The distribution: consistent dependencies in three files, and a wheel with all files that the commands need."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import workbench
from workbench import resources
from workbench.cli.main import _parser
from workbench.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {
    "torch": "pytorch",
    "jupyter-console": "jupyter_console",
    "kaleido": "python-kaleido",
    "playwright": "playwright-python",
}


def declared() -> dict[str, Requirement]:
    """Every dependency of pyproject.toml, extras included, by name."""
    extras = PROJECT["optional-dependencies"]
    lines = [
        *PROJECT["dependencies"],
        *(line for name, lines in extras.items() if name != "all" for line in lines),
    ]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def pinned() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {
        re.sub(r"[-_.]+", "-", name).lower(): Version(version) for name, version in (line.split("==") for line in lines)
    }


def test_environment_yml_is_in_step_with_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = {
        requirement.name: requirement
        for requirement in (Requirement(line) for line in environment if isinstance(line, str))
    }
    assert str(conda.pop("python").specifier) == PROJECT["requires-python"]
    conda.pop("pip")
    ours = {CONDA_NAMES.get(name, name): str(requirement.specifier) for name, requirement in declared().items()}
    assert {name: str(requirement.specifier) for name, requirement in conda.items()} == ours


def test_conda_recipe_is_in_step_with_pyproject() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    conda = {one.name: str(one.specifier) for one in map(Requirement, recipe["requirements"]["run"])}
    assert conda.pop("python") == PROJECT["requires-python"]
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["mpi"], *extras["notebooks"]]
    assert conda == {CONDA_NAMES.get(one.name, one.name): str(one.specifier) for one in map(Requirement, lines)}
    assert recipe["context"]["version"] == PROJECT["version"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    name, target = recipe["build"]["python"]["entry_points"][0].split(" = ")
    assert PROJECT["scripts"] == {name: target}


def test_constraints_pin_every_dependency_within_its_range() -> None:
    pins = pinned()
    assert {
        name: str(requirement) for name, requirement in declared().items() if pins[name] not in requirement.specifier
    } == {}


def test_all_is_every_extra() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert Requirement(everything).name == PROJECT["name"]
    assert Requirement(everything).extras == set(PROJECT["optional-dependencies"]) - {"all"}


def test_version_and_licence_are_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert workbench.__version__ == PROJECT["version"]


def test_changelog_knows_the_version() -> None:
    assert re.search(rf"^## \[{re.escape(PROJECT['version'])}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_images_and_binder_run_commands_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    image = (ROOT / "Dockerfile").read_text()
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert json.loads(re.findall(r"^CMD (.+)$", image, re.MULTILINE)[0]) == ["make", "demo"]
    used = [*re.findall(r"^RUN make (\S+)", image, re.MULTILINE), container["postCreateCommand"].removeprefix("make ")]
    assert used == ["install", "install"] and {"install", "demo"} <= targets
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    commands = [
        line.split() for line in (ROOT / "binder" / "postBuild").read_text().splitlines() if "workbench" in line
    ]
    assert commands == [["workbench", "kernels", "install"]]
    _parser().parse_args(commands[0][1:])
    extras = re.search(r"-e \.\[(.+)\]", (ROOT / "binder" / "requirements.txt").read_text())
    assert extras and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def test_notebook_is_found_by_name() -> None:
    for name in resources.notebooks():
        assert resources.notebook(name) == resources.notebook(f"{name}.ipynb")
        assert resources.notebook(name).is_file()


def test_unknown_notebook_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'00-tuor'.*did you mean 00-tour\?"):
        resources.notebook("00-tuor")


def test_missing_folder_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "workbench")
    with pytest.raises(ConfigError, match="install sgd-workbench"):
        resources.shared("papers")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that sees this environment's packages but not the checkout.

    It holds our wheel, which is built from our source distribution.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, timeout=100, stdout=subprocess.DEVNULL)
    (source,) = folder.glob("sgd_workbench-*.tar.gz")
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source], check=True, timeout=100
    )
    (wheel,) = folder.glob("sgd_workbench-*.whl")
    prefix = folder / "venv"
    venv.create(prefix, symlinks=True)
    python = prefix / "bin" / "python"
    site = sysconfig.get_path("purelib", vars={"base": str(prefix), "platbase": str(prefix)})
    # A path in a .pth file adds that folder alone: the .pth file of our editable installation in it is not followed.
    Path(site, "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True, timeout=100)
    return prefix


def from_wheel(prefix: Path, *command: str) -> str:
    """What a command of the wheel's environment prints, started far from the checkout."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "JUPYTER_PATH")}
    result = subprocess.run(
        [prefix / "bin" / command[0], *command[1:]],
        cwd=prefix,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_wheel_is_what_is_imported(installed: Path) -> None:
    assert str(installed) in from_wheel(installed, "python", "-c", "import workbench; print(workbench.__file__)")


def test_all_that_the_wheel_requires_is_there_in_a_version_that_it_accepts(installed: Path) -> None:
    code = (
        "import sys\n"
        "from importlib.metadata import requires, version\n"
        "from packaging.requirements import Requirement\n"
        "for each in map(Requirement, requires('sgd-workbench')):\n"
        "    if each.marker is None or each.marker.evaluate({'extra': 'notebooks'}):\n"
        "        assert each.specifier.contains(version(each.name), prereleases=True), each\n"
        "        print(each.name)"
    )
    found = from_wheel(installed, "python", "-c", code).split()
    assert {"torch", "safetensors", "jupyterlab", "papermill"} <= set(found) and "wandb" not in found


def test_wheel_brings_notebooks_and_papers(installed: Path) -> None:
    code = "from workbench import resources as r; print(r.shared('papers') / 'README.md', *map(r.notebook, r.notebooks()), sep='\\n')"
    found = [Path(line) for line in from_wheel(installed, "python", "-c", code).splitlines()]
    assert all(path.is_file() and path.is_relative_to(installed) for path in found)
    assert {path.name for path in found[1:]} == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    for kind in (
        "records/tuned-rates.json",
        "notebooks/sizes/*.yaml",
        "papers/*/claims/*.yaml",
        "papers/*/records/*.json",
    ):
        assert {path.name for path in found[0].parents[1].glob(kind)} == {path.name for path in ROOT.glob(kind)}


@pytest.mark.notebooks
def test_wheel_brings_the_kernel(installed: Path) -> None:
    listed = from_wheel(installed, "python", "-m", "jupyter_client.kernelspecapp", "list", "--json")
    specs = json.loads(listed)["kernelspecs"]
    assert Path(specs["workbench"]["resource_dir"]).is_relative_to(installed)
    assert specs["workbench"]["spec"]["display_name"] == "Workbench"
    assert {path.name for path in Path(specs["workbench"]["resource_dir"]).iterdir()} == {
        "kernel.json",
        "logo-64x64.png",
        "logo-svg.svg",
    }


@pytest.mark.notebooks
def test_wheel_brings_the_panel_of_jupyterlab(installed: Path) -> None:
    for name in ("sgd-workbench", "sgd-workbench-figures"):
        extension = installed / "share" / "jupyter" / "labextensions" / name
        entry = json.loads((extension / "package.json").read_text())["jupyterlab"]["_build"]["load"]
        assert (extension / entry).is_file()
    listed = from_wheel(installed, "python", "-m", "jupyter_server.extension.serverextension", "list")
    assert re.search(r"workbench\.lab .*OK", listed), listed


@pytest.mark.notebooks
def test_wheel_lets_plain_nbconvert_draw_figures(installed: Path) -> None:
    data = {"application/vnd.plotly.v1+json": {"data": [{"type": "scatter", "y": [1, 3]}], "layout": {}}}
    shown = nbformat.v4.new_output("display_data", data)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("figure", outputs=[shown, shown])])
    nbformat.write(notebook, installed / "figures.ipynb")
    # Nbconvert's own, which is not installed there
    templates = str(Path(sysconfig.get_path("data"), "share", "jupyter"))
    code = f"import os; os.environ['JUPYTER_PATH'] = {templates!r}; from nbconvert.nbconvertapp import main; main()"
    from_wheel(installed, "python", "-c", code, "--to", "html", "figures.ipynb")
    page = (installed / "figures.html").read_text()
    assert page.count("Plotly.newPlot(") == 2
    assert page.count("window.Plotly = Plotly") == 1, "its program once, so that no network is needed"


@pytest.mark.notebooks
@pytest.mark.parametrize("first", ["papermill", "workbench.experiments.papermill_engine"])
def test_wheel_brings_the_papermill_engine_whichever_is_imported_first(installed: Path, first: str) -> None:
    code = f"import {first}; from papermill.engines import papermill_engines as e; print(e.get_engine('workbench').__module__)"
    assert from_wheel(installed, "python", "-c", code).strip() == "workbench.experiments.papermill_entry"


@pytest.mark.notebooks
def test_papermill_runs_a_notebook_with_our_engine(installed: Path) -> None:
    parameters = nbformat.v4.new_code_cell("one: int = 1  # any", metadata={"tags": ["parameters"]})
    notebook = nbformat.v4.new_notebook(cells=[parameters, nbformat.v4.new_code_cell("print(one + 1)")])
    notebook.metadata["kernelspec"] = {"name": "workbench", "display_name": "Workbench", "language": "python"}
    nbformat.write(notebook, installed / "in.ipynb")
    from_wheel(
        installed, "python", "-m", "papermill", "--engine", "workbench", "in.ipynb", "out.ipynb", "-p", "one", "2"
    )
    assert nbformat.read(installed / "out.ipynb", as_version=4).cells[-1].outputs[0]["text"] == "3\n"


def test_wheel_brings_the_source_of_compiled_codecs(installed: Path) -> None:
    code = "from workbench.codecs import compiler; print(compiler.SOURCE.is_file(), compiler.SOURCE)"
    found = from_wheel(installed, "python", "-c", code)
    assert found.startswith("True") and str(installed) in found


def test_wheel_brings_the_command(installed: Path) -> None:
    assert "train" in from_wheel(installed, "workbench", "--help")


@pytest.mark.mpi
def test_mpich_wheel_lives_beside_open_mpi(mpich: dict[str, str]) -> None:
    code = "from mpi4py import MPI; c = MPI.COMM_WORLD; all = c.gather(MPI.Get_library_version().split()[0]); c.rank or print(*all)"
    mpiexec = shutil.which("mpiexec", path=mpich["PATH"])
    assert mpiexec
    command = [mpiexec, "-n", "2", sys.executable, "-c", code]
    result = subprocess.run(command, env={**os.environ, **mpich}, capture_output=True, text=True, timeout=100)
    assert result.stdout.split() == ["MPICH", "MPICH"], result.stderr


def test_a_type_checker_reads_the_types_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    """`py.typed` is in the wheel: without it, mypy takes nothing from an installed package."""
    (tmp_path / "program.py").write_text(
        "import workbench as wb\nfrom workbench.theory import Iterations\n\n"
        "found = Iterations(limit=1000.0, critical_workers=50.0)\nsteps: float = found(25)\n"
        'Iterations(limit="many", critical_workers=50.0)\nwords: str = found(25)\n'
        "wb.PipeSGD(width=2)\nwb.PipeSGD(widht=2)\nwb.PipeSDG()\n"
    )
    # Checking these takes minutes, and the program does not use them.
    ours = ["analysis", "callbacks", "clusters", "dashboard", "papers", "plots", "problems", "runtimes", "trace"]
    large = ["torch", "numpy", "scipy", "plotly", "mpi4py", *(f"workbench.{name}" for name in ours)]
    skipped = f"[mypy-{','.join(f'{name}.*' for name in large)}]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nfollow_imports = silent\n{skipped}")
    python = ("--python-executable", str(installed / "bin" / "python"))
    command = [sys.executable, "-m", "mypy", *python, "--cache-dir", str(tmp_path / "cache"), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    found = [(line.split(":")[1], line.rsplit("[")[-1].rstrip("]")) for line in errors]
    expected = [("6", "arg-type"), ("7", "assignment"), ("9", "call-arg"), ("10", "attr-defined")]
    assert found == expected, done.stdout + done.stderr
