"""Requests for a Slurm job: as text and as objects, the script, and refused values. Needs no Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench.clusters
from workbench.cli.main import main
from workbench.clusters.local.mpi_install import OPEN_MPI, MPIInstall
from workbench.clusters.schedulers.job import State
from workbench.clusters.slurm.batch_job import for_steps
from workbench.clusters.slurm.queue import Allocation, address_for_nodes, parse_counts, submit
from workbench.clusters.slurm.request import Slurm
from workbench.errors import ConfigError, LaunchError
from workbench.trace import new_run

EVERYTHING = (
    "slurm:partition=gpu,account=physics,time=1-02:00,qos=high,constraint=a100&ib,nodes=2,gpus-per-task=2,cpus-per-task=8,mem=64G,"
    "mpi=pmix,controller=job,--exclusive"
)
OBJECT = Slurm(
    partition="gpu",
    account="physics",
    time_limit="1-02:00",
    nodes=2,
    gpus_per_rank=2,
    mpi="pmix",
    controller="job",
    extra=("--qos=high", "--constraint=a100&ib", "--cpus-per-task=8", "--mem=64G", "--exclusive"),
)


def test_words_and_object_are_the_same() -> None:
    assert Slurm.parse(EVERYTHING) == OBJECT
    assert Slurm.parse("slurm") == Slurm() == workbench.clusters.Slurm()
    assert Slurm(extra=["--exclusive"]) == Slurm(extra=("--exclusive",))  # type: ignore[arg-type]


def test_everything_asked_for_is_in_the_script() -> None:
    script = OBJECT.script(
        8, name="cluster-1", output="/shared/my files/job.log", command=["python", "-P", "job.py", "a b"]
    )
    lines = script.splitlines()
    assert lines[0] == "#!/bin/sh"
    assert lines[-1] == "exec python -P job.py 'a b'"
    assert [line.removeprefix("#SBATCH ") for line in lines[1:-1]] == [
        "--job-name=cluster-1",
        "'--output=/shared/my files/job.log'",
        "--open-mode=append",
        "--signal=B:USR1@60",
        "--no-requeue",
        "--partition=gpu",
        "--account=physics",
        "--time=1-02:00",
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--gpus-per-task=2",
        "--qos=high",
        "'--constraint=a100&ib'",
        "--cpus-per-task=8",
        "--mem=64G",
        "--exclusive",
    ]
    assert "--requeue" in Slurm().script(1, name="a", output="b", command=["c"], requeue=True).split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("slurm:partitoin=debug", r"did you mean partition\?"),
        ("slurm:debug", "'debug' is no option"),
        ("slurm:nodes=2,nodes=3", "nodes is given twice"),
        ("slurm:gpus-per-task=2,gpus-per-rank=2", "gpus-per-rank is given twice"),
        ("slurm:nodes=two", "nodes='two': give a whole number"),
        ("slurm:nodes=0", "1 or more"),
        ("slurm:time=half an hour", "HH:MM:SS"),
        ("slurm:mpi=pmi", "'mpiexec', 'pmix', 'pmi2'"),
        ("slurm:controller=there", "'here', 'job'"),
        ("slurm:partition=a b", "without blanks"),
        ("slum:partition=a", "write it like 'slurm:"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Slurm.parse(words)


@pytest.mark.parametrize(
    "options",
    [{"partition": "a\n#SBATCH --uid=0"}, {"extra": "--exclusive"}, {"extra": ("exclusive",)}, {"extra": ("-a\nb",)}],
)
def test_nothing_else_gets_into_the_script(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Slurm(**options)


def test_fewer_ranks_than_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 ranks on 3 nodes.*nodes=2"):
        Slurm(nodes=3).options(2)


def test_ranks_see_all_gpus_of_their_node() -> None:
    command = Slurm(gpus_per_rank=1).start_command(4, "/mpi/mpiexec", ("--bind-to", "none"))
    assert command[:3] == ["env", "-u", "SLURM_GPUS_PER_TASK"]
    assert command[-5:] == ["/mpi/mpiexec", "-n", "4", "--bind-to", "none"]
    assert "--mpi=pmix" in Slurm(mpi="pmix").start_command(4, "/mpi/mpiexec", ())
    assert for_steps({"SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "2"}, command)["SLURM_GPUS_PER_NODE"] == "2"
    assert "SLURM_GPUS_PER_NODE" not in for_steps({"SLURM_GPUS_ON_NODE": "2"}, command)


def test_ranks_have_the_cpus_that_were_asked_for() -> None:
    environment = {"SLURM_CPUS_PER_TASK": "8"}
    assert for_steps(environment, ["mpiexec"]) == {"OMP_NUM_THREADS": "8"}  # its daemons' steps have all CPUs of a node
    assert for_steps(environment, ["srun"]) == {"OMP_NUM_THREADS": "8", "SRUN_CPUS_PER_TASK": "8"}
    assert for_steps(environment | {"OMP_NUM_THREADS": "2"}, ["mpiexec"]) == {"OMP_NUM_THREADS": "2"}


def test_an_allocation_is_known_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOBID", raising=False)
    assert Allocation.here() is None
    for name, value in (
        ("SLURM_JOB_ID", "7"),
        ("SLURM_JOB_CPUS_PER_NODE", "4(x2),8"),
        ("SLURM_TASKS_PER_NODE", "2(x3)"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert Allocation.here() == Allocation("7", 6, (4, 4, 8))
    assert parse_counts("") == []


@pytest.mark.notebooks
def test_what_a_running_job_has_fixed_is_refused() -> None:
    from workbench.clusters.launchers.slurm_launcher import StepLauncher

    def step(words: str) -> StepLauncher:
        return StepLauncher(
            MPIInstall(name=OPEN_MPI, version="5.0.11", mpiexec="mpiexec"), Slurm.parse(words), Allocation("7", 4, (4,))
        )

    for words, name in (
        ("partition=gpu", "partition"),
        ("nodes=2", "nodes"),
        ("gpus-per-task=2", "gpus_per_rank"),
        ("controller=job", "controller"),
    ):
        with pytest.raises(ConfigError, match=rf"Slurm's job 7, .* A running job cannot change .*{name}"):
            step(f"slurm:{words}").check_num_ranks(2)
    step("slurm").check_num_ranks(4)
    step("slurm:nodes=1,mpi=pmix,controller=here").check_num_ranks(4)


def test_a_jobs_state_in_words() -> None:
    assert State("PENDING", "Resources").waits == "pending: Resources"
    assert State("CONFIGURING", "None").waits == "configuring"
    assert State("RUNNING", "None", "n1").waits is None
    assert not State("TIMEOUT", "TimeLimit").alive
    assert str(State("FAILED", "NonZeroExitCode", "n1")) == "FAILED (NonZeroExitCode) on n1"


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"no `sbatch` on this machine.*launcher='local'"):
        submit("#!/bin/sh\n")
    with pytest.raises(LaunchError, match="no `scontrol`"):
        address_for_nodes()


def test_submit_shows_its_script_and_refuses_early(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    assert (
        main(
            [
                "submit",
                "--time",
                "30",
                "--nodes",
                "2",
                "--requeue",
                "--dry-run",
                "--",
                "train",
                "pipe-sgd",
                "--workers",
                "4",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    for words in ("--time=30", "--ntasks=4", "--ntasks-per-node=2", "--requeue", "--signal=B:USR1@60"):
        assert f"#SBATCH {words}" in said.splitlines()
    assert main(["submit", "--warn", "300", "--dry-run", "--", "train", "pipe-sgd"]) == 0
    signals = [line for line in capsys.readouterr().out.splitlines() if "--signal" in line]
    assert signals[-1] == "#SBATCH --signal=B:USR1@300", "sbatch takes the last"
    for argv, words in (
        ([], "give a training after"),
        (["train", "pipe-sdg"], "pipe-sgd"),
        (["train", "pipe-sgd", "--runtime", "simulated"], "one process"),
        (["train", "pipe-sgd", "--json"], "show last --json"),
        (["train", "pipe-sgd", "--workers", "0"], "--workers 0: give 1 or more"),
        (["train", "pipe-sgd", "--batch-size", "0"], "batch_size=0"),
        (["train", "pipe-sgd", "--lr", "-1"], "lr=-1"),
        (["train", "pipe-sgd", "--optimizer", "Adan"], "did you mean Adam"),
        (["train", "pipe-sgd", "--network", "infiniband-hdr"], "for simulated workers"),
        (["train", "pipe-sgd", "--resume", "nope"], "no run 'nope'"),
        (
            ["train", "pipe-sgd", "--resume", new_run({"algorithm": {"name": "PipeSGD"}}, runs).name],
            "has no checkpoint",
        ),
    ):
        assert main(["submit", "--", *argv]) == 2
        assert words in capsys.readouterr().err
