"""Ranks under a real Slurm: a controller and two nodes, each on a host of an emulated network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import ForkServer
from tests.distributed.slurm_world import SlurmWorld, send_by_value
from tests.papers_share import KEY, finding, make_share, write_claims, write_notebook
from tests.waiting import within
from workbench.clusters.local.mpi_install import find_mpi
from workbench.clusters.slurm.request import Slurm
from workbench.experiments.notebooks import tagged_text
from workbench.runtimes.transport.base import local_rank, ranks_here
from workbench.trace.run import Run
from workbench.trace.store import list_runs

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.timeout(240)]
send_by_value(sys.modules[__name__])
PMIX = any(
    Path(folder).exists()
    for folder in ("/usr/lib/x86_64-linux-gnu/libpmix.so", "/usr/lib/aarch64-linux-gnu/libpmix.so")
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmWorld]:
    """One Slurm for all tests of this file."""
    world = SlurmWorld(tmp_path_factory.mktemp("slurm"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def python(world: SlurmWorld) -> Iterator[str]:
    """The program by which processes on all hosts are forked."""
    server = ForkServer(compiler=True, begin=partial(world.network.run, 0))
    yield server.python
    server.close()


@pytest.fixture(autouse=True)
def no_job_left(world: SlurmWorld) -> Iterator[None]:
    """What a test submitted is gone when it ends."""
    yield
    left = within(10, world.jobs, lambda jobs: jobs == [])
    if left:
        world.sh(f"scancel {' '.join(left)}")
    assert left == []


# ---------------------------------------------------------------- a job of its own


def train_on_two_nodes(runs: str) -> dict[str, Any]:
    os.environ["WORKBENCH_RUNS"] = runs
    from workbench.algorithms import SynchronousSGD
    from workbench.clusters import Cluster
    from workbench.clusters.slurm.queue import run_slurm
    from workbench.problems import digits_mlp

    words = "slurm:partition=debug,account=physics,time=00:30:00,nodes=2,gpus-per-task=1"
    with Cluster(2, launcher=words, quiet=True) as cluster:
        job = run_slurm("squeue", "-h", "-o", "%i").split()
        seen: dict[str, Any] = {"ids": cluster.client.ids, "ranks": cluster.ranks, "jobs": job}
        seen["shown"] = run_slurm("scontrol", "show", "job", job[0])
        run = cluster.train(SynchronousSGD(), digits_mlp(), steps=5).wait(120)
        seen["run"] = (run.status, sorted(run.run.metrics), run.summary()["steps"])
        security = next(Path(os.environ["XDG_CACHE_HOME"]).glob("workbench/clusters/*/security/*-engine.json"))
        seen["engine"] = json.loads(security.read_text())
    seen["left"] = run_slurm("squeue", "-h", "-o", "%i").split()
    return seen


def test_ranks_on_two_nodes_are_one_world_and_train(world: SlurmWorld, tmp_path: Path) -> None:
    seen = world.call(train_on_two_nodes, str(tmp_path))
    assert seen["ids"] == [0, 1]
    assert [(rank["rank"], rank["size"], rank["host"]) for rank in seen["ranks"]] == [(0, 2, "host1"), (1, 2, "host2")]
    assert len(seen["jobs"]) == 1 and seen["left"] == []
    for words in ("Partition=debug", "Account=physics", "TimeLimit=00:30:00", "NumNodes=2", "NumTasks=2", "gres:gpu:1"):
        assert words in seen["shown"]
    assert seen["run"] == ("finished", [0, 1], 5)
    assert "10.87.0.1" in seen["engine"]["interface"] and seen["engine"]["curve_serverkey"]


WHICH_GPU = """
import json, os, sys
from mpi4py import MPI
facts = [MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, os.uname().nodename, dict(os.environ)]
with open(f"{sys.argv[1]}/rank-{MPI.COMM_WORLD.rank}", "w") as file:
    json.dump(facts, file)
