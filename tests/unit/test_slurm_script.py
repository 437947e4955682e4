"""Requests for a Slurm job: as text and as objects, the script, and refused values. Needs no Slurm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import workbench.clusters
from workbench.cli.main import main
from workbench.clusters.local.mpi_install import OPEN_MPI, MPIInstall, check_num_ranks
from workbench.clusters.schedulers.job import State
from workbench.clusters.slurm.batch_job import for_steps
from workbench.clusters.slurm.queue import Allocation, address_for_nodes, submit
from workbench.clusters.slurm.request import Slurm
from workbench.errors import ConfigError, LaunchError
from workbench.machine import num_cores, num_cores_of_job, parse_counts
from workbench.runtimes.checkpoint.files import write_rank_file
from workbench.runtimes.control.job import JOB_VARIABLE
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
    assert signals == ["#SBATCH --signal=B:USR1@300"]
    for argv, words in (
        ([], "there is no command after --: give a training (-- train pipe-sgd --workers 8) or your own"),
        (["train", "pipe-sdg"], "pipe-sgd"),
        (["train", "pipe-sgd", "--runtime", "simulated"], "one process"),
        (["train", "pipe-sgd", "--json"], "show last --json"),
        (["train", "pipe-sgd", "--workers", "0"], "--workers 0: give 1 or more"),
        (["train", "pipe-sgd", "--batch-size", "0"], "batch_size=0"),
        (["train", "pipe-sgd", "--lr", "-1"], "lr=-1"),
        (["train", "pipe-sgd", "--optimizer", "Adan"], "did you mean Adam"),
        (["train", "pipe-sgd", "--network", "infiniband-hdr"], "for simulated workers"),
        (["train", "pipe-sgd", "--schedule", "cosine"], "use cluster.train(..., schedule=...) in Python, or your own"),
        (["train", "pipe-sgd", "--resume", "nope"], "no run 'nope'"),
        (
            ["train", "pipe-sgd", "--resume", new_run({"algorithm": {"name": "PipeSGD"}}, runs).name],
            "has no checkpoint",
        ),
    ):
        assert main(["submit", "--", *argv]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--warn", "0"], "--warn 0: give 1 second or more"),
        (["--time", "5", "--warn", "300"], "would be asked to stop at its start"),
        (["--time", "00:05:00", "--warn", "600", "--requeue"], "would be asked to stop at its start"),
    ],
)
def test_a_training_that_would_stop_at_its_start_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --requeue it would take one step in each turn, without end."""
    assert main(["submit", *options, "--dry-run", "--", "train", "pipe-sgd"]) == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- submit


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for `sbatch` and `sinfo`: the folder in which sbatch leaves its script, and sinfo finds its rows."""
    for name, text in (("sbatch", "cat > {0}/script; echo 7"), ("sinfo", 'echo "$*" > {0}/asked; cat {0}/rows')):
        (tmp_path / "bin").mkdir(exist_ok=True)
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{text.format(tmp_path)}\n")
        program.chmod(0o755)
    (tmp_path / "rows").write_text("cpu*|(null)\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def submitted(folder: Path, *argv: str) -> tuple[dict[str, Any], str]:
    """The specification and the batch script of a job."""
    assert main(["submit", *argv]) == 0
    (spec,) = (folder / "cache").glob("workbench/jobs/*/job.json")
    found = json.loads(spec.read_text())
    shutil.rmtree(spec.parent)
    return found, (folder / "script").read_text()


def test_an_own_script_is_run_by_srun(
    slurm_commands: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm_commands / "my model.py").touch()
    monkeypatch.chdir(slurm_commands)
    own = ["python", "my model.py", "--lr", "0.1", "--nodes", "3"]
    job = ["--nodes", "2", "-n", "8", "--gpus-per-rank", "1", "--requeue"]
    spec, script = submitted(slurm_commands, *job, "--", *own)
    python = str(Path(shutil.which("python") or "").absolute())
    assert spec["command"][-6:] == [python, *own[1:]]
    assert spec["command"][:4] == ["env", "-u", "SLURM_GPUS_PER_TASK", "-u"] and "srun" in spec["command"]
    assert (spec["on_warning"], spec["rendezvous"], spec["requeue"]) == ("signal", True, "again")
    assert spec["environment"][JOB_VARIABLE] == spec["folder"]
    for option in ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--gpus-per-task=1", "--requeue"):
        assert f"#SBATCH {option}" in script.splitlines()
    assert "--job-name=my-model-" in script and capsys.readouterr().err == ""


def test_a_rank_of_srun_has_its_variables_and_ignores_the_warning() -> None:
    names = "'RANK', 'WORLD_SIZE', 'LOCAL_RANK'"
    code = f"import os, signal, sys; print([os.environ[name] for name in ({names})]); "
    code += "os.kill(os.getpid(), signal.SIGUSR1); print(sys.argv[1:])"
    command = Slurm().srun_command(4, [sys.executable, "-c", code, "a b", "$RANK"])
    task = {**os.environ, "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    done = subprocess.run(command[command.index("sh") :], env=task, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["['3', '4', '1']", "['a b', '$RANK']"], done.stderr
    assert "--kill-on-bad-exit=1" in command and "--kill-on-bad-exit=0" in Slurm().srun_command(4, ["a"], outlives=True)


def test_a_training_on_torch_is_run_by_srun_and_one_on_mpi_starts_its_ranks(slurm_commands: Path) -> None:
    train = ["train", "pipe-sgd", "--workers", "4", "--on-failure", "shrink"]
    spec, script = submitted(slurm_commands, "--cpus-per-rank", "8", "--requeue", "--", *train, "--runtime", "torch")
    assert spec["command"][-12:] == ["-m", "workbench", *train, "--runtime", "torch", "--threads", "8"]
    assert {"srun", "--kill-on-bad-exit=0"} < set(spec["command"]) and "#SBATCH --ntasks=4" in script.splitlines()
    assert (spec["on_warning"], spec["rendezvous"], spec["requeue"]) == ("command", True, "checkpoint")
    spec, _ = submitted(slurm_commands, "--", *train)
    assert "srun" not in spec["command"] and spec["command"][-6:] == train
    assert (spec["on_warning"], spec["rendezvous"], spec["requeue"]) == ("command", False, False)


def test_a_job_resumes_the_run_that_was_the_last_one_when_it_was_submitted(slurm_commands: Path, runs: Path) -> None:
    """The job may start hours later, when `last` is another run."""
    folder = new_run({"algorithm": {"name": "PipeSGD"}}, runs)
    write_rank_file(folder / "checkpoint-00000.pt", lambda file: None, {"num_workers": 1, "step": 3})
    train = ["train", "pipe-sgd", "--workers", "1", "--resume", "last"]
    spec, _ = submitted(slurm_commands, "--", *train)
    assert spec["command"][-2:] == ["--resume", str(folder)]


def test_an_own_command_that_cannot_run_is_refused(
    slurm_commands: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm_commands / "mine.py").touch()
    monkeypatch.chdir(slurm_commands)
    for options, argv, words in (
        ([], ["python", "mine.py"], "give the number of ranks: workbench submit --ranks 8 ... -- python mine.py"),
        (["--ranks", "0"], ["python", "mine.py"], "0 ranks: give a whole number"),
        (["--ranks", "2", "--nodes", "3"], ["python", "mine.py"], "2 ranks on 3 nodes"),
        (["--ranks", "2"], ["python", "other.py"], "there is no file other.py in "),
        (["--ranks", "2"], ["mine.py"], "there is no program 'mine.py' here. Give a training (-- train"),
        (["--ranks", "2"], ["trian", "pipe-sgd"], "did you mean train?"),
        (["--ranks", "2"], ["torchrun", "mine.py"], "leave torchrun and its options out"),
        (["--ranks", "2"], ["/usr/bin/srun", "python", "mine.py"], "leave srun and its options out"),
        (["--ranks", "2"], ["workbench", "train", "pipe-sgd"], "leave `workbench` out after --"),
        (["--ranks", "2"], ["train", "pipe-sgd"], "the ranks of a training are its --workers"),
        ([], ["train", "pipe-sgd", "--runtime", "torch", "--replace"], "srun starts the ranks of this job"),
    ):
        assert main(["submit", *options, "--", *argv]) == 2, argv
        said = capsys.readouterr()
        assert words in said.err and said.out == "", argv
    assert not (slurm_commands / "script").exists()


@pytest.mark.parametrize(
    ("options", "rows", "device", "cuda", "reason"),
    [
        ([], "cpu*|(null)\n", "cpu", None, None),
        ([], "cpu*|(null)\n", "cuda:0", None, "its command names 'cuda:0'"),
        ([], "cpu*|(null)\ngpu|gpu:a100:4\n", "cpu", None, None),
        ([], "cpu|(null)\ngpu*|gpu:a100:4(S:0-1)\n", "cpu", None, "nodes of partition gpu have GPUs (gpu:a100:4"),
        (["-p", "big"], "big|gpu:4\n", "cpu", None, "nodes of partition big have GPUs (gpu:4)"),
        ([], "cpu*|(null)\n", "cpu", "12.6", "PyTorch here is a build for CUDA"),
        (["--gpus-per-rank", "0"], "gpu*|gpu:4\n", "cuda", "12.6", None),
        (["--gpus-per-rank", "1"], "gpu*|gpu:4\n", "cuda", "12.6", None),
        (["--extra=--gres=gpu:4"], "gpu*|gpu:4\n", "cuda", "12.6", None),
        (["--extra=--gpus-per-node=4"], "gpu*|gpu:4\n", "cuda", "12.6", None),
        (["--constraint", "gpu"], "gpu*|gpu:4\n", "cpu", None, "nodes of partition gpu have GPUs"),
    ],
)
def test_a_job_without_gpus_is_told_if_it_seems_to_need_them(
    slurm_commands: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    rows: str,
    device: str,
    cuda: str | None,
    reason: str | None,
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", cuda)
    (slurm_commands / "rows").write_text(rows)
    for dry_run in (["--dry-run"], []):
        assert main(["submit", *options, *dry_run, "-n", "2", "--", "python", "-c", "pass", "--device", device]) == 0
        said = capsys.readouterr().err
        if reason is None:
            assert said == ""
        else:
            assert said.startswith("workbench: the job asks for no GPU") and said.count("\n") == 1
            assert reason in said and "--gpus-per-rank 1" in said and "--gpus-per-rank 0" in said
    asked = slurm_commands / "asked"
    assert not asked.exists() or asked.read_text().endswith("-p big\n" if "big" in rows else "%P|%G\n")


@pytest.mark.parametrize(
    ("options", "train", "said"),
    [
        ([], [], []),
        (["--nodes", "2", "--gpus-per-rank", "1"], ["--runtime", "torch"], []),
        (["--gpus-per-rank", "1"], [], ["the ranks use MPI. For NCCL between the GPUs: train ... --runtime torch"]),
        (["--nodes", "3", "--gpus-per-rank", "0"], [], ["8 ranks are not spread evenly over 3 nodes"]),
    ],
)
def test_ranks_on_mpi_with_gpus_and_uneven_nodes_are_told(
    slurm_commands: Path, capsys: pytest.CaptureFixture[str], options: list[str], train: list[str], said: list[str]
) -> None:
    assert main(["submit", *options, "--dry-run", "--", "train", "pipe-sgd", "--workers", "8", *train]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said) and all(words in line for words, line in zip(said, lines, strict=True))


@pytest.mark.notebooks
def test_a_cluster_in_a_job_without_gpus_is_told(slurm_commands: Path) -> None:
    from workbench.clusters.launchers.slurm_launcher import slurm_launcher

    install = MPIInstall(name=OPEN_MPI, version="5.0.11", mpiexec="mpiexec")
    (slurm_commands / "rows").write_text("gpu*|gpu:4\n")
    with pytest.warns(RuntimeWarning, match=r"partition gpu have GPUs \(gpu:4\).*gpus-per-task=1.*gpus-per-task=0"):
        slurm_launcher("slurm:nodes=2", install)
    slurm_launcher("slurm:nodes=2,gpus-per-task=0", install)
    slurm_launcher("slurm:nodes=2,gpus-per-node=4", install)


def test_a_dry_run_needs_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "pipe-sgd", "--problem", "cifar10-cnn", "--option", f"folder={tmp_path / 'elsewhere'}"]
    assert main(["submit", "--dry-run", "--", *train]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("#!/bin/sh\n") and "#SBATCH --ntasks=2" in said.out
    assert "workbench: not on this machine: cifar10: looked in" in said.err
    assert main(["submit", "--", *train]) == 2
    assert "the folder does not exist" in capsys.readouterr().err


def test_mpiexec_in_a_job_has_the_cores_of_all_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_CPUS_PER_NODE", raising=False)
    assert num_cores_of_job() == num_cores()
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "64(x2),32")
    assert num_cores_of_job() == max(160, num_cores())
    most = 4 * num_cores() + 8
    check_num_ranks(most + 1, by_mpiexec=True)
    with pytest.raises(ConfigError, match=f"at most {most} here"):
        check_num_ranks(most + 1)
