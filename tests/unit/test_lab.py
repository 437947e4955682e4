"""The server extension of the panel in JupyterLab: who is answered, what is listed, and that commands reach a run."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import http.cookiejar
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyter_server", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from tornado import web

from tests.forked import forked
from tests.unit.lab_server import BASE, ROOT, TOKEN, Served, serving, write_run
from tests.waiting import within
from workbench.bench.spans import write_trace
from workbench.errors import ConfigError, RunNotFound
from workbench.lab import live_curve, run_rows
from workbench.lab.handlers import Handler, State
from workbench.lab.live_curve import MAX_BINS, LiveCurve
from workbench.lab.run_rows import RunRows
from workbench.lab.run_timeline import RunTimelines
from workbench.lab.snippets import DEFAULTS, run_code
from workbench.plots.trace_viewer.newest import NUM_STEPS
from workbench.settings import Settings
from workbench.trace.files.text import open_file
from workbench.trace.processes import this_process
from workbench.trace.read import metrics_paths
from workbench.trace.run import Run
from workbench.trace.store import read_info

pytestmark = pytest.mark.notebooks

CREATED = "2026-01-01T00:00:00+00:00"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


# ---------------------------------------------------------------- who is answered


READS = [
    *("clusters", "clusters/any/log", "clusters/any/ranks", "compare?run=any"),
    *("runs", "runs/any", "runs/any/code", "runs/any/checkpoints", "runs/any/ranks", "runs/any/timeline"),
    "timeline.js",
]


@pytest.mark.parametrize("path", READS)
def test_without_a_token_nothing_is_read(served: Served, path: str) -> None:
    assert served.ask(path, token=None)[0] == 403
    assert served.ask(path, token="wrong")[0] == 403


@pytest.mark.parametrize("path", ["runs/any/stop", "clusters/any/stop", "clusters/any/scale", "clusters/any/heal"])
def test_without_a_token_nothing_is_changed(served: Served, path: str) -> None:
    assert served.ask(path, "POST", token=None)[0] == 403
    forged = {"Cookie": f"_xsrf={'a' * 32}", "X-XSRFToken": "a" * 32}
    assert served.ask(path, "POST", token=None, headers=forged)[0] == 403


def test_a_cookie_alone_changes_nothing(served: Served) -> None:
    """A page of another site can send the browser's cookies, and cannot read the XSRF token."""
    folder = write_run(served.runs, "paused-by-nobody", created="2026-01-01T00:00:00+00:00", status="running")
    cookies = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
    opener.open(f"{served.url}api/status?token={TOKEN}", timeout=30).close()
    assert opener.open(f"{served.url}workbench/api/runs", timeout=30).status == 200, "the cookie is enough to read"
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(
            urllib.request.Request(f"{served.url}workbench/api/runs/{folder.name}/pause", method="POST"), timeout=30
        )
    refused.value.close()
    assert refused.value.code == 403
    assert not (folder / "control.jsonl").exists()


def test_a_command_is_a_post(served: Served) -> None:
    assert served.ask("runs/any/stop", "GET")[0] == 405
    assert served.ask("clusters/any/stop", "GET")[0] == 405


def test_it_answers_below_the_base_url_only(served: Served) -> None:
    assert served.ask("clusters")[0] == 200
    with pytest.raises(urllib.error.HTTPError) as missing:
        urllib.request.urlopen(f"{served.url.removesuffix(BASE)}/workbench/api/clusters?token={TOKEN}", timeout=30)
    missing.value.close()
    assert missing.value.code == 404


def test_polling_is_no_activity(served: Served) -> None:
    """A server may end without activity, and the panel polls while it is shown."""

    def last() -> str:
        with urllib.request.urlopen(f"{served.url}api/status?token={TOKEN}", timeout=30) as answer:
            return str(json.loads(answer.read())["last_activity"])

    before = last()
    served.ask("runs")
    served.ask("clusters")
    assert last() == before