"""


@pytest.mark.parametrize(
    "mpi", ["mpiexec", pytest.param("pmix", marks=pytest.mark.skipif(not PMIX, reason="no libpmix.so for srun"))]
)
def test_each_rank_finds_its_gpu_by_its_number_on_the_node(world: SlurmWorld, tmp_path: Path, mpi: Any) -> None:
    (tmp_path / "which.py").write_text(WHICH_GPU)
    install = find_mpi()
    slurm = Slurm(nodes=2, gpus_per_rank=1, mpi=mpi, time_limit="5")
    spec = {
        "command": [
            *slurm.start_command(4, install.mpiexec, install.args),
            sys.executable,
            str(tmp_path / "which.py"),
            str(tmp_path),
        ],
        "environment": install.env,
        "folder": str(tmp_path),
        "controller": None,
        "connection": None,
        "on_warning": "command",
        "requeue": False,
    }
    (tmp_path / "job.json").write_text(json.dumps(spec))
    from workbench.clusters.slurm import batch_job as slurm_job

    command = [sys.executable, "-P", slurm_job.__file__, str(tmp_path / "job.json")]
    (tmp_path / "job.sh").write_text(slurm.script(4, name="gpus", output=str(tmp_path / "job.log"), command=command))
    said = world.sh(f"sbatch --wait {tmp_path / 'job.sh'}") + (tmp_path / "job.log").read_text()
    facts = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*"))]
    assert [
        (rank, size, host, env["CUDA_VISIBLE_DEVICES"], local_rank(env), ranks_here(4, env))
        for rank, size, host, env in facts
    ] == [
        (0, 4, "host1", "0,1", 0, 2),
        (1, 4, "host1", "0,1", 1, 2),
        (2, 4, "host2", "0,1", 0, 2),
        (3, 4, "host2", "0,1", 1, 2),
    ], said


# ---------------------------------------------------------------- a user's own script under srun

OWN_LOOP = """
import os, torch, workbench as wb
model, rank = torch.nn.Linear(3, 1), int(os.environ["SLURM_PROCID"])
with wb.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), wb.PipeSGD(), timeout_s=60) as trainer:
    for _ in range(5 + rank):
        trainer.step(lambda: model(torch.ones(2, 3)).square().mean())
"""
MEETING = "MASTER_ADDR=host1 MASTER_PORT=29511 "
FIRST = "--nodelist=host1"  # rank 0 is there, also while its node ends another job
RANKS = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec"


def test_own_loop_under_srun_says_how_its_ranks_meet_and_which_has_one_batch_more(
    world: SlurmWorld, python: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN_LOOP)
    script, env = f"{python} -m own", {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    said = world.sh(f"srun -n 2 {script}", env=env, timeout_s=100)
    assert said.count("LaunchError: srun started 2 processes") == 2 and "srun --mpi=pmix -n 2" in said and RANKS in said
    said = world.sh(f"{MEETING} srun {FIRST} -n 2 bash -c '{RANKS} {script}'", env=env, timeout_s=100)
    assert "RankMismatch: rank 1 calls finish() after 6 steps, but rank 0 calls finish() after 5 steps" in said
    assert "DistributedSampler" in said


# ---------------------------------------------------------------- jobs that wait, and that fail

WAITS = """
import sys, time
from types import SimpleNamespace
from workbench.clusters import Cluster, engines
from workbench.clusters.launchers.slurm_launcher import SlurmLauncher
late = 0
asked = SlurmLauncher.waits
def waits(self, engine_set):
    global late
    words = asked(self, engine_set)
    late += 60 * bool(words)  # a minute passes while it waits
    print(words, flush=True)
    return words
