"""The kernel whose cells run on ranks, over Jupyter's own protocol, with real MPI ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.notebooks.kernel_client import CELL_S, Notebook
from workbench.experiments.notebooks import run_notebook, tagged_text
from workbench.resources import notebook as notebook_path

pytestmark = [pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.timeout(300)]


def test_a_cell_runs_on_all_ranks_and_says_who_said_what(notebook: Notebook) -> None:
    text, error, _ = notebook.cell("print('rank', rank, 'of', world_size)\nprint(MPI.COMM_WORLD.allreduce(rank + 1))")
    assert error == ""
    assert text.splitlines()[-3:] == ["[0] rank 0 of 2", "[1] rank 1 of 2", "[0-1] 3"]


def test_variables_stay_on_their_ranks_and_local_cells_have_the_cluster(notebook: Notebook) -> None:
    assert notebook.cell("x = 10 * (rank + 1)\nx")[0].splitlines() == ["[0] 10", "[1] 20"]
    assert notebook.cell("%%rank 1\nprint(x)")[0] == "[1] 20\n"
    text, error, _ = notebook.cell("%%local\nprint('x' in globals(), cluster.num_ranks)")
    assert (text, error) == ("False 2\n", "")
    assert notebook.cell("%%local x\nprint(x + 1)")[0] == "11\n"
    assert notebook.cell("%%local x\nx / 0")[1].count("ZeroDivisionError: ") == 1
    assert notebook.cell("%%local y\nprint(y)")[1].startswith(
        "ConfigError: %%local y: it cannot be copied from rank 0 (NameError"
    )


def test_ranks_are_heard_that_have_said_all_before_their_answer_is_looked_at(notebook: Notebook) -> None:
    """ipyparallel makes the object of an answer once it has sent the question, which on a busy machine takes its time."""
    slow = (
        "import time\nfrom ipyparallel import AsyncResult\nkept = AsyncResult._init_futures\n"
        "AsyncResult._init_futures = lambda self: (time.sleep(0.5), kept(self))"
    )
    assert notebook.cell(f"%%local\n{slow}")[1] == ""
    try:
        assert notebook.cell("print('early', rank)\nrank")[0].splitlines() == [
            "[0] early 0",
            "[1] early 1",
            "[0] 0",
            "[1] 1",
        ]
    finally:
        assert notebook.cell("%%local\nAsyncResult._init_futures = kept")[1] == ""


def test_what_all_display_is_displayed_once_as_rich_as_it_is(notebook: Notebook) -> None:
    text, error, kinds = notebook.cell("from IPython.display import HTML\nHTML('<b>same</b>')")
    assert (text, error, kinds) == ("", "", ["text/html", "text/plain"])


def test_an_error_comes_with_its_rank_and_traceback_and_releases_the_others(notebook: Notebook) -> None:
    assert notebook.cell("x = 10 * (rank + 1)")[1] == ""
    begin = time.monotonic()
    text, error, _ = notebook.cell(
        "print('begun')\nif rank == 1:\n    raise ValueError('odd one')\nimport time\nwhile True:\n    time.sleep(0.01)"
    )
    assert "begun" in text
    assert "On rank 1:" in error
    assert "----> 3     raise ValueError('odd one')" in error
    assert error.splitlines()[-2:] == [
        "ValueError: odd one",
        "Interrupted, because they might have waited forever: rank 0",
    ]
    assert "workbench/kernel" not in error, "frames of ours tell nobody anything"
    assert time.monotonic() - begin < CELL_S / 2
    assert notebook.cell("print(x)")[0].splitlines() == ["[0] 10", "[1] 20"], (
        "ranks and their variables are still there"
    )


def test_the_same_error_of_all_ranks_is_told_once(notebook: Notebook) -> None:
    error = notebook.cell("undefined_name")[1]
    assert error.count("NameError: name 'undefined_name' is not defined") == 1
    assert "On ranks 0-1:" in error


def test_the_interrupt_button_reaches_the_ranks(notebook: Notebook) -> None:
    text, error, _ = notebook.cell(
        "import time\nfor i in range(10_000):\n    print('turn', i)\n    time.sleep(0.02)", interrupt_when="turn 3"
    )
    assert "[0-1] turn 3" in text
    assert "KeyboardInterrupt" in error
    assert notebook.cell("print(i < 9_000)")[0] == "[0-1] True\n"


def test_mistakes_are_one_line(notebook: Notebook) -> None:
    assert notebook.cell("%%rank 7\nx")[1] == "ConfigError: %%rank 7: there is no rank 7; the ranks are 0 to 1"
    assert notebook.cell("%%loacl\nx")[1] == "ConfigError: there is no %%loacl: did you mean %%local?"
    assert "a whole number" in notebook.cell("%ranks two")[1]


def test_rank_0_completes_and_explains_and_half_a_cell_is_not_complete(notebook: Notebook) -> None:
    notebook.cell("a_name_on_ranks = {'key': 1}")
    # The kernel waits for three seconds, in which a crowded machine's rank may not have imported Jedi
    deadline = time.monotonic() + 60
    while "a_name_on_ranks" not in (matches := notebook.ask("complete", "a_name_on", 9)["matches"]):
        assert time.monotonic() < deadline, matches
    found = notebook.ask("inspect", "a_name_on_ranks", 5)
    assert found["found"]
    assert "{'key': 1}" in found["data"]["text/plain"]
    assert notebook.ask("is_complete", "for i in x:")["status"] == "incomplete"
    assert notebook.ask("is_complete", "x = 1")["status"] == "complete"


def test_training_goes_on_behind_cells_that_wait_for_it(notebook: Notebook) -> None:
    text, error, _ = notebook.cell(
        "%%local\nimport workbench as wb\nfrom workbench import problems\n"
        "run = cluster.train(wb.SynchronousSGD(), problems.get('digits-softmax'), steps=3).wait()\nprint(run.status)"
    )
    assert (text, error) == ("finished\n", "")


def test_ranks_are_let_go_and_taken_up_again_with_their_variables(notebook: Notebook) -> None:
    notebook.cell("kept = 7 + rank")
    for _ in range(2):
        text, error, _ = notebook.cell("%detach")
        assert error == ""
        name = re.findall(r"%attach (\S+)", text)[0]
        text, error, _ = notebook.cell(f"%attach {name}\nprint(kept)")
        assert error == ""
        assert text.splitlines()[-2:] == ["[0] 7", "[1] 8"]
    _, error, kinds = notebook.cell("%status")
    assert (error, "text/html" in kinds) == ("", True)


def test_a_call_that_cannot_be_left_is_told_with_the_way_out(notebook: Notebook) -> None:
    error = notebook.cell("if rank == 1:\n    raise ValueError('gone')\nMPI.COMM_WORLD.recv(source=1)")[1]
    assert "ValueError: gone" in error
    assert "rank 0 does not react to an interrupt" in error
    assert "%restart_ranks" in error
    assert "does not react" in notebook.cell("print('queued')")[1]
    text, error, _ = notebook.cell("%restart_ranks\nprint('x' in globals(), rank)")
    assert error == ""
    assert text.splitlines()[-2:] == ["[0] False 0", "[1] False 1"]


@pytest.mark.usefixtures("no_process_left")
def test_a_killed_kernel_leaves_no_rank(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PATH", environment["JUPYTER_PATH"])
    notebook = Notebook(
        "workbench-mpi",
        {**environment, "WORKBENCH_TEST_MARK": os.environ["WORKBENCH_TEST_MARK"], "WORKBENCH_RANKS": "1"},
    )
    text = notebook.cell("import os\nprint(os.getpid())")[0]
    rank = int(text.split()[-1])
    os.kill(notebook.manager.provisioner.pid, signal.SIGKILL)  # type: ignore[union-attr]
    notebook.client.stop_channels()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{rank}").exists()
    notebook.manager.provisioner.process.wait()  # type: ignore[union-attr]
    notebook.manager.cleanup_resources()


def test_papermill_runs_it_and_the_console_too(environment: dict[str, str], tmp_path: Path) -> None:
    import nbformat

    cells = [
        nbformat.v4.new_code_cell("steps = 1", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("print(steps * (rank + 1))"),
    ]  # type: ignore[no-untyped-call]
    nbformat.write(
        nbformat.v4.new_notebook(
            cells=cells,
            metadata={"kernelspec": {"name": "workbench-mpi", "language": "python", "display_name": "Workbench MPI"}},
        ),
        tmp_path / "in.ipynb",
    )  # type: ignore[no-untyped-call]
    command = [sys.executable, "-m", "papermill", "-k", "workbench-mpi", "-p", "steps", "5", "in.ipynb", "out.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=CELL_S)
    assert done.returncode == 0, done.stderr
    ran = nbformat.read(tmp_path / "out.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    said = "".join(output.text for output in ran.cells[-1].outputs)
    assert said.splitlines()[-2:] == ["[0] 5", "[1] 10"]
    console = [sys.executable, "-m", "jupyter", "console", "--kernel", "workbench-mpi", "--simple-prompt"]
    typed = "print('from', rank)\nexit\n"
    done = subprocess.run(
        console,
        cwd=tmp_path,
        env={**environment, "WORKBENCH_RANKS": "1"},
        input=typed,
        capture_output=True,
        text=True,
        timeout=CELL_S,
    )
    assert "from 0" in done.stdout, done.stdout + done.stderr


def test_the_tour_of_this_kernel_runs(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_PATH", "WORKBENCH_RUNS", "WORKBENCH_RANKS", "PYTHONPATH"):
            patch.setenv(name, environment[name])
        executed = run_notebook(
            notebook_path("02-mpi-kernel"), tmp_path / "out.ipynb", {"steps": 3, "elements": 1000}, timeout_s=CELL_S
        )
    assert tagged_text(executed, "answer").endswith("sent 1.000 of the gradient's bytes; 2 (p - 1) / p = 1.000")
    found = re.search(r"largest difference (\d\.\de[+-]\d+)", executed.read_text())
    assert found is not None
    assert float(found[1]) <= 1e-14, "two sums of a few normal numbers, in another order"
    assert "application/vnd.plotly.v1+json" in executed.read_text()