@pytest.mark.parametrize(
    "name", ["..%2Foutside", "..%2F..%2Fetc", "%2e%2e", ".index.jsonl", "a%00b", "%2Fetc%2Fpasswd", "."]
)
def test_a_name_leads_to_no_other_folder(served: Served, name: str) -> None:
    outside = served.folder / "outside"
    if not outside.exists():
        write_run(served.folder, "outside", created="2026-01-01T00:00:00+00:00", status="running")
    for path, method in ((f"runs/{name}", "GET"), (f"runs/{name}/code", "GET"), (f"runs/{name}/stop", "POST")):
        status, answer = served.ask(path, method)
        assert status in (400, 404), path
        assert "outside" not in answer.get("message", "") or "cannot be the name" in answer["message"]
    assert served.ask(f"clusters/{name}/log")[0] == 404
    assert not (outside / "control.jsonl").exists()


def test_a_wrong_name_or_number_is_told_in_one_sentence(served: Served) -> None:
    status, answer = served.ask("runs/no-such-100%25-run")
    assert (status, answer) == (
        404,
        {"message": "there is no run no-such-100%-run: it was removed, or it is in another run store"},
    )
    status, answer = served.ask("runs?limit=many")
    assert (status, answer) == (400, {"message": "limit='many': give a whole number from 1 to 1000000"})
    status, answer = served.ask("runs/any/checkpoint", "POST")
    assert status == 400 and "`stop` writes a checkpoint" in answer["message"]
    status, answer = served.ask("clusters/nobody/scale?ranks=2", "POST")
    assert status == 404 and "there is no cluster nobody" in answer["message"]
    status, answer = served.ask("clusters/nobody/scale?ranks=0", "POST")
    assert (status, answer) == (400, {"message": "ranks='0': give a whole number from 1 to 4096"})
    status, answer = served.ask("compare")
    assert (status, answer) == (400, {"message": "give 1 to 200 runs to compare, not 0"})
    assert served.ask("compare?run=..%2Foutside")[0] == 400
    status, answer = served.ask("clusters/nobody/stop", "POST")
    assert status == 404 and "there is no cluster nobody" in answer["message"]


# ---------------------------------------------------------------- runs


def test_a_run_that_ended_takes_no_command(served: Served) -> None:
    folder = write_run(served.runs, "over", created="2026-01-01T00:00:00+00:00")
    status, answer = served.ask("runs/over/pause", "POST")
    assert status == 400 and "has ended (finished)" in answer["message"]
    assert not (folder / "control.jsonl").exists()


def test_a_loop_of_the_user_takes_no_command(served: Served) -> None:
    """It would wait for ever: such a loop does not read the file of commands."""
    own = {"status": "running", "runtime": "torch.distributed gloo"}
    folder = write_run(served.runs, "loop", created="2026-01-01T00:00:00+00:00", **own)
    status, answer = served.ask("runs/loop/pause", "POST")
    assert status == 400 and "your own loop" in answer["message"]
    assert not (folder / "control.jsonl").exists()


def test_a_run_is_answered_with_its_curves_and_code(served: Served) -> None:
    write_run(
        served.runs, "one", created="2026-01-01T00:00:00+00:00", losses=(2.0, float("nan"), 0.5), notes=["careful"]
    )
    (served.runs / "one" / "failed-00001.json").write_text(
        json.dumps({"rank": 1, "error": "bad", "traceback": "Trace"})
    )
    status, answer = served.ask("runs/one")
    assert status == 200
    assert answer["loss"] == {"steps": [1, 2, 3], "seconds": pytest.approx([0.1, 0.2, 0.3]), "values": [2.0, None, 0.5]}
    assert answer["evaluations"] == {
        "steps": [3],
        "seconds": [pytest.approx(0.3)],
        "test_loss": [0.4],
        "accuracy": [0.9],
    }
    assert answer["failures"] == [{"rank": 1, "error": "bad", "traceback": "Trace"}]
    assert (answer["run"]["accuracy"], answer["run"]["num_steps"], answer["notes"]) == (0.9, 3, ["careful"])
    assert answer["steps_per_epoch"] is None, "the record does not have it"
    status, code = served.ask("runs/one/code")
    assert status == 200 and set(code) == {"open", "repeat"}
    assert repr(str(served.runs / "one")) in code["open"]