SlurmLauncher.waits = waits
engines.time = SimpleNamespace(monotonic=lambda: time.monotonic() + late, sleep=time.sleep, time=time.time)
Cluster(1, launcher=sys.argv[1], timeout_s=45, quiet=True)
"""


@pytest.mark.parametrize("words", ["slurm", "slurm:controller=job"])
def test_a_job_in_the_queue_is_no_timeout_and_ends_with_its_notebook(
    world: SlurmWorld, python: str, words: str
) -> None:
    world.sh("sbatch --nodes=2 --exclusive --job-name=others --output=/dev/null --wrap 'sleep 300'")
    with world.popen(
        [python, "-c", WAITS, words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as notebook:
        assert notebook.stdout is not None
        said = []
        while (line := notebook.stdout.readline().strip()) != "pending: Resources":
            assert line, "it ended:\n" + "\n".join(said)
            said.append(line)
        for _ in range(10):
            assert notebook.stdout.readline().strip() == "pending: Resources"
        assert len(world.jobs()) == 2
        notebook.send_signal(signal.SIGKILL)
    assert within(15, lambda: world.sh("squeue -h -o %j").split(), lambda names: names == ["others"]) == ["others"]
    world.sh("scancel --name=others")


def refused(words: str) -> str:
    from workbench.clusters import Cluster
    from workbench.errors import LaunchError

    try:
        Cluster(1, launcher=words, quiet=True).stop()
    except LaunchError as error:
        return str(error)
    return "nothing was refused"


def test_a_partition_that_is_not_there_is_told_with_those_that_are(world: SlurmWorld) -> None:
    said = world.call(refused, "slurm:partition=fast")
    assert "invalid partition specified: fast" in said
    assert "Partitions here: debug (2 nodes of 4 CPUs, at most 1:00:00, gpu:2); down (" in said


def test_a_request_that_can_never_be_met_is_told(world: SlurmWorld) -> None:
    assert "Partitions here" in world.call(refused, "slurm:gpus-per-task=9,nodes=1")


def broken(folder: str) -> str:
    from dataclasses import replace

    from workbench.clusters import Cluster
    from workbench.clusters.local.mpi_install import find_mpi
    from workbench.errors import LaunchError

    mpiexec = Path(folder, "mpiexec")
    mpiexec.write_text("#!/bin/sh\necho no fabric on this node\nexit 3\n")
    mpiexec.chmod(0o755)
    try:
        Cluster(1, launcher="slurm", mpi=replace(find_mpi(), mpiexec=str(mpiexec)), quiet=True).stop()
    except LaunchError as error:
        return str(error)
    return "nothing failed"


def test_a_job_that_fails_says_why(world: SlurmWorld, tmp_path: Path) -> None:
    said = world.call(broken, str(tmp_path))
    assert "ended before its 1 ranks were ready" in said
    assert "no fabric on this node" in said
    assert "FAILED (NonZeroExitCode) on host1" in said


# ---------------------------------------------------------------- inside of a job

INSIDE = """
import json, sys
from workbench.clusters import Cluster
from workbench.clusters.slurm.queue import run_slurm
from workbench.errors import ConfigError
refused = []
for n, words in ((99, "slurm"), (2, "slurm:partition=debug")):
    try:
        Cluster(n, launcher=words, quiet=True)
    except ConfigError as error:
        refused.append(str(error))
with Cluster(2, launcher=sys.argv[1], quiet=True) as cluster:
    hosts = [rank["host"] for rank in cluster.ranks]
    print("SEEN" + json.dumps([hosts, cluster.client.ids, run_slurm("squeue", "-h", "-o", "%i").split(), refused]))
