"""`workbench reproduce`: notebooks one after the other on ranks that are lent to them, their records, and no process left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from tests.forked import forked
from tests.papers_share import (
    FIGURE,
    KEY,
    RANKS,
    commit,
    facts,
    finding,
    git,
    make_share,
    write_claims,
    write_notebook,
)
from workbench.experiments.notebooks import tagged_text
from workbench.papers.claims import find_claim
from workbench.papers.records import record_file, write_record

pytestmark = [pytest.mark.notebooks, pytest.mark.timeout(600)]

DIES = """import os, signal
from workbench import papers
with papers.ranks(2) as cluster:
    os.kill(cluster.ranks[0]["pid"], signal.SIGKILL)
    while cluster.state != "lost":
        pass"""


MEETS = """import pathlib, time
folder, mine = pathlib.Path({folder!r}), {name!r}
(folder / mine).touch()
while len(list(folder.iterdir())) < {number}:
    time.sleep(0.05)"""


def environment(share: Path) -> dict[str, str]:
    return {
        **os.environ,
        "WORKBENCH_SHARE": str(share),
        "WORKBENCH_RUNS": str(share.parent / "runs"),
        "WORKBENCH_SITE": "here",
    }


def reproduce(share: Path, *words: str, status: int = 0) -> tuple[str, str]:
    """(standard output, standard error) of `workbench reproduce`."""
    command = forked("-m", "workbench", "reproduce", *words)
    done = subprocess.run(command, env=environment(share), capture_output=True, text=True, timeout=550)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def share_with_ranks(folder: Path) -> Path:
    share = make_share(folder / "share")
    cells = {
        "20-one": ("ranks", RANKS),
        "22-two": ("ranks", RANKS),
        "30-dies": ("", DIES),
        "31-after": ("ranks", RANKS),
    }
    for name, cell in cells.items():
        write_notebook(share, name, cell, finding(name), ranks="['local:2', 'emulated:1gbit:2']")
    write_notebook(share, "23-fails", ("", "1 / 0"), finding("23-fails"))
    for name in (*cells, "23-fails"):
        write_claims(share, name)
    return share


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_notebooks_share_ranks_which_start_anew_when_one_has_killed_them(tmp_path: Path) -> None:
    share = share_with_ranks(tmp_path)
    _, told = reproduce(share, KEY, "-o", str(tmp_path / "out"), status=1)
    shown = {
        name: tagged_text(tmp_path / "out" / f"{name}.ipynb", "ranks").split()
        for name in ("20-one", "22-two", "31-after")
    }
    assert shown["20-one"] == shown["22-two"], "the same processes"
    assert len({*shown["20-one"], *shown["31-after"]}) == 6, "others, after these were killed"
    assert told.count("ranks emulated:1gbit:2 are not shared") == 1
    assert "ranks local:2 ended in the notebook before: they are restarted" in told
    order = re.findall(r"^\[\d of 5\] (\S+)", told, re.MULTILINE)
    assert order == ["23-fails", "20-one", "22-two", "30-dies", "31-after"], "those that share ranks follow each other"
    assert "failed after" in told and "ZeroDivisionError" in told
    records = sorted(path.name for path in (tmp_path / "out" / "papers" / KEY / "records").iterdir())
    assert records == [f"{name}.smoke.here.json" for name in ("20-one", "22-two", "30-dies", "31-after")]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "division by zero" in page and 'href="20-one.html"' in page


@pytest.mark.mpi
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.papers)])
@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_nothing_is_left_behind_whatever_ends_it(tmp_path: Path, how: signal.Signals) -> None:
    share = make_share(tmp_path / "share")
    slow = RANKS.replace(
        "print(", f"open({str(tmp_path / 'there')!r}, 'w').close(); import time; time.sleep(500); print("
    )
    write_notebook(share, "20-slow", ("ranks", slow), finding("20-slow"), ranks="['local:2']")
    write_claims(share, "20-slow")
    running = subprocess.Popen(
        [sys.executable, "-m", "workbench", "reproduce", KEY], env=environment(share), stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "there").exists():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        engines = [process for process in psutil.process_iter() if _is_engine(process, share)]
        assert len(engines) >= 2, "the ranks are there"
        running.send_signal(how)
        running.wait(120)
        assert running.returncode != 0
        _gone, alive = psutil.wait_procs(engines, 20)
        assert not alive
    finally:
        running.kill()
        running.communicate()


def _is_engine(process: psutil.Process, share: Path) -> bool:
    try:
        is_engine = any(word.startswith("workbench.clusters.engines.") for word in process.cmdline())
        return is_engine and process.environ().get("WORKBENCH_SHARE") == str(share)
    except psutil.Error:
        return False


@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_runs_of_notebooks_are_not_among_the_users(tmp_path: Path) -> None:
    share = make_share(tmp_path / "share")
    write_notebook(
        share, "20-one", ("store", "from workbench.trace.store import runs_root\nprint(runs_root())"), finding("20-one")
    )
    write_claims(share, "20-one")
    told, _ = reproduce(share, KEY, "-o", str(tmp_path / "out"))
    store = str(tmp_path / "out" / "runs")
    assert tagged_text(tmp_path / "out" / "20-one.ipynb", "store").strip() == store
    assert told.endswith(f"runs:    {store}\n")


@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_a_record_is_kept_and_what_has_one_is_not_done_again(tmp_path: Path) -> None:
    share = make_share(tmp_path / "share")
    write_notebook(share, "20-one", ("figure-ones", FIGURE), finding("20-one"))
    write_claims(share, "20-one")
    commit(share)
    path = share / "papers" / KEY / "records" / "20-one.ci.here.json"
    reproduce(share, "20-one", "--size", "ci", "--update")
    facts = json.loads(path.read_text())
    assert facts["findings"]["20-one-near-one"]["values"] == pytest.approx([1.0, 1.001, 1.002, 1.003, 1.004])
    assert facts["findings"]["20-one-near-one"]["verdict"] == "reproduced"
    assert (facts["command"], facts["parameters"]) == ("workbench reproduce 20-one --size ci", {"size": "ci"})
    assert facts["commit"] == {"sha": git(share, "rev-parse", "HEAD").strip(), "dirty": False}
    text = path.read_text()
    assert os.uname().nodename not in text and str(tmp_path) not in text, "no names of hosts, no paths"
    assert "is near one (sec. 1) `20-one-near-one` | reproduced |" in (share / "papers" / "README.md").read_text()
    if any(map(shutil.which, ("chromium", "google-chrome", "chromium-browser", "chrome"))):
        assert "one</text>" in (share / "papers" / KEY / "figures" / "20-one-ones.svg").read_text()
        assert "![20-one-ones](figures/20-one-ones.svg)" in (share / "papers" / KEY / "card.md").read_text()
    _, told = reproduce(share, KEY, "--size", "ci", "--update")
    assert "already recorded" in told
    written = path.stat().st_mtime_ns
    notebook = share / "notebooks" / "20-one.ipynb"
    changed = nbformat.read(notebook, as_version=4)
    changed.cells = [cell for cell in changed.cells if "figure-ones" not in cell.metadata.get("tags", [])]
    nbformat.write(changed, notebook)
    commit(share)
    _, told = reproduce(share, KEY, "--size", "ci", "--update")
    assert "already recorded" not in told and path.stat().st_mtime_ns > written, "another notebook of that name"


@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_a_session_is_added_and_the_answer_is_kept(tmp_path: Path) -> None:
    share = make_share(tmp_path / "share")
    told = 'papers.answer("The mean is {mean:.3f}.", mean=[scale * (1 + 0.001 * seed) for seed in seeds])'
    write_notebook(share, "20-one", finding("20-one"), ("told", told))
    write_claims(share, "20-one")
    commit(share)
    path = share / "papers" / KEY / "records" / "20-one.ci.here.json"
    words = (KEY, "--size", "ci", "--update", "--add-session")
    _, said = reproduce(share, *words, status=2)
    assert "20-one has no record at size ci on here: measure the first session without --add-session" in said
    reproduce(share, *words[:-1])
    reproduce(share, *words)
    facts = json.loads(path.read_text())
    found = facts["findings"]["20-one-near-one"]
    seeds = [*range(5), *range(100, 105)]
    assert found["sessions"] == [0] * 5 + [1] * 5 and found["seeds"] == seeds, "other seeds in each session"
    assert found["values"] == pytest.approx([1 + 0.001 * seed for seed in seeds])
    assert facts["answer"]["numbers"]["mean"] == pytest.approx(found["values"])
    assert len(facts["sessions"]) == 2 and facts["sessions"][0]["date"] <= facts["sessions"][1]["date"]
    assert (
        "**Answer** (size `ci`, [record](records/20-one.ci.here.json)). The mean is 1.052 [1.014, 1.090]."
        in (share / "papers" / KEY / "card.md").read_text()
    )
    notebook = share / "notebooks" / "20-one.ipynb"
    notebook.write_text(notebook.read_text().replace("0.001", "0.002"))
    commit(share)
    _, said = reproduce(share, *words, status=2)
    assert "20-one has a record of other code, parameters or expectations" in said


def share_that_meets(folder: Path, number: int, *names: str) -> Path:
    """Notebooks that measure nothing on a real clock. Each waits until `number` of them run."""
    share = make_share(folder / "share")
    (folder / "there").mkdir()
    for name in names:
        meets = MEETS.format(folder=str(folder / "there"), name=name, number=number)
        write_notebook(share, name, ("", meets), finding(name))
        with (share / "notebooks" / "sizes" / f"{name}.yaml").open("a") as file:
            file.write("clock: virtual\n")
        write_claims(share, name)
    return share


@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_notebooks_that_only_simulate_run_side_by_side_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = share_that_meets(tmp_path, 2, "20-one", "21-two")
    write_notebook(share, "22-fails", ("", "1 / 0"), finding("22-fails"))
    sizes = share / "notebooks" / "sizes" / "22-fails.yaml"
    sizes.write_text(sizes.read_text() + "clock: virtual\n")
    write_notebook(share, "30-real", finding("30-real"))
    for name in ("22-fails", "30-real"):
        write_claims(share, name)
    monkeypatch.setenv("WORKBENCH_SHARE", str(share))
    earlier = facts("21-two", find_claim(f"{KEY}/21-two-near-one"), "0" * 40, size="smoke", site="here", seconds=50.0)
    write_record(record_file(share / "papers", KEY, "21-two", "smoke", "here"), earlier)
    _, told = reproduce(share, KEY, "-o", str(tmp_path / "out"), "--jobs", "2", "--timeout", "200", status=1)
    order = re.findall(r"^\[\d of 4\] (\S+)", told, re.MULTILINE)
    assert order == ["30-real", "21-two", "20-one", "22-fails"], "what may be measured alone; then the longest first"
    records = sorted(path.name for path in (tmp_path / "out" / "papers" / KEY / "records").iterdir())
    assert records == [f"{name}.smoke.here.json" for name in ("20-one", "21-two", "30-real")]
    assert "22-fails failed after" in told and "ZeroDivisionError: division by zero" in told
    page = (tmp_path / "out" / "index.html").read_text()
    assert "division by zero" in page and 'href="21-two.html"' in page
    _, again = reproduce(share, KEY, "-o", str(tmp_path / "out"), "--jobs", "2", status=1)
    assert again.count("already recorded") == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_no_notebook_that_runs_beside_others_is_left_behind(tmp_path: Path, how: signal.Signals) -> None:
    share = share_that_meets(tmp_path, 3, "20-one", "21-two")
    command = [sys.executable, "-m", "workbench", "reproduce", KEY, "--jobs", "2"]
    running = subprocess.Popen(command, env=environment(share), stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 300
        while len(list((tmp_path / "there").iterdir())) < 2:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        children = [process for process in psutil.process_iter() if _has_share(process, share)]
        assert len(children) >= 4, "two commands and two kernels, at least"
        running.send_signal(how)
        running.wait(120)
        _gone, alive = psutil.wait_procs(children, 30)
        assert not alive
    finally:
        running.kill()
        running.communicate()


def _has_share(process: psutil.Process, share: Path) -> bool:
    try:
        return process.environ().get("WORKBENCH_SHARE") == str(share) and process.ppid() != os.getpid()
    except psutil.Error:
        return False