def test_the_server_accepts_the_version_that_it_gave(served: Served) -> None:
    write_run(served.runs, "first", created=CREATED)
    version = served.ask("runs")[1]["version"]
    status, answer = served.ask(f"runs?after={version}")
    assert (status, answer.get("runs")) == (200, []), answer


def test_ranks_checkpoints_and_a_comparison_are_answered(served: Served) -> None:
    for seed in (0, 1):
        settings = {"steps": 3, "lr": 0.1, "seed": seed}
        folder = write_run(served.runs, f"seed-{seed}", created="2026-01-01T00:00:00+00:00", settings=settings)
    _, answer = served.ask("runs/seed-1/ranks")
    assert [(row["rank"], row["state"], row["step"]) for row in answer["ranks"]] == [(0, "ended", 3), (1, "ended", 3)]
    (folder / "checkpoints").mkdir()
    for rank in range(2):
        for name in ("step-00000001", "stop"):
            record = {"num_workers": 2, "step": 2, "format": 8}
            (folder / "checkpoints" / f"{name}-rank-{rank:05d}.json").write_text(json.dumps(record))
        (folder / f"checkpoint-{rank:05d}.pt").write_bytes(b"")
    assert served.ask("runs/seed-1/checkpoints")[1] == {"steps": [3, 2]}
    assert served.ask("runs/seed-0/checkpoints")[1] == {"steps": []}
    code = served.ask("runs/seed-1/code?after=2")[1]
    assert f"resume={str(folder) + '@2'!r})" in code["branch"] and f"resume={str(folder)!r})" in code["continue"]
    (series,) = served.ask("compare?run=seed-0&run=seed-1")[1]["series"]
    assert (series["runs"], len(series["curves"]["train_loss"]["low"])) == (["seed-0", "seed-1"], 3)
    rows = served.ask("runs")[1]
    groups = {row["run"]: row["group"] for row in rows["runs"]}
    assert groups["seed-0"] == groups["seed-1"]
    status, later = served.ask(f"runs?after={rows['version']}")
    assert (status, later["runs"]) == (200, []), "nothing has changed since then"


def traced(source: Path, folder: Path, num_steps: int, **info: Any) -> None:
    """Write a run of two ranks with a trace, older than others."""
    shutil.copytree(write_trace(source, num_ranks=2, num_steps=num_steps), folder)
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, "created": "2026-01-01T00:00:00+00:00", **info}))


def test_a_timeline_is_answered_for_any_steps_and_for_two_runs(served: Served, tmp_path: Path) -> None:
    for name in ("trace-a", "trace-b"):
        traced(tmp_path / name, served.runs / name, num_steps=30)
    status, answer = served.ask("runs/trace-a/timeline")
    (run,) = answer["runs"]
    assert status == 200 and not answer["live"] and run["steps"] == list(range(30)) and "path" not in run
    (run,) = served.ask("runs/trace-a/timeline?first=10&last=12&critical=1")[1]["runs"]
    assert run["steps"] == [10, 11] and run["path"]
    both = served.ask("runs/trace-a/timeline?other=trace-b&first=3&last=6")[1]
    assert [run["steps"] for run in both["runs"]] == [[3, 4, 5]] * 2
    assert both["difference"]["cells"][0][3] == "0 s", "equal runs"
    for path, words in (("?first=90&last=95", "steps 0 to 29"), ("?other=no-such", "there is no run no-such")):
        status, answer = served.ask(f"runs/trace-a/timeline{path}")
        assert status in (400, 404) and words in answer["message"], path


def test_a_run_that_trains_is_answered_with_its_newest_steps(served: Served, tmp_path: Path) -> None:
    traced(tmp_path, served.runs / "trains", num_steps=60, status="running", process=this_process())
    answer = served.ask("runs/trains/timeline")[1]
    assert answer["live"] and answer["runs"][0]["steps"] == list(range(59 - NUM_STEPS, 59)), "without the last"
    answer = served.ask("runs/trains/timeline?first=5&last=8")[1]
    assert not answer["live"] and answer["runs"][0]["steps"] == [5, 6, 7]


