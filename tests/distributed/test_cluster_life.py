"""A cluster apart from its trainings: started in the background, its status, healed, detached, attached, and found by its name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest

import workbench
from tests.distributed.test_cluster import plane, slow_loss
from tests.forked import forked
from tests.waiting import within
from workbench.algorithms import SynchronousSGD
from workbench.clusters import Cluster
from workbench.clusters.launchers.processes import ProcessLauncher
from workbench.clusters.output import RankOutput
from workbench.clusters.supervision.reaper import marked
from workbench.clusters.supervision.registry import find_entry
from workbench.errors import ConfigError, LaunchError, WorkbenchError

pytestmark = [pytest.mark.notebooks, pytest.mark.timeout(240), pytest.mark.usefixtures("forked_starts")]

NUM_RANKS = 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this file's clusters keep their records: nothing may be left there."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
    assert os.listdir(folder / "workbench" / "clusters") == []


@pytest.fixture(scope="module")
def cluster(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks without MPI, on an interpreter that has no mpi4py, started in the background."""
    bare = tmp_path_factory.mktemp("bare")
    (bare / "mpi4py.py").write_text("raise ImportError('there is no mpi4py here')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(bare), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RANK", "7")  # of a launcher that the notebook itself was started by
        patch.setenv("MASTER_ADDR", "10.1.2.3")
        cluster = Cluster(NUM_RANKS, launcher="torch", name="life", wait=False, quiet=True)
        assert (cluster.state, cluster.ready) == ("starting", False)
        with pytest.raises(TimeoutError, match="the start continues"):
            cluster.wait(0.01)
        assert cluster.wait(120) is cluster
        assert (cluster.state, cluster.ready) == ("ready", True)
        yield cluster
    cluster.stop()
    assert marked(cluster.mark) == []


def noisy_loss(output: Any, target: Any) -> Any:
    """Says something at every step."""
    print("a word from a rank")
    return slow_loss(output, target)


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    """`workbench cluster ...`."""
    return subprocess.run(forked("-m", "workbench", "cluster", *words), capture_output=True, text=True, timeout=120)


# ---------------------------------------------------------------- without MPI


def test_processes_are_ranks_without_any_mpi(cluster: Cluster) -> None:
    assert [(rank["rank"], rank["size"], rank["library"]) for rank in cluster.ranks] == [(0, 2, "none"), (1, 2, "none")]
    assert cluster.runtime == "torch"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    told = cluster.client[:].apply_sync(lambda names: [__import__("os").environ.get(name) for name in names], names)
    assert told == [["0", "2", "0", "2", None], ["1", "2", "1", "2", None]]
    assert not any(cluster.client[:].apply_sync(lambda: "mpi4py" in __import__("sys").modules))


def test_mpi_is_refused_where_there_is_none(cache: Path) -> None:
    with pytest.raises(ConfigError, match="start without MPI: use runtime='torch', or launcher='local'"):
        Cluster(2, launcher="torch", runtime="mpi")


# ---------------------------------------------------------------- looked at


def test_status_answers_while_ranks_train_and_output_is_kept(cluster: Cluster, runs: Path) -> None:
    run = cluster.train(SynchronousSGD(), plane(noisy_loss), steps=100_000)
    assert within(60, lambda: len(run.run.curve()[0]) > 3)
    table = cluster.status()
    assert (cluster.state, run.done) == ("training", False)
    assert [(row["rank"], row["state"], row["device"]) for row in table] == [
        (0, "training", "cpu"),
        (1, "training", "cpu"),
    ]
    assert [row["pid"] for row in table] == [rank["pid"] for rank in cluster.ranks]
    for row in table:
        assert row["step"] >= 2
        assert 0 <= row["beat_s"] < 60
        assert row["memory_bytes"] > 50e6
        assert row["bytes_sent"] > 0
    before = table[1]["step"]
    assert within(20, lambda: cluster.status()[1]["step"] > before)
    assert ">last beat</th>" in cluster._repr_html_()
    lines: list[str] = []
    echo = RankOutput(run.folder, NUM_RANKS, print_line=lines.append)
    echo.poll()
    assert {"[0] a word from a rank", "[1] a word from a rank"} == set(lines)
    run.stop().wait(30)
    echo.poll(to_the_end=True)
    steps = run.run.info["result"]["steps"]
    assert [lines.count(f"[{rank}] a word from a rank") for rank in range(NUM_RANKS)] == [steps, steps]
    assert [row["state"] for row in cluster.status()] == ["ready", "ready"]
    assert cluster.train(SynchronousSGD(), plane(), steps=steps + 2, resume=run).wait(60).status == "finished"
    with pytest.raises(ConfigError, match="has no checkpoint; resume needs a stopped run"):
        cluster.train(SynchronousSGD(), plane(), steps=9, resume=cluster.run)


