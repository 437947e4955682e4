"""Ranks on hosts reached by ssh: here hosts of an emulated network, and an agent that, as ssh does, brings no environment along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from workbench.clusters import Cluster
from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.launchers.ssh import SSHLauncher, parse_hosts
from workbench.clusters.local.mpi_install import MPIInstall
from workbench.errors import ConfigError, LaunchError

SCRIPT = """
    import json, os, sys
    import workbench as wb
    from workbench.clusters import Cluster
    from workbench.errors import WorkbenchError

    with Cluster(3, launcher="ssh:host0:2,host1:1", quiet=True) as cluster:
        security = os.path.join(os.environ["XDG_CACHE_HOME"], "workbench", "clusters", cluster.id, "security")
        info = json.load(open(os.path.join(security, f"ipcontroller-{cluster.id}-client.json")))
        threads = cluster.client[:].apply_sync(lambda: __import__("os").environ["OMP_NUM_THREADS"])
        run = cluster.train(wb.SynchronousSGD(), wb.problems.digits_mlp(), steps=4, evaluate_every=0).wait(120)
        found = {"ranks": cluster.ranks, "status": run.status, "steps": run.run.info["result"]["steps"]}
        found |= {"interface": info["interface"], "key": len(info["curve_serverkey"]), "threads": threads}
        found |= {"state": [row["state"] for row in cluster.status()]}
        from workbench.clusters.engines import remote, world

        remote.can_see = lambda path, timeout_s: "host0" in __import__("socket").gethostname()
        try:
            world.check_shared_folder(cluster._engines, cluster.ranks, 30.0)
        except WorkbenchError as error:
            found["blind"] = str(error)
    print(json.dumps(found))
"""


@pytest.mark.root
@pytest.mark.mpi
@pytest.mark.notebooks
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("no_process_left")
def test_ranks_on_hosts_reached_by_ssh_are_one_world(tmp_path: Path, runs: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nexec env -i PATH="$PATH" HOME="$HOME" /dev/shm/.workbench/agent "$@"\n')
    agent.chmod(0o755)
    code = "\n".join(line.removeprefix("    ") for line in SCRIPT.splitlines())
    with EmulatedNetwork(2, rate="1gbit") as network:
        own = {
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "OMPI_MCA_plm_rsh_agent": str(agent),
            "XDG_CACHE_HOME": str(tmp_path),
        }
        env = {**os.environ, **network.environment, **own}
        for name in (
            "WORKBENCH_EMULATED",
            "PRTE_MCA_prte_default_hostfile",
            "OMPI_MCA_orte_default_hostfile",
            "HYDRA_HOST_FILE",
        ):
            del env[name]  # what our launchers find the hosts by: here they are named
        command = network.command(0, [sys.executable, "-c", code])
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(rank["host"], rank["rank"], rank["size"]) for rank in found["ranks"]] == [
        ("host0", 0, 3),
        ("host0", 1, 3),
        ("host1", 2, 3),
    ]
    assert (found["interface"], found["key"]) == ("tcp://10.87.0.1", 40), (
        "it listens where the hosts reach it, encrypted"
    )
    assert (found["status"], found["steps"], found["state"]) == ("finished", 4, ["ready"] * 3)
    assert len(set(found["threads"])) == 1
    assert "host1 cannot see" in found["blind"]
    assert "WORKBENCH_RUNS" in found["blind"]
    assert os.listdir(tmp_path / "workbench" / "clusters") == []


@pytest.mark.parametrize(
    "words", ["ssh:", "ssh:a:0", "ssh:a:b:2", "ssh:a,a:2", "ssh:-oProxyCommand=x:1", "ssh:a;reboot"]
)
def test_hosts_that_cannot_be_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="write it like 'ssh:hostA:2,hostB:2'"):
        parse_hosts(words)


def configured(name: str) -> list[str]:
    """What mpiexec is told of two hosts."""
    from traitlets.config import Config

    config: Any = Config()
    launcher = SSHLauncher(MPIInstall(name=name, version="5.0", mpiexec="mpiexec"), (("a", 2), ("b", 1)))
    launcher.configure(config, 3, {"THE_MARK": "1"}, Path())
    assert config.MPIEngineSetLauncher.environment["THE_MARK"] == "1"
    with pytest.raises(ConfigError, match="places for 3"):
        launcher.check_num_ranks(4)
    return list(config.MPIEngineSetLauncher.mpi_args)


@pytest.mark.notebooks
def test_each_mpi_is_told_hosts_and_environment_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    words = configured("Open MPI")
    assert words[:4] == ["--host", "a:2,b:1", "--map-by", "slot:OVERSUBSCRIBE"]
    exported = {after for before, after in pairwise(words) if before == "-x"}
    assert {"THE_MARK", "IPP_CONNECTION_INFO", "NCCL_SOCKET_IFNAME", "PATH", "OMP_NUM_THREADS"} <= exported
    assert configured("MPICH") == ["-hosts", "a:2,b:1"]


@pytest.mark.mpi
@pytest.mark.notebooks
def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(LaunchError, match=r"no route to host 'no-such-host\.invalid'"):
        Cluster(2, launcher="ssh:no-such-host.invalid:2", quiet=True)