def test_a_run_that_trains_without_a_trace_has_the_reason(tmp_path: Path) -> None:
    """Not that there is no step yet: there will be none."""
    settings = {"steps": 3, "trace_steps": 0}
    folder = write_run(tmp_path, "a", created=CREATED, status="running", process=this_process(), settings=settings)
    with pytest.raises(ConfigError, match="has no trace, because of trace_steps=0"):
        RunTimelines().of([folder], None, critical=False)


def test_a_thousand_runs_are_listed_at_once_the_second_time(served: Served) -> None:
    for number in range(1000):
        write_run(
            served.runs, f"made-{number:04d}", created=f"2026-02-01T00:{number // 60:02d}:{number % 60:02d}+00:00"
        )
    status, first = served.ask("runs")
    assert status == 200 and first["num_runs"] == len(first["runs"]) >= 1000
    newest = next(row for row in first["runs"] if row["run"].startswith("made-"))
    assert (newest["run"], newest["label"], newest["accuracy"]) == ("made-0999", "PipeSGD(width=2)", 0.9)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        _, again = served.ask("runs?limit=30&curves=1")
        seconds.append(time.perf_counter() - begin)
    assert len(again["runs"]) == 30 and again["num_runs"] == first["num_runs"]
    assert min(seconds) < 0.3
    assert within(30, lambda: not served.ask("runs?limit=30&curves=1")[1]["pending"])
    curves = {row["run"]: row["curve"] for row in served.ask("runs?limit=30&curves=1")[1]["runs"]}
    assert curves["made-0999"] == [2.0, 1.0, 0.5]


def test_only_rows_that_changed_are_read_and_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()

    def counted(folder: Path) -> dict[str, Any]:
        read.append(folder.name)
        return read_info(folder)

    monkeypatch.setattr(run_rows, "read_info", counted)
    rows = RunRows()
    for name in "ab":
        write_run(tmp_path, name, created=f"2026-01-0{1 + (name == 'b')}T00:00:00+00:00")
    first = rows.select([tmp_path])
    assert [row["run"] for row in first["runs"]] == ["b", "a"]
    assert rows.select([tmp_path], after=first["version"])["runs"] == []
    assert sorted(read) == ["a", "b"], "once each"
    info = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps({**info, "status": "stopped"}))
    changed = rows.select([tmp_path], after=first["version"])
    assert [(row["run"], row["status"], row["accuracy"]) for row in changed["runs"]] == [("a", "stopped", 0.9)]
    (tmp_path / "b" / "run.json").unlink()
    assert rows.select([tmp_path])["num_runs"] == 1
    with pytest.raises(RunNotFound):
        rows.find([tmp_path], "b")


def test_a_name_of_two_runs_is_refused_and_a_renamed_folder_is_found(tmp_path: Path) -> None:
    rows, stores = RunRows(), [tmp_path / "store", tmp_path / "copy"]
    folder = write_run(stores[0], "a", created="2026-01-01T00:00:00+00:00")
    stores[1].mkdir()
    (stores[1] / "a").symlink_to(folder)
    assert rows.find(stores, "a") in (folder, stores[1] / "a"), "one run, on two paths"
    (stores[1] / "a").unlink()
    for copy in (stores[1] / "a", stores[1] / "renamed"):  # both are listed as `a`
        shutil.copytree(folder, copy)
        rows.select(stores)
        with pytest.raises(ValueError, match="2 runs have the name a: ") as refused:
            rows.find(stores, "a")
        assert str(folder) in str(refused.value) and str(copy) in str(refused.value)
        assert rows.find([copy.parent], "a") == copy
        shutil.rmtree(copy)
    assert rows.find(stores, "a") == folder


def written_again(folder: Path, **changes: Any) -> None:
    """Change entries of a run's `run.json`."""
    (folder / "run.json").write_text(json.dumps({**json.loads((folder / "run.json").read_text()), **changes}))