"""


def test_in_an_allocation_ranks_are_a_step_of_it(world: SlurmWorld) -> None:
    how = "slurm:mpi=pmix" if PMIX else "slurm"
    said = world.sh(f"salloc --nodes=2 --ntasks=2 {sys.executable} -c '{INSIDE}' {how}", timeout_s=120)
    assert "SEEN" in said, said
    hosts, ids, jobs, wrong = json.loads(said.partition("SEEN")[2].splitlines()[0])
    assert hosts == ["host1", "host2"] and ids == [0, 1]
    assert len(jobs) == 1
    assert "start at most 2" in wrong[0] and "partition" in wrong[1] and "this process is in Slurm" in wrong[1]


def cells_on_ranks(prefix: str) -> dict[str, Any]:
    from jupyter_client.manager import KernelManager

    from workbench.cli.main import main
    from workbench.clusters.slurm.queue import run_slurm

    assert main(["kernels", "install", "--prefix", prefix]) == 0
    os.environ["JUPYTER_PATH"] = str(Path(prefix, "share", "jupyter"))
    manager = KernelManager(kernel_name="workbench-slurm")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    said: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        content = message["content"]
        said.append({"stream": lambda: content["text"], "error": lambda: str(content)}.get(message["msg_type"], str)())

    try:
        client.wait_for_ready(timeout=60)
        for cell in (
            "%ranks 2",
            "%launcher slurm:nodes=2,time=10",
            "import os; print(rank, 'on', os.uname().nodename)",
        ):
            client.execute_interactive(cell, timeout=90, output_hook=hear)
        return {"said": "".join(said), "jobs": run_slurm("squeue", "-h", "-o", "%D %l").splitlines()}
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def test_cells_of_the_slurm_kernel_run_on_its_jobs_ranks(world: SlurmWorld, tmp_path: Path) -> None:
    seen = world.call(cells_on_ranks, str(tmp_path))
    assert "0 on host1" in seen["said"] and "1 on host2" in seen["said"], seen["said"]
    assert seen["jobs"] == ["2 10:00"]


# ---------------------------------------------------------------- the end of a job's time


def trained_and_detached(runs: str) -> tuple[str, str]:
    os.environ["WORKBENCH_RUNS"] = runs
    from workbench.algorithms import SynchronousSGD
    from workbench.clusters import Cluster
    from workbench.clusters.slurm.queue import run_slurm
    from workbench.clusters.slurm.request import Slurm
    from workbench.problems import digits_mlp

    cluster = Cluster(2, runtime="torch", launcher=Slurm(controller="job", time_limit="30", nodes=2), quiet=True)
    try:
        cluster.train(SynchronousSGD(), digits_mlp(), steps=1_000_000)
        return cluster.id, run_slurm("squeue", "-h", "-o", "%i").strip()
    finally:
        cluster.detach()


ELSEWHERE = """
import json, os, sys, time
from pathlib import Path
import workbench as wb
from workbench.clusters.slurm.queue import run_slurm
cluster = wb.attach(sys.argv[1], quiet=True)
run = cluster.run
steps = lambda: [row["step"] for row in run.run.steps()]
while not steps():
    time.sleep(0.1)
