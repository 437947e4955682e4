"""Forbidden in the package: to unpickle, evaluate, or give text to a shell; to show names as markup; to leave keys readable."""

from __future__ import annotations

import ast
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.unit.hostile import MARKUP
from workbench.analysis.table import Column, Table
from workbench.clusters.supervision import registry
from workbench.errors import LaunchError
from workbench.trace import MemoryRecorder, Run

PACKAGE = Path(workbench.__file__).parent
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
OBJECTS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
# Mpi4py's lower-case ones
MPI_PICKLES = {
    "allgather",
    "bcast",
    "gather",
    "scatter",
    "alltoall",
    "allreduce",
    "sendrecv",
    "isend",
    "irecv",
}

FRAMES = "its connections carry frames of bytes between a process and its own child, and no objects: see `_call`"
ALLOWED = {  # each with its reason
    "cli/completion.py: a shell": "`shell=` is the name of the shell whose script argcomplete returns: nothing is run",
    "clusters/jobs.py: cloudpickle": "jobs travel to the engines over ipyparallel's own channel, which is authenticated",
    "clusters/engines/remote.py: cloudpickle": "the engine's end of that channel",
    "clusters/engines/engines.py: cloudpickle": "a detached cluster's launcher; only its owner can write there (`registry.check_trusted`)",
    "clusters/engines/engine_process.py: pickle": "from a process to its own fork, over a pipe that nobody else holds",
    "clusters/local/fork_server.py: multiprocessing": FRAMES,
    "experiments/fork_cells.py: multiprocessing": FRAMES,
    "papers/studies/all_cores.py: multiprocessing": "the context of a pool: a notebook and the processes that it started",
    "runtimes/user_loop/record_command.py: multiprocessing": "`Finalize` alone, a call at the process's end: nothing is read",
    "experiments/yaml_file.py: yaml.Loader": "our loader is a SafeLoader, with fewer values and not more",
}


def findings() -> Iterator[str]:
    """ "file: what" of all that could run what it reads."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for what in faults(ast.parse(path.read_text())):
            yield f"{name}: {what}"


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from {alias.name.split(".")[0] for alias in node.names} & PICKLES
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                yield module.split(".")[0]
            case ast.ClassDef(bases=bases):
                yield from (
                    "yaml.Loader"
                    for base in bases
                    if ast.unparse(base).startswith("yaml.") and ast.unparse(base).endswith("Loader")
                )
            case ast.Call(func=ast.Name(id=called)) if called in RUNS_CODE:
                yield called
            case ast.Call(func=func, keywords=keywords):
                yield from _call(ast.unparse(func), {str(key.arg): ast.unparse(key.value) for key in keywords})
            case ast.Attribute(attr=attribute) if attribute in OBJECTS:
                yield attribute


def _call(called: str, options: dict[str, str]) -> Iterator[str]:
    last = called.rpartition(".")[2]
    if called.endswith(("channel.send", "channel.recv")):
        yield called
    if called == "torch.load" and options.get("weights_only") != "True":
        yield "torch.load"
    if called in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
        yield "np.load"
    if called.startswith("yaml.") and last in ("load", "load_all", "unsafe_load", "full_load"):
        yield called
    if called in SHELLS or options.get("shell", "False") != "False":
        yield "a shell"
    if last in MPI_PICKLES and "comm" in called.rpartition(".")[0].lower():
        yield f"mpi4py {last}"
    if last in ("extractall", "mktemp"):
        yield last


def test_nothing_that_is_read_can_be_run() -> None:
    assert sorted(set(findings())) == sorted(ALLOWED), "say why on the list, or find another way"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "class L(yaml.UnsafeLoader): ...",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "self._comm.allgather(text)",
        "dist.all_gather_object(out, x)",
        "archive.extractall()",
    ],
)
def test_each_of_them_would_be_found(code: str) -> None:
    assert list(faults(ast.parse(code)))
    assert not list(
        faults(ast.parse("torch.load(p, weights_only=True); np.load(p); self._comm.Allgather(a, b); model.eval()"))
    )


# ---------------------------------------------------------------- names are shown as they are


def hostile_run(name: str = MARKUP) -> Run:
    """A run all of whose names are markup."""
    recorders = [MemoryRecorder(rank) for rank in range(2)]
    for recorder in recorders:
        for step in range(4):
            at = 0.1 * step
            recorder.span("forward", name, at, at + 0.03, step)
            recorder.span("backward", name, at + 0.03, at + 0.06, step)
            recorder.span("send", f"comm {name}", at + 0.06, at + 0.08, step, 0, 64, 1 - recorder.rank)
            recorder.span("recv", f"comm {name}", at + 0.06, at + 0.09, step, 0, 64, 1 - recorder.rank)
            row = {"step": step, "seconds": at + 0.1, "samples": 8 * step, "bytes_sent": 64 * step}
            recorder.metrics({**row, "loss": 2.0 / (step + 1), "num_samples": 4, "staleness": 0, "lr": 0.1})
        recorder.metrics({**row, "evaluation": {"loss_sum": 5.0, "correct": 3, "judged": 4, "count": 4}})
    algorithm = {"name": name, "settings": {name: 2, "collective": name}, "defaults": []}
    info = {
        "id": name,
        "algorithm": algorithm,
        "problem": {"name": name},
        "runtime": name,
        "status": "failed",
        "error": name,
        "num_workers": 2,
    }
    return Run.from_memory({**info, "clock": "wall", "settings": {"optimizer": name}}, recorders)


def shown_texts(value: Any) -> Iterator[str]:
    """All texts of a figure that may be drawn; a legend's groups are keys, and are not."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key != "legendgroup":
                yield from shown_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from shown_texts(item)
    elif isinstance(value, str):
        yield value