def test_a_row_that_changed_while_no_server_ran_is_sent_to_a_page_that_stayed_open(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", created=CREATED, status="running", process=this_process())
    rows = RunRows()
    for number in range(5):  # so the versions of the earlier server are above those with which a later one would begin
        written_again(folder, error=f"{number}")
        before = rows.select([tmp_path])
    written_again(folder, status="finished")
    after = RunRows().select([tmp_path], after=before["version"])
    assert [row["status"] for row in after["runs"]] == ["finished"]


def test_a_run_that_does_not_say_when_it_was_made_is_not_the_newest(tmp_path: Path) -> None:
    """`run.save(folder)` of a simulation writes no time; thirty of these would hide a training that begins now."""
    for name in "ab":
        write_run(tmp_path, name, created=CREATED)
    written_again(tmp_path / "b", created=None)
    assert [row["run"] for row in RunRows().select([tmp_path])["runs"]] == ["a", "b"]


def test_the_small_curve_of_a_run_has_what_it_wrote_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", created=CREATED, losses=(2.0, 1.0), status="running", process=this_process())
    rows = RunRows()
    assert rows.select([tmp_path], curves=True)["runs"][0]["curve"] == [2.0, 1.0]
    for path in folder.glob("metrics-*"):
        row = json.loads(path.read_text().splitlines()[1])
        with path.open("a") as file:
            file.write(json.dumps({**row, "step": 2, "loss": 0.5}) + "\n")
    written_again(folder, status="finished")
    assert rows.select([tmp_path], curves=True)["runs"][0]["curve"] == [2.0, 1.0, 0.5]


def test_an_evaluation_that_was_made_after_the_end_is_seen(tmp_path: Path) -> None:
    """`workbench evaluate` adds to the metrics, and `run.json` stays as it is."""
    folder = write_run(tmp_path, "a", created=CREATED, status="killed")
    texts = {path: path.read_text().splitlines(keepends=True) for path in folder.glob("metrics-*")}
    for path, lines in texts.items():
        path.write_text("".join(lines[:-1]))
    rows = RunRows()
    before = rows.select([tmp_path])
    assert before["runs"][0]["accuracy"] is None
    for path, lines in texts.items():
        path.write_text("".join(lines))
    assert [row["accuracy"] for row in rows.select([tmp_path], after=before["version"])["runs"]] == [0.9]


def test_steps_of_a_resumed_run_that_failed_count_from_the_first_step_of_all(tmp_path: Path) -> None:
    more = {"status": "failed", "result": None, "resumed": "/runs/earlier", "num_steps": 200}
    folder = write_run(tmp_path, "a", created=CREATED, **more)
    for path in folder.glob("metrics-*"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "step": 100 + row["step"]}) + "\n" for row in rows))
    (row,) = RunRows().select([tmp_path])["runs"]
    assert (row["steps"], row["num_steps"]) == (103, 200)


def test_a_run_that_cannot_be_read_or_that_vanishes_hides_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("closed", "gone", "open"):
        write_run(tmp_path, name, created=CREATED, status="running", process=this_process())

    def refused(path: Path) -> Any:
        if path.parent.name == "closed":
            raise PermissionError(f"{path}: of another user")
        return open_file(path)

    def listed(folder: Path) -> dict[int, Path]:
        found = metrics_paths(folder)
        if folder.name == "gone":
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr("workbench.trace.read.open_file", refused)
    monkeypatch.setattr(live_curve, "metrics_paths", listed)
    curves = {row["run"]: row["curve"] for row in RunRows().select([tmp_path], curves=True)["runs"]}
    assert curves["open"] == [2.0, 1.0, 0.5] and curves["closed"] == []


def test_a_store_that_two_paths_lead_to_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_RUNS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "disk")
    assert len(State(tmp_path).stores(["link/a.ipynb", "disk/b.ipynb"])) == 1


