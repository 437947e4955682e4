"""What of a running cluster others could see or reach: its files, its ports, its key; and what of the environment a run keeps."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.distributed.test_cluster import plane
from workbench.algorithms import SynchronousSGD
from workbench.clusters import Cluster
from workbench.clusters.engines.options import options
from workbench.clusters.launchers.base import LOOPBACK, Launcher
from workbench.clusters.supervision.reaper import marked
from workbench.errors import WorkbenchError

pytestmark = [pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.usefixtures("forked_starts")]

SECRETS = {
    "JUPYTER_TOKEN": "5ecre7-of-jupyter",
    "HF_TOKEN": "5ecre7-of-a-hub",
    "AWS_SECRET_ACCESS_KEY": "5ecre7-of-a-cloud",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks that know secrets, their files where a careless umask would let others read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("WORKBENCH_RUNS", str(tmp_path_factory.mktemp("runs")))
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        before = os.umask(0o000)
        try:
            with Cluster(2, quiet=True) as cluster:
                yield cluster
        finally:
            os.umask(before)


def folder_of(cluster: Cluster) -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "workbench" / "clusters" / cluster.id


def infos(cluster: Cluster) -> list[dict[str, Any]]:
    """What the connection files say, the client's and the engines'."""
    found = [
        json.loads(path.read_text()) for path in sorted((folder_of(cluster) / "security").glob("ipcontroller-*.json"))
    ]
    assert len(found) == 2
    return found


def key_of(cluster: Cluster) -> str:
    (key,) = {info["key"] for info in infos(cluster)}
    assert len(key) >= 32
    return str(key)


def test_nobody_else_can_read_the_clusters_files(cluster: Cluster) -> None:
    folder = folder_of(cluster)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "so that nobody else comes to what is in it"
    files = list((folder / "security").iterdir())
    assert len(files) >= 2
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files if "ipcontroller" in path.name} == {
        path.name: "0o600" for path in files if "ipcontroller" in path.name
    }
    for path in folder.rglob("*"):
        assert path.stat().st_uid == os.geteuid()


def test_the_controller_listens_on_loopback_alone(cluster: Cluster) -> None:
    """Other ports of the cluster's are its nannies' and Open MPI's own."""
    assert {info["interface"] for info in infos(cluster)} == {f"tcp://{LOOPBACK}"}
    listening: set[str] = set()
    for process in marked(cluster.mark):
        if "ipyparallel.controller" in " ".join(process.cmdline()):
            listening |= {
                connection.laddr.ip
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
    assert listening == {LOOPBACK}


def test_the_key_is_on_no_command_line(cluster: Cluster) -> None:
    key, seen = key_of(cluster).encode(), 0
    for process in psutil.process_iter():
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except OSError:
            continue
        seen += 1
        assert key not in words, f"process {process.pid}"
    assert seen > 3


def test_neither_key_nor_secrets_are_in_what_is_kept_or_shown(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a run that ends and of one that fails: record, output, traceback, logs, and what a notebook shows."""
    done = cluster.train(SynchronousSGD(), plane(), steps=4, checkpoint_every=2).wait(60)

    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        print("what a rank prints")
        raise ValueError("a loss that fails")

    failed = cluster.train(SynchronousSGD(), plane(fails), steps=4)
    with pytest.raises(WorkbenchError, match="a loss that fails"):
        failed.wait(60)
    said = capfd.readouterr()
    shown = [
        repr(cluster),
        cluster._repr_html_(),
        repr(cluster.client),
        str(cluster.status()),
        repr(done),
        repr(failed),
        said.out,
        said.err,
    ]
    secrets = [key_of(cluster), *SECRETS.values()]
    assert [text for text in shown for secret in secrets if secret in text] == []
    files = [path for run in (done, failed) for path in run.folder.rglob("*") if path.is_file()]
    logs = [path for path in folder_of(cluster).rglob("*") if path.is_file() and path.parent.name != "security"]
    assert any(path.name.startswith("failed-") for path in files) and any(path.suffix == ".log" for path in logs)
    assert [str(path) for path in [*files, *logs] for secret in secrets if secret.encode() in path.read_bytes()] == []


def test_a_child_of_a_rank_is_not_given_the_key(cluster: Cluster) -> None:
    """What a rank starts, a data loader or a shell command, inherits its environment, and may print it."""

    def inherited() -> str:
        import subprocess
        import sys

        code = "import os; print(dict(os.environ))"
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    for text in cluster.client[:].apply_sync(inherited):
        assert "XDG_CACHE_HOME" in text and key_of(cluster) not in text


@pytest.mark.parametrize(("address", "encrypts"), [(LOOPBACK, False), ("10.87.0.1", True), ("0.0.0.0", True)])
def test_beyond_loopback_it_is_encrypted(tmp_path: Path, address: str, encrypts: bool) -> None:
    """That nobody speaks to it without the key is shown in `test_cluster_life`."""

    class Somewhere(Launcher):
        title = "somewhere"  # type: ignore[assignment]

        def controller_ip(self) -> str:
            return address

        def configure(self, *_: Any) -> None:
            """Nothing."""

    arguments = options(Somewhere(), 2, "an-id", "A_MARK", tmp_path)["config"].ControllerLauncher.controller_args
    assert f"--IPController.enable_curve={encrypts}" in arguments