@pytest.mark.notebooks
def test_figures_and_tables_escape_every_name() -> None:
    from workbench import plots
    from workbench.analysis import compare, run_critical_path, run_overlap, run_parts
    from workbench.plots.live.buttons import error_line
    from workbench.plots.live.curves import status_table

    run, other = hostile_run(), hostile_run("SynchronousSGD")
    figures = [
        plots.curves([run, other], "steps"),
        plots.convergence([run, other]),
        plots.timeline(run, slice(0, 3), critical=True),
        plots.timelines([run, other], names=[MARKUP, "b"]),
        plots.overlap_bars([run, other]),
        plots.per_step(run),
    ]
    for number, figure in enumerate(figures):
        shown = list(shown_texts(json.loads(figure.to_json())))
        assert [text for text in shown if "<script" in text] == [], f"figure {number}"
        assert any("&lt;script" in text for text in shown), f"figure {number} shows the name"
    tables = [compare([run, other]), status_table([run]), run_overlap(run), run_critical_path(run), run_parts(run)]
    pages = [table._repr_html_() for table in tables] + [error_line(RuntimeError(MARKUP))]
    pages.append(Table([{"a": MARKUP}], (Column("a", MARKUP),), caption=MARKUP)._repr_html_())
    assert [page for page in pages if "<script" in page] == []
    assert "&lt;script" in pages[0]


def test_a_table_in_a_terminal_obeys_no_name() -> None:
    """A run called so would clear the screen, or write another line over this one."""
    text = str(Table([{"run": "\x1b[2J\x1b]0;harmed\x07\rover\x9b2J"}], (Column("run", "run"),)))
    assert not set(text) & set("\x1b\x07\r\x9b") and "over" in text


# ---------------------------------------------------------------- files that other users must not write


def test_a_pickle_is_read_from_a_folder_of_ones_own_alone(tmp_path: Path) -> None:
    """Another user who could write there could run any code as this user."""
    folder = tmp_path / "cluster"
    folder.mkdir(mode=0o700)
    path = folder / registry.LAUNCHER
    path.write_bytes(b"x")
    path.chmod(0o600)
    assert registry.check_trusted(path) == path
    for place, mode in ((path, 0o622), (folder, 0o777)):
        before = stat.S_IMODE(place.stat().st_mode)
        place.chmod(mode)
        with pytest.raises(LaunchError, match="others can write"):
            registry.check_trusted(path)
        place.chmod(before)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(LaunchError, match="belongs to another user"):
            registry.check_trusted(path)


def test_the_folder_of_clusters_is_for_its_owner_alone() -> None:
    source = (PACKAGE / "clusters" / "engines" / "engines.py").read_text()
    assert "mode=0o700" in source


def test_nothing_secret_is_committed() -> None:
    """Kernelspecs start no server without a token, and no file of ours holds a key."""
    root = PACKAGE.parent
    if not (root / "notebooks").is_dir():
        pytest.skip("an installed package has no checkout")
    words = (
        "disable_check_xsrf",
        "--NotebookApp.token=",
        "--ServerApp.token=",
        "--IdentityProvider.token=",
        "allow_origin='*'",
        "BEGIN PRIVATE KEY",
    )
    found: list[Any] = []
    for path in [
        *root.glob("kernels/**/*"),
        *root.glob("notebooks/*.ipynb"),
        root / "Makefile",
        *PACKAGE.rglob("*.py"),
    ]:
        if path.is_file():
            text = path.read_text(errors="replace")
            found += [(str(path.relative_to(root)), word) for word in words if word in text]
    assert found == []
    for path in root.glob("kernels/*/kernel.json"):
        assert all("token" not in word for word in json.loads(path.read_text())["argv"])