def test_a_file_that_was_removed_meanwhile_is_told_in_one_sentence(tmp_path: Path) -> None:
    handler: Any = types.SimpleNamespace(state=types.SimpleNamespace(threads=None))
    with pytest.raises(web.HTTPError, match="no longer exists: its run was removed") as missing:
        asyncio.run(Handler.in_thread(handler, (tmp_path / "trace-00000.jsonl").read_bytes))
    assert missing.value.status_code == 404


@pytest.mark.mpi
@pytest.mark.slow
def test_a_command_reaches_a_run_and_its_row_follows(served: Served) -> None:
    command = ["train", "synchronous-sgd", "--workers", "2", "--problem", "digits-mlp", "--steps", "1000000"]
    environment = {**os.environ, "WORKBENCH_RUNS": str(served.runs), "PYTHONPATH": str(ROOT)}
    training = subprocess.Popen(
        forked("-m", "workbench", *command, "--compute", "forward_s=0.005", "--compute", "backward_s=0.005"),
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip

    def row() -> dict[str, Any]:
        newest = served.ask("runs?limit=1&curves=1")[1]["runs"]
        found: dict[str, Any] = newest[0] if newest else {"num_steps": None}
        return found

    try:
        # other tests leave older runs, which are the newest until this one is there
        assert within(
            90, lambda: row()["num_steps"] == 1_000_000 and row()["status"] == "running" and row()["steps"] > 5
        )
        name, begun = row()["run"], row()
        assert (begun["num_steps"], begun["workers"], begun["left_s"] > 100) == (1_000_000, 2, True)
        assert len(begun["curve"]) > 2
        assert served.ask(f"runs/{name}/pause", "POST")[0] == 200
        assert within(30, lambda: row()["status"] == "paused")
        held = row()["steps"]
        time.sleep(1)
        assert row()["steps"] == held
        assert served.ask(f"runs/{name}/resume", "POST")[0] == 200
        assert within(30, lambda: row()["steps"] > held)
        assert served.ask(f"runs/{name}/stop", "POST")[0] == 200
        assert within(30, lambda: row()["status"] == "stopped")
        assert served.ask(f"runs/{name}/code")[1].keys() == {"open", "repeat", "continue"}
    finally:
        training.terminate()
        training.communicate(timeout=30)


# ---------------------------------------------------------------- clusters


def write_cluster(
    served: Served, name: str, *, detached: bool, host: str, owner: int = 2**22 - 1, **record: Any
) -> Path:
    folder = served.clusters / name
    (folder / "log").mkdir(parents=True)
    about = {
        "id": name,
        "mark": f"WORKBENCH_CLUSTER_{name}",
        "num_ranks": 2,
        "title": "Open MPI",
        "started_s": time.time(),
    }
    owned = {"owner": owner, "owner_created_s": 1.0, "host": host, "runtime": "mpi", "reachable": True}
    (folder / "cluster.json").write_text(json.dumps({**about, **owned, **record}))
    if detached:
        (folder / "detached.json").write_text(json.dumps({"by": 1, "at_s": time.time(), "ranks": []}))
    return folder


def test_clusters_are_listed_with_their_code_logs_and_end(served: Served) -> None:
    away = write_cluster(served, "cluster-away", detached=True, host="elsewhere")
    lost = write_cluster(served, "cluster-lost", detached=False, host=socket.gethostname())
    (lost / "log" / "engines.log").write_text("x" * 100_000 + "\nthe last line\n")
    assert within(10, lambda: len(served.ask("clusters")[1]["clusters"]) == 2)
    rows = {row["id"]: row for row in served.ask("clusters")[1]["clusters"]}
    assert rows["cluster-away"]["attach"] == 'cluster = wb.Cluster.attach("cluster-away")'
    assert (rows["cluster-away"]["state"], rows["cluster-away"]["num_ranks"]) == ("on host elsewhere", 2)
    assert (rows["cluster-lost"]["state"], rows["cluster-lost"]["attach"], rows["cluster-lost"]["alive"]) == (
        "lost",
        None,
        False,
    )
    assert served.ask("clusters/cluster-away/ranks")[1] == {"ranks": [], "run": None, "status": None}
    status, answer = served.ask("clusters/cluster-lost/heal", "POST")
    assert status == 400 and "is not detached: it is lost" in answer["message"]
    (log,) = served.ask("clusters/cluster-lost/log")[1]["files"]
    assert log["name"] == "engines.log" and log["text"].endswith("the last line\n") and len(log["text"]) <= 64 * 1024
    status, answer = served.ask("clusters/cluster-lost/stop", "POST")
    assert (status, answer) == (200, {"message": "stopped cluster-lost"})
    assert not lost.exists() and away.exists()
    assert [row["id"] for row in served.ask("clusters")[1]["clusters"]] == ["cluster-away"], "at once"
    status, answer = served.ask("clusters/cluster-los/stop", "POST")
    assert status == 404, "the beginning of an id is no id here: a button has the whole one"


# ---------------------------------------------------------------- curves


def test_a_live_curve_is_that_of_the_whole_run(tmp_path: Path) -> None:
    """The slow twin reads all rows; here they are read while they are written, a part of a line too."""
    losses = [2.0 / (step + 1) for step in range(MAX_BINS + 700)]
    whole = write_run(tmp_path, "whole", created="2026-01-01T00:00:00+00:00", losses=losses)
    growing = tmp_path / "growing"
    growing.mkdir()
    texts = {name: (whole / name).read_bytes() for name in ("metrics-00000.jsonl", "metrics-00001.jsonl")}
    curve = LiveCurve(growing)
    for end in (0, 1000, 40_000, 100_001, 10**9):
        for name, text in texts.items():
            (growing / name).write_bytes(text[:end])
        curve.poll()
    run = Run.load(whole)
    steps = {row["step"] + 1: row for row in run.steps()}
    found = curve.loss()
    width = found["steps"][0]
    assert len(found["steps"]) <= MAX_BINS and width == 2
    for step, seconds, value in zip(found["steps"], found["seconds"], found["values"], strict=True):
        assert seconds == steps[step]["seconds"]
        first = (step - 1) // width * width + 1
        assert value == pytest.approx(sum(steps[one]["loss"] for one in range(first, step + 1)) / (step - first + 1))
    assert curve.evaluations(run.info) == run.evaluations()
    assert (curve.num_steps, curve.bytes_sent) == (len(losses), run.steps()[-1]["bytes_sent"])
    assert curve.left_s(2 * len(losses)) == pytest.approx(0.1 * len(losses), rel=1e-6)


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", created="2026-01-01T00:00:00+00:00")
    curve = LiveCurve(folder)
    curve.poll()
    for rank in range(2):
        path = folder / f"metrics-{rank:05d}.jsonl"
        path.write_text(path.read_text().splitlines(keepends=True)[0])
    curve.poll()
    assert curve.loss()["values"] == [2.0]


# ---------------------------------------------------------------- code


def test_code_is_python_that_trains_as_the_record_says(tmp_path: Path) -> None:
    settings = {**DEFAULTS, "steps": 100, "lr": 0.05, "optimizer": "SGD(lr=0.1)", "clip_norm": 3.0}
    algorithm = {
        "name": "PipeSGD",
        "settings": {"width": 3, "first": "zero", "collective": "Ring()"},
        "defaults": ["first"],
    }
    folder = write_run(tmp_path, "a", created="2026-01-01T00:00:00+00:00", settings=settings, algorithm=algorithm)
    (folder / "checkpoints").mkdir()
    code = run_code(folder, json.loads((folder / "run.json").read_text()))
    assert code["repeat"].splitlines()[2:] == [
        "# The record describes these, set them too: collective=Ring(), optimizer=SGD(lr=0.1)",
        "algorithm = wb.PipeSGD(width=3)",
        "problem = wb.problems.get('digits-mlp')",
        "cluster = wb.Cluster(2)  # leave this out if you have a cluster",
        "run = cluster.train(algorithm, problem, steps=100, lr=0.05, clip_norm=3.0)",
        "run",
    ]
    assert f"resume={str(folder)!r})" in code["continue"]
    for text in code.values():
        ast.parse(text)


def test_a_steered_run_is_shown_and_continued_with_its_present_settings(tmp_path: Path) -> None:
    """A branch has those of its checkpoint; to repeat it is to begin with the first ones."""
    steering = [
        {"number": 1, "set": {"lr": 0.2}, "step": 40, "became": {"lr": 0.2}},
        {"number": 2, "set": {"width": 99}, "step": 50, "refused": "too wide"},
        {"number": 3, "set": {"delay": 3}, "step": 60, "became": {"width": 4}},
    ]
    algorithm = {"name": "PipeSGD", "settings": {"width": 2}, "defaults": ["width"]}
    settings = {**DEFAULTS, "steps": 100, "lr": 0.1}
    folder = write_run(tmp_path, "a", created=CREATED, settings=settings, algorithm=algorithm, steering=steering)
    row = RunRows().select([tmp_path])["runs"][0]
    assert (row["lr"], row["set.width"]) == (0.2, 4)
    assert row["steered"] == "lr=0.2 after 40 steps; width=4 after 60 steps"
    (folder / "checkpoints").mkdir()
    info = json.loads((folder / "run.json").read_text())
    for num_steps, line, rate in ((30, "PipeSGD()", 0.1), (50, "PipeSGD()", 0.2), (60, "PipeSGD(width=4)", 0.2)):
        code = run_code(folder, info, num_steps)
        assert f"algorithm = wb.{line}" in code["branch"] and f"lr={rate}, resume=" in code["branch"]
        assert "wb.PipeSGD()" in code["repeat"] and "lr=0.1)" in code["repeat"]
    assert "PipeSGD(width=4)" in code["continue"] and "lr=0.2, resume=" in code["continue"]


def test_code_has_none_where_the_default_is_something_else(tmp_path: Path) -> None:
    settings = {**DEFAULTS, "steps": 100, "trace_steps": None, "lr": None}
    algorithm = {"name": "DeAR", "settings": {"bucket_bytes": None}, "defaults": []}
    folder = write_run(tmp_path, "a", created="2026-01-01T00:00:00+00:00", settings=settings, algorithm=algorithm)
    lines = run_code(folder, json.loads((folder / "run.json").read_text()))["repeat"].splitlines()
    assert "algorithm = wb.DeAR(bucket_bytes=None)" in lines
    assert "run = cluster.train(algorithm, problem, trace_steps=None, steps=100)" in lines


def test_code_of_a_run_on_gloo_trains_on_gloo(tmp_path: Path) -> None:
    """A cluster without a runtime is one of MPI, where there is an MPI."""
    folder = write_run(tmp_path, "a", created=CREATED, runtime="torch")
    lines = run_code(folder, json.loads((folder / "run.json").read_text()))["repeat"].splitlines()
    assert "cluster = wb.Cluster(2, runtime='torch')  # leave this out if you have a cluster" in lines


def test_code_leaves_out_the_defaults_of_the_settings() -> None:
    plain = {
        field.name: field.default
        for field in dataclasses.fields(Settings)
        if isinstance(field.default, int | float | str) and field.default is not None
    }
    assert plain == DEFAULTS


# ---------------------------------------------------------------- the front end


def test_the_bundle_is_built_from_these_sources() -> None:
    build = runpy.run_path(str(ROOT / "lab" / "build.py"))
    assert (build["BUNDLE"] / build["DIGEST_NAME"]).read_text().strip() == build["digest"](), "run `make lab-extension`"
    package = json.loads((build["BUNDLE"] / "package.json").read_text())
    assert (build["BUNDLE"] / package["jupyterlab"]["_build"]["load"]).is_file()
    size = sum(path.stat().st_size for path in build["BUNDLE"].rglob("*") if path.is_file())
    assert size < 150_000, "the bundle is in the repository and in the wheel"
    assert not list(build["BUNDLE"].rglob("*.map"))


def test_the_server_loads_no_torch() -> None:
    code = (
        "import sys, workbench.lab.handlers as h; sys.exit(bool({'torch', 'ipyparallel', 'plotly'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=ROOT).returncode == 0