run_slurm("scancel", "--batch", "--signal=USR1", sys.argv[2])  # what --signal=B:USR1@60 does near the end
run.wait(60)
seen = {"status": run.status, "saved": sorted(path.name for path in run.folder.glob("checkpoint-*")), "state": cluster.state}
seen["complete"] = steps() == list(range(len(steps())))
seen["again"] = cluster.client[:].apply_sync(lambda: __import__("socket").gethostname())
seen["client"], seen["library"] = os.uname().nodename, run.run.info["library"]
cluster.stop()
print("SEEN" + json.dumps(seen))
"""


def test_a_detached_cluster_is_taken_up_elsewhere_and_warned_before_its_time_ends(
    world: SlurmWorld, python: str, tmp_path: Path
) -> None:
    name, job = world.call(trained_and_detached, str(tmp_path))
    log = (world.root / "cache" / "workbench" / "clusters" / name / "job.log").read_text
    assert "controller on host1" in log()
    said = world.sh(f"{python} -c '{ELSEWHERE}' {name} {job}", host="host2", timeout_s=120)
    assert "SEEN" in said, said
    seen = json.loads(said.partition("SEEN")[2])
    assert (seen["status"], seen["saved"]) == ("stopped", ["checkpoint-00000.pt", "checkpoint-00001.pt"])
    assert seen["complete"] and seen["library"] == "torch.distributed gloo"
    assert (seen["state"], seen["again"], seen["client"]) == ("ready", ["host1", "host2"], "host2")


@pytest.mark.parametrize("runtime", ["mpi", "torch"])
def test_a_submitted_training_goes_on_from_its_checkpoint(
    world: SlurmWorld, python: str, runs: Path, runtime: str
) -> None:
    env = {"WORKBENCH_RUNS": str(runs)}
    train = f"train synchronous-sgd --runtime {runtime} --workers 2 --steps 1000000 --evaluate-every 0"
    submit = f"{python} -m workbench submit --nodes 2 --gpus-per-rank 0 --time 30 --requeue"
    said = world.sh(f"{submit} -- {train}", env=env)
    assert said.startswith("job "), said
    job, log = said.split()[1].rstrip(":"), Path(said.split("output: ")[1].strip())

    def started(count: int) -> bool:
        found = list(list_runs())
        return (
            len(found) == count and found[-1].status == "running" and bool(Run.load(found[-1].folder).curve()[0].size)
        )

    def told() -> str:
        return f"{log.read_text() if log.exists() else 'no output'}\n{world.told(job)}"

    assert within(60, lambda: started(1)), told()
    world.sh(f"scancel --batch --signal=USR1 {job}")
    assert (
        within(60, lambda: world.sh(f"squeue -h -j {job} -o %T").strip(), lambda state: state == "PENDING") == "PENDING"
    ), told()
    begin_soon(world, job)
    assert within(120, lambda: started(2)), told()
    world.sh(f"scancel {job}")
    assert within(60, world.jobs, lambda jobs: jobs == []) == [], told()
    first, second = list_runs()
    assert (first.status, second.status) == ("stopped", "failed"), told()
    assert Path(second.info["resumed"]).name == first.id
    assert Run.load(second.folder).steps()[0]["step"] == Run.load(first.folder).steps()[-1]["step"] + 1
    headers = Run.load(second.folder).headers
    assert [headers[rank]["host"] for rank in (0, 1)] == ["host1", "host2"]
    assert "terminated" in second.info["error"]


FOR_CPUS = {  # what differs here from the script of the page: a node has one rank, and no GPU
    "--partition=gpu": "--partition=debug",
    "--time=02:00:00": "--time=00:05:00",
    "--ntasks-per-node=4": "--ntasks-per-node=1",
    "#SBATCH --gpus-per-node=4\n": "",
    "--cpus-per-task=8": "--cpus-per-task=1",
    "module load cuda\n": "",
    "resnet18-synthetic --steps 2000 --threads 8": "digits-mlp --steps 1000000 --evaluate-every 0",
}


def test_the_batch_script_of_the_page_on_gpus_trains_and_stops_with_a_checkpoint(
    world: SlurmWorld, python: str, runs: Path, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "gpus.md").read_text()
    script = next(block for block in page.split("```bash\n")[1:] if block.startswith("#!")).split("```")[0]
    for theirs, ours in FOR_CPUS.items():
        assert theirs in script
        script = script.replace(theirs, ours)
    script = script.replace("$HOME/runs-pipe", str(runs)).replace("workbench", f"{python} -m workbench")
    (tmp_path / "job.sh").write_text(script)
    job = world.sh(f"sbatch --parsable --output={tmp_path}/log {tmp_path}/job.sh").strip()

    def trains() -> bool:
        return any(bool(Run.load(run.folder).curve()[0].size) for run in list_runs())

    assert within(60, trains), world.told(job)
    world.sh(f"scancel --batch --signal=USR1 {job}")
    assert within(60, world.jobs, lambda jobs: jobs == []) == [], (tmp_path / "log").read_text()
    (run,) = list_runs()
    assert run.status == "stopped" and sorted(Run.load(run.folder).headers) == [0, 1]
    assert list(run.folder.glob("checkpoint-*")), "the next submission resumes it"


# ---------------------------------------------------------------- an own script in a submitted job

WARNED = """
import json, os, signal, sys, time
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"]
facts = [os.uname().nodename, *(os.environ.get(name) for name in names)]
def warned(*_):
    with open(f"{sys.argv[1]}/rank-{os.environ['RANK']}", "w") as file:
        json.dump(facts, file)
    sys.exit(0)
signal.signal(signal.SIGUSR1, warned)
open(f"{sys.argv[1]}/ready-{os.environ['RANK']}", "w").close()
time.sleep(60)
"""


def test_each_rank_of_an_own_script_has_its_variables_and_is_warned(
    world: SlurmWorld, python: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(WARNED)
    submit = f"{python} -m workbench submit --nodes 2 --ranks 4 --gpus-per-rank 1 --time 5"
    said = world.sh(f"{submit} -- {sys.executable} {tmp_path / 'own.py'} {tmp_path}")
    assert said.startswith("job "), said
    job, log = said.split()[1].rstrip(":"), Path(said.split("output: ")[1].strip())
    assert within(60, lambda: len(list(tmp_path.glob("ready-*"))), lambda count: count == 4) == 4, world.told(job)
    world.sh(f"scancel --batch --signal=USR1 {job}")
    assert within(60, world.jobs, lambda jobs: jobs == []) == [], world.told(job)
    facts = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*"))]
    port = facts[0][5] if facts else ""
    assert facts == [
        ["host1", "0", "4", "0", "host1", port, "0,1"],
        ["host1", "1", "4", "1", "host1", port, "0,1"],
        ["host2", "2", "4", "0", "host1", port, "0,1"],
        ["host2", "3", "4", "1", "host1", port, "0,1"],
    ], log.read_text()
    assert 10_000 <= int(port) < 30_000 and "the time limit is near: all ranks get SIGUSR1" in log.read_text()


OWN = """
import json, os, sys
from pathlib import Path
import torch, workbench as wb
model, place = torch.nn.Linear(3, 1), Path(sys.argv[1])
with wb.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), wb.PipeSGD(), timeout_s=60) as trainer:
    first = trainer.load(place / "saved", missing_ok=True)[0]
    for step in range(first, first + 20 if first else 10**9):
        trainer.step(lambda: model(torch.ones(2, 3)).square().mean())
        (place / "steps").touch()
        if wb.stop_requested(trainer):
            trainer.save(place / "saved")
            break
