"""Notebooks from a shell: a record next to them says how they ended, and no process that they started outlives them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
import zmq
from traitlets.config import Config

from tests.forked import forked
from workbench import resources
from workbench.cli.main import main
from workbench.errors import ConfigError
from workbench.experiments.execution_record import read_record
from workbench.experiments.notebook_catalogue import notebooks_about, parameters_of
from workbench.experiments.papermill_engine import _encrypted
from workbench.plots import for_nbconvert

LINES = """\
import subprocess, sys, pathlib, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
pathlib.Path(here).write_text("running")
if how == "raise":
    raise ZeroDivisionError("no such thing")
while how == "stay":
    time.sleep(0.1)
child.pid > 0"""
pytestmark = [pytest.mark.notebooks, pytest.mark.usefixtures("forked_kernels", "runs")]


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """A notebook that starts a process in a session of its own, and then returns, raises, or stays."""
    parameters = nbformat.v4.new_code_cell(
        'how: str = "return"  # what then\nhere: str = ""  # file', metadata={"tags": ["parameters"]}
    )
    content = nbformat.v4.new_notebook(cells=[parameters, nbformat.v4.new_code_cell(LINES)])
    content.metadata["kernelspec"] = {"name": "workbench", "display_name": "Workbench", "language": "python"}
    nbformat.write(content, tmp_path / "in.ipynb")
    return tmp_path / "in.ipynb"


def command(notebook: Path, how: str, *more: str, python: Sequence[str] = ()) -> list[str]:
    (notebook.parent / "parameters.yaml").write_text(f"how: {how}\nhere: {notebook.parent / 'here'}\n")
    output = str(notebook.parent / "out.ipynb")
    words = ["-m", "workbench", "notebook", "run", str(notebook), "-f", str(notebook.parent / "parameters.yaml")]
    return [*(python or forked()), *words, "-o", output, *more]


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize(
    ("how", "more", "status", "words"),
    [("return", (), 0, "finished"), ("raise", (), 2, "failed"), ("stay", ("--timeout", "4"), 2, "timed out")],
)
def test_the_record_says_how_it_ended(notebook: Path, how: str, more: tuple[str, ...], status: int, words: str) -> None:
    done = subprocess.run(command(notebook, how, *more), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == status, done.stderr
    record = read_record(notebook.parent / "out.ipynb")
    assert record["status"] == words
    assert record["parameters"]["how"] == how
    assert record["started"] < record["ended"]
    assert {"python", "papermill", "torch"} <= set(record["versions"])
    assert ("ZeroDivisionError: no such thing" in str(record["error"])) == (how == "raise")
    assert (notebook.parent / "out.html").exists() == (how == "return")


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize(("sign", "words"), [(signal.SIGTERM, "terminated"), (signal.SIGKILL, "killed")])
def test_ended_by_a_signal_it_leaves_no_process(notebook: Path, sign: signal.Signals, words: str) -> None:
    """With an interpreter as a user starts it."""
    begin = command(notebook, "stay", python=[sys.executable])
    process = subprocess.Popen(begin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (notebook.parent / "here").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(sign)
    process.communicate(timeout=30)
    assert process.returncode == {"terminated": 143, "killed": -9}[words]
    assert read_record(notebook.parent / "out.ipynb")["status"] == words


@pytest.mark.usefixtures("no_process_left")
def test_a_terminated_reproduction_says_so_in_a_line_and_leaves_no_process(tmp_path: Path) -> None:
    """The kernel computes at that moment: asked to shut down, it would print a traceback of its sockets."""
    output = tmp_path / "out"
    words = ["reproduce", "10-scaling", "-o", str(output), "--again"]
    process = subprocess.Popen(
        forked("-m", "workbench", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not _computes(output / "10-scaling.ipynb"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143
    lines = [line for line in said.splitlines() if "this machine was busy" not in line]  # other tests run beside
    assert lines == ["[1 of 1] 10-scaling (smoke)", "workbench: terminated"]


def _computes(path: Path) -> bool:
    """Whether three cells of code have begun."""
    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception:  # noqa: BLE001 - not there yet, or half written
        return False
    begun = [
        cell for cell in cells if cell.cell_type == "code" and (cell.metadata.get("papermill") or {}).get("start_time")
    ]
    return len(begun) >= 3


@pytest.mark.parametrize("engine", ["workbench notebook run", "papermill --engine workbench"])
def test_what_is_said_to_a_kernel_is_encrypted(tmp_path: Path, engine: str) -> None:
    """Its ports are open to all users of the machine, and ipykernel warns about a notebook without it."""
    lines = "from ipykernel.kernelapp import IPKernelApp\nprint('encrypted', IPKernelApp.instance().curve_secretkey is not None)"
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(lines)])
    content.metadata["kernelspec"] = {"name": "workbench", "display_name": "Workbench", "language": "python"}
    nbformat.write(content, tmp_path / "in.ipynb")
    paths = [str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb")]
    ways = {"workbench notebook run": forked("-m", "workbench", "notebook", "run", paths[0], "-o", paths[1])}
    ways["papermill --engine workbench"] = forked("-m", "papermill", "--engine", "workbench", *paths)
    done = subprocess.run(ways[engine], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    [cell] = nbformat.read(paths[1], as_version=4).cells
    assert [item["text"] for item in cell.outputs] == ["encrypted True\n"]


@pytest.mark.parametrize("curve", [True, False])
def test_a_callers_own_settings_stand_beside_the_encryption(monkeypatch: pytest.MonkeyPatch, curve: bool) -> None:
    """And where pyzmq was built without CURVE a kernel manager refuses to be made with it, so nothing is asked for."""
    monkeypatch.setattr(zmq, "has", lambda what: curve and what == "curve")
    encrypted = {"transport_encryption": "auto"} if curve else {}
    assert _encrypted(None) == ({"KernelManager": encrypted} if curve else {})
    assert _encrypted(Config(KernelManager={"ip": "127.0.0.2"})) == {"KernelManager": encrypted | {"ip": "127.0.0.2"}}
    assert _encrypted(Config(KernelManager={"transport_encryption": "required"})) == {
        "KernelManager": {"transport_encryption": "required"}
    }


def test_list_tells_names_types_defaults_and_comments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["notebook", "list", "--json"]) == 0
    found: dict[str, Any] = {about["name"]: about for about in map(json.loads, capsys.readouterr().out.splitlines())}
    assert tuple(found) == resources.notebooks()
    assert found["00-tour"]["question"].endswith("?")
    workers = {"name": "workers", "type": "int", "default": "4"}
    assert workers.items() <= found["00-tour"]["parameters"][0].items()
    for name in resources.notebooks():
        assert all(parameter.type and parameter.comment for parameter in parameters_of(resources.notebook(name)))


def test_reproduce_knows_which_notebooks_are_about_a_paper_and_says_where_none_is() -> None:
    assert resources.notebook("12-stragglers") in notebooks_about("chen2016revisiting")
    assert notebooks_about("00-tour") == (resources.notebook("00-tour"),)
    with pytest.raises(ConfigError, match=r"no notebook is about alistarh2017qsgd yet .*card\.md.*chen2016revisiting"):
        notebooks_about("alistarh2017qsgd")
    with pytest.raises(ConfigError, match="did you mean li2018pipesgd"):
        notebooks_about("li2018pipesg")


@pytest.mark.parametrize("words", [("list",), ("run",)])
def test_what_is_no_notebook_is_told_in_a_line(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.ipynb").write_text("no JSON")
    assert main(["notebook", *words, str(tmp_path / "bad.ipynb")]) == 2
    assert "bad.ipynb is not a notebook" in capsys.readouterr().err


def test_the_page_does_not_take_the_notebooks_place(
    notebook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.ipynb").mkdir()
    for output in ("out.html", "folder.ipynb", "."):
        assert main(["notebook", "run", str(notebook), "-o", str(tmp_path / output)]) == 2
        assert "name a file that ends in .ipynb" in capsys.readouterr().err


@pytest.mark.browser
def test_plain_nbconvert_draws_figures_without_a_network(tmp_path: Path) -> None:
    data = {"application/vnd.plotly.v1+json": {"data": [{"type": "scatter", "y": [1, 3]}], "layout": {}}}
    cells = [
        nbformat.v4.new_code_cell("figure", outputs=[nbformat.v4.new_output("display_data", data)]) for _ in range(2)
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "in.ipynb")
    config = Path(for_nbconvert.__file__).parent  # the wheel puts the file into the environment's own folder
    jupyter = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "html", "in.ipynb"]
    subprocess.run(
        jupyter,
        cwd=tmp_path,
        env={**os.environ, "JUPYTER_CONFIG_PATH": str(config)},
        check=True,
        timeout=100,
        capture_output=True,
    )
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))))
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=15000",
    )
    page = (tmp_path / "in.html").as_uri()
    drawn = subprocess.run(
        [browser, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=100, check=True
    ).stdout
    assert drawn.count("scatterlayer") >= 2, "both figures, of one program"
    assert (tmp_path / "in.html").stat().st_size < 8_000_000