def test_a_busy_engine_does_not_hold_the_table_up(cluster: Cluster, tmp_path: Path) -> None:
    def waits_for(file: str) -> None:
        while not __import__("os").path.exists(file):
            __import__("time").sleep(0.02)

    busy = cluster.client[1].apply_async(waits_for, str(tmp_path / "go"))
    table = cluster.status()
    assert not busy.done()
    (tmp_path / "go").touch()
    assert [row["state"] for row in table] == ["ready", "busy"]
    assert table[1]["memory_bytes"] > 50e6
    busy.get(60)


# ---------------------------------------------------------------- healed


def test_a_dead_rank_is_replaced_and_the_last_words_are_of_this_run(
    cluster: Cluster, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def says_natively(words: str) -> None:
        __import__("os").write(2, f"{words}\n".encode())

    identity, old = cluster.id, [rank["pid"] for rank in cluster.ranks]
    cluster.client[1].apply_sync(says_natively, "words of long ago")

    def loud_loss(output: Any, target: Any) -> Any:
        __import__("os").write(2, b"words of this run\n")
        return slow_loss(output, target)

    run = cluster.train(SynchronousSGD(), plane(loud_loss), steps=100_000)
    assert within(60, lambda: len(run.run.curve()[0]) > 1)
    psutil.Process(old[1]).kill()
    with pytest.raises(WorkbenchError, match="rank 1's process is gone") as caught:
        run.wait(60)
    assert "[1] words of this run" in str(caught.value)
    assert "long ago" not in str(caught.value)
    assert within(10, lambda: cluster.state == "lost")
    assert [row["state"] == "gone" for row in cluster.status()] == [False, True]
    with pytest.raises(LaunchError, match=r"heal\(\)"):
        cluster.train(SynchronousSGD(), plane(), steps=1)
    monkeypatch.setattr(cluster, "_quiet", False)
    assert cluster.heal() is cluster
    assert "rank 1 had ended: 2 ranks were restarted" in (said := capsys.readouterr().out)
    assert f"{run.id} has no checkpoint" in said
    assert (cluster.state, cluster.id) == ("ready", identity)
    assert not set(old) & {rank["pid"] for rank in cluster.ranks}
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in old)
    assert within(30, lambda: [row["state"] for row in cluster.status()] == ["ready", "ready"]), (
        "new ranks do not train in the old run"
    )
    client = cluster.client
    assert cluster.heal().client is client, "nothing was to be healed"
    assert cluster.scale(1).train(SynchronousSGD(), plane(), steps=2).wait(60).status == "finished"
    assert cluster.num_ranks == len(cluster.ranks) == 1
    with pytest.raises(ConfigError, match="at most"):
        cluster.scale(1000)
    assert cluster.scale(NUM_RANKS).state == "ready"


# ---------------------------------------------------------------- let go of, and taken up


HOLDER = """
    import os, signal, sys, torch, workbench as wb
    from workbench.problems.base import Problem
    def loss(output, target):
        __import__("time").sleep(0.02)
        {trouble}
        return torch.nn.functional.mse_loss(output, target)
    x = torch.ones(64, 3)
    problem = Problem(model=lambda: torch.nn.Linear(3, 1), loss=loss, train=(x, x[:, :1]), name="plane", batch_size=8, correct=None)
    cluster = wb.Cluster(2, launcher="torch", name="holder", quiet=True)
    run = cluster.train(wb.SynchronousSGD(), problem, steps={steps})
    while not len(run.run.curve()[0]):
        __import__("time").sleep(0.05)
    print(cluster.{then}, flush=True)
    sys.stdin.read()
"""


def holder(
    then: str, steps: int = 100_000, trouble: str = "pass", *, anew: bool = False
) -> tuple[subprocess.Popen[str], str]:
    """A process in place of a notebook, with a cluster that trains; and its output at the end.

    `anew`: it is not forked.
    """
    code = textwrap.dedent(HOLDER.format(steps=steps, then=then, trouble=trouble))
    command = [sys.executable, "-c", code] if anew else forked("-c", code)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def interrupted(self: Cluster, words: str) -> None:
    raise KeyboardInterrupt(words)