(place / f"rank-{trainer.rank}-from-{bool(first)}").write_text(json.dumps([os.uname().nodename, first, step + 1]))
"""


def test_an_own_script_with_a_trainer_stops_saves_and_goes_on(world: SlurmWorld, python: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    submit = f"{python} -m workbench submit --nodes 2 --ranks 2 --gpus-per-rank 0 --time 30 --requeue"
    said = world.sh(f"{submit} -- {sys.executable} {tmp_path / 'own.py'} {tmp_path}")
    assert said.startswith("job "), said
    job, log = said.split()[1].rstrip(":"), Path(said.split("output: ")[1].strip())

    def told() -> str:
        return f"{log.read_text() if log.exists() else 'no output'}\n{world.told(job)}"

    def written(whether: bool) -> list[list[Any]]:
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"rank-*-from-{whether}"))]

    assert within(60, (tmp_path / "steps").exists), told()
    world.sh(f"scancel --batch --signal=USR1 {job}")
    assert (
        within(60, lambda: world.sh(f"squeue -h -j {job} -o %T").strip(), lambda state: state == "PENDING") == "PENDING"
    ), told()
    before = written(False)
    assert [host for host, *_ in before] == ["host1", "host2"], told()
    done = before[0][2]
    assert done > 0 and before == [["host1", 0, done], ["host2", 0, done]], told()
    begin_soon(world, job)
    assert within(120, world.jobs, lambda jobs: jobs == []) == [], told()
    assert written(True) == [["host1", done, done + 20], ["host2", done, done + 20]], told()


def begin_soon(world: SlurmWorld, job: str) -> None:
    """Let a requeued job begin in two seconds: Slurm lets it rest for two minutes.

    Without any rest, slurmd takes the new start for the old one: it has revoked the credentials made up to the second
    of the old one's end, and the job is over ("Job credential revoked").
    """
    world.sh(f"scontrol update JobId={job} StartTime=now+2")


HOSTS = """from workbench import papers
with papers.ranks(2) as cluster:
    print(*sorted(rank["host"] for rank in cluster.ranks))"""


def test_a_paper_is_reproduced_in_a_job_with_ranks_on_its_nodes(world: SlurmWorld, python: str, tmp_path: Path) -> None:
    share = make_share(tmp_path / "share")
    write_notebook(share, "20-one", ("hosts", HOSTS), finding("20-one"), ranks="['local:2']")
    write_claims(share, "20-one")
    env = {"WORKBENCH_SHARE": str(share)}
    reproduce = f"{python} -m workbench reproduce {KEY} --submit slurm --output {tmp_path / 'out'}"
    said = world.sh(f"{reproduce} --nodes 2 --gpus-per-rank 0 --time 30", env=env)
    assert said.startswith("job "), said
    log = Path(said.split("output: ")[1].strip())
    assert within(200, world.jobs, lambda jobs: jobs == []) == [], log.read_text()
    record = tmp_path / "out" / "papers" / KEY / "records" / "20-one.smoke.slurm-workbench.json"
    assert record.is_file(), log.read_text()
    assert tagged_text(tmp_path / "out" / "20-one.ipynb", "hosts") == "host1 host2", log.read_text()