def test_a_training_outlives_its_notebook_and_is_taken_up_whole(
    cache: Path, runs: Path, no_process_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, name = holder("detach()", steps=150)
    assert name.startswith("holder-")
    end(process)
    listing = [json.loads(line) for line in cli("list", "--json").stdout.splitlines()]
    entry = next(row for row in listing if row["id"] == name)
    assert (entry["state"], entry["num_ranks"]) == ("detached", 2)
    assert name in cli("status", name).stdout
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "_print", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workbench.attach(name, quiet=True)
    assert find_entry(name).state == "detached", "who did not get it in hand does not end it"
    with workbench.attach(name, quiet=True) as taken:
        assert taken.run is not None
        assert taken.run.wait(120).status == "finished"
        assert [len(rows) for rows in taken.run.run.metrics.values()] == [150, 150]
        assert taken.train(SynchronousSGD(), plane(), steps=3).wait(60).status == "finished"
        with pytest.raises(LaunchError, match=f"process {os.getpid()} owns it"):
            workbench.attach(name)
        refused = cli("stop", name)
        assert (refused.returncode, f"process {os.getpid()} owns" in refused.stderr) == (2, True)
        mark = taken.mark
    assert marked(mark) == []


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
def test_a_wait_ends_when_the_shell_stops_the_cluster(
    attached: bool, cache: Path, runs: Path, no_process_left: None
) -> None:
    """As the panel does. No later call waits, and each says what to do."""
    cluster = Cluster(NUM_RANKS, launcher="torch", quiet=True)
    run = cluster.train(SynchronousSGD(), plane(), steps=100_000)
    if attached:
        cluster = workbench.attach(cluster.detach(), quiet=True)
        assert cluster.run is not None
        run = cluster.run
    assert within(60, lambda: len(run.run.steps()) > 3)
    stopped = cli("stop", cluster.id, "--force")
    assert stopped.returncode == 0, stopped.stderr
    begin = time.monotonic()
    with pytest.raises(WorkbenchError, match="the cluster was stopped"):
        run.wait(60)
    assert time.monotonic() - begin < 10
    assert within(10, lambda: run.done)
    assert (run.status, cluster.state) == ("failed", "stopped")
    assert "the cluster was stopped" in run.run.info["error"]
    for call in (cluster.heal, cluster.restart, cluster.detach):
        with pytest.raises(LaunchError, match="this cluster was stopped: start a new Cluster"):
            call()
    assert [row["state"] for row in cluster.status()] == ["gone", "gone"]
    cluster.stop()


def test_a_detached_cluster_is_scaled_and_healed_by_the_command(cache: Path, runs: Path, no_process_left: None) -> None:
    cluster = Cluster(1, launcher="torch", name="left", quiet=True)
    name = cluster.name
    refused = cli("scale", name, "2")
    assert (refused.returncode, f"process {os.getpid()} owns it: call scale(2) there" in refused.stderr) == (2, True)
    cluster.detach()
    try:
        done = cli("scale", name, "2")
        assert (done.returncode, done.stdout) == (0, f"{name}: 2 ranks\n")
        entry = find_entry(name)
        assert entry.state == "detached" and entry.detached is not None
        ranks = [rank["pid"] for rank in entry.detached["ranks"]]
        assert cli("scale", name, "1000").returncode == 2
        assert find_entry(name).state == "detached", "what is refused changes nothing"
        psutil.Process(ranks[0]).kill()
        assert within(10, lambda: "gone" in cli("status", name).stdout)
        assert cli("heal", name).returncode == 0
        with workbench.attach(name, quiet=True) as taken:
            assert not {rank["pid"] for rank in taken.ranks} & set(ranks)
            assert taken.train(SynchronousSGD(), plane(), steps=2).wait(60).status == "finished"
    finally:
        cli("stop", name)


def test_an_error_that_nobody_saw_is_told_to_who_attaches(cache: Path, runs: Path, no_process_left: None) -> None:
    trouble = (
        "if os.environ['RANK'] == '1' and os.getppid() and not os.path.exists(os.environ['WORKBENCH_RUNS'] + '/go'): "
        "raise KeyError('lost')"
    )
    runs.mkdir()
    (runs / "go").touch()
    process, name = holder("detach()", trouble=trouble)
    end(process)
    (runs / "go").unlink()
    with workbench.attach(name, quiet=True) as taken:
        assert taken.run is not None
        with pytest.raises(WorkbenchError, match=r"rank 1 failed: KeyError: .*lost") as caught:
            taken.run.wait(60)
        assert "in loss" in caught.value.__notes__[0]
        assert within(10, lambda: taken.run.done and taken.run.status == "failed")
        again = taken.detach()
    assert taken.state == "detached"
    assert [row["state"] for row in taken.status()] == ["ready", "ready"], "not gone, where nobody holds them"
    with pytest.raises(LaunchError, match="was detached"):
        taken.train(SynchronousSGD(), plane(), steps=1)
    assert cli("stop", again).stdout.startswith(f"stopped {again}")
    with pytest.raises(ConfigError, match="no clusters are called"):
        find_entry(again)


def test_what_a_crash_left_over_is_named_and_ended(cache: Path, runs: Path, no_process_left: None) -> None:
    process, name = holder("id", anew=True)
    reapers = [each for each in psutil.Process(process.pid).children() if "reaper.py" in " ".join(each.cmdline())]
    assert len(reapers) == 1
    assert find_entry(name).state == f"owned by process {process.pid}"
    for victim in (*reapers, psutil.Process(process.pid)):
        victim.send_signal(signal.SIGKILL)
    process.communicate()
    assert find_entry(name).state == "left over"
    with pytest.raises(LaunchError, match=f"was not detached.*workbench cluster stop {name}"):
        workbench.attach(name)
    folder = Path(find_entry(name).record["run"])
    assert cli("stop", name).returncode == 0
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    assert name not in os.listdir(cache / "workbench" / "clusters")


# ---------------------------------------------------------------- kept apart


def test_two_of_one_name_do_not_meet(cluster: Cluster, no_process_left: None) -> None:
    with Cluster(1, launcher="torch", name="life", quiet=True) as other:
        assert other.id != cluster.id
        assert other.client.ids == [0]
        assert cluster.client.ids == [0, 1]
        with pytest.raises(ConfigError, match="2 clusters are called 'life'"):
            find_entry("life")


def test_a_controller_beyond_loopback_speaks_to_nobody_without_the_key(
    cache: Path, no_process_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessLauncher, "controller_ip", lambda self: "127.0.0.2", raising=False)
    with Cluster(1, launcher="torch", quiet=True) as own:
        file = cache / "workbench" / "clusters" / own.id / "security" / f"ipcontroller-{own.id}-client.json"
        info = json.loads(file.read_text())
        assert info["interface"] == "tcp://127.0.0.2"
        assert len(info["curve_serverkey"]) == 40
        with ipyparallel.Client({**info}, timeout=20) as keyed:
            assert keyed.ids == [0]
        with pytest.raises(Exception, match=r"(?i)timed out|timeout"):
            ipyparallel.Client({**info, "curve_serverkey": None}, timeout=3)
        assert own.client[0].apply_sync(lambda: 1) == 1


def test_a_start_without_time_is_a_launch_error(cache: Path, no_process_left: None) -> None:
    with pytest.raises(LaunchError, match=r"0 of 1 ranks were ready after 0.01 s.*raise timeout_s"):
        Cluster(1, launcher="torch", timeout_s=0.01, quiet=True)
    later = Cluster(1, launcher="torch", timeout_s=0.01, quiet=True, wait=False)
    with pytest.raises(LaunchError, match=r"after 0\.01 s"):
        later.train(SynchronousSGD(), plane(), steps=1)
    assert later.state == "stopped"


def test_a_start_can_be_given_up(cache: Path, no_process_left: None) -> None:
    begun = Cluster(2, launcher="torch", quiet=True, wait=False)
    time.sleep(0.5)
    begun.stop()
    assert begun.state == "stopped"
    assert marked(begun.mark) == []


# ---------------------------------------------------------------- in a notebook


CELLS = {
    "start": """
import time, torch, workbench as wb
from workbench.problems.base import Problem
cluster = wb.Cluster(2, launcher="torch", wait=False)
""",
    "train": """
def loss(output, target):
    print("a word from a rank")
    return torch.nn.functional.mse_loss(output, target)
x = torch.ones(64, 3)
problem = Problem(model=lambda: torch.nn.Linear(3, 1), loss=loss, train=(x, x[:, :1]), name="plane", batch_size=8, correct=None)
cluster.wait()
run = cluster.train(wb.SynchronousSGD(), problem, steps=5)
""",
    "wait": "run.wait(); time.sleep(1)",
    "look": "cluster",
    "stop": "cluster.stop()",
}


def test_a_notebook_shows_the_start_moving_and_what_ranks_print(cache: Path, runs: Path, no_process_left: None) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    seen: dict[str, list[dict[str, Any]]] = {}
    try:
        for name, code in CELLS.items():
            heard = seen.setdefault(name, [])
            client.execute_interactive(code, timeout=180, output_hook=heard.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    errors = [message for heard in seen.values() for message in heard if message["msg_type"] == "error"]
    assert not errors
    everything = [message for heard in seen.values() for message in heard]
    line = next(message["content"] for message in everything if message["msg_type"] == "display_data")
    assert line["data"]["text/plain"].startswith("0 of 2 ranks ready")
    moves = [message["content"] for message in everything if message["msg_type"] == "update_display_data"]
    assert {move["transient"]["display_id"] for move in moves} == {line["transient"]["display_id"]}, (
        "the same output moves"
    )
    assert moves[-1]["data"]["text/plain"].startswith("2 ranks ready in")
    printed = "".join(message["content"]["text"] for message in everything if message["msg_type"] == "stream")
    assert [printed.count(f"[{rank}] a word from a rank\n") for rank in range(2)] == [5, 5]
    table = next(message["content"]["data"] for message in seen["look"] if message["msg_type"] == "execute_result")
    assert ">last beat</th>" in table["text/html"]
    assert "2 ranks, torch.distributed processes" in table["text/plain"]
