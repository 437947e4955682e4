"""Requests for jobs of PBS, LSF, SGE and HTCondor: scripts, templates, states, and refused values. Needs no scheduler."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import workbench.clusters
from workbench.clusters.local.mpi_install import MPICH, OPEN_MPI, MPIInstall
from workbench.clusters.schedulers import dialects
from workbench.clusters.schedulers.dialects import DIALECTS
from workbench.clusters.schedulers.job import State
from workbench.clusters.schedulers.request import PLACEHOLDERS, BatchJob
from workbench.doctor import machine
from workbench.errors import ConfigError, LaunchError

NAME = "cluster-1a2b3c4d"
COMMAND = ["/env/bin/python", "-P", "/src/my job.py", "/state/job.json"]
FULL = {
    "pbs": """\
#!/bin/sh
#PBS -N cluster-1a2b3c4
#PBS -V
#PBS -j oe
#PBS -o /dev/null
#PBS -r n
#PBS -q gpu
#PBS -A physics
#PBS -l walltime=01:00:00
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l place=scatter
#PBS -W group_list=lab
#PBS -m n
exec >> /state/job.log 2>&1
cd "$PBS_O_WORKDIR"
exec /env/bin/python -P '/src/my job.py' /state/job.json
""",
    "lsf": """\
#!/bin/sh
#BSUB -J cluster-1a2b3c4
#BSUB -o /dev/null
#BSUB -rn
#BSUB -q gpu
#BSUB -P physics
#BSUB -W 60
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -W group_list=lab
#BSUB -m n
exec >> /state/job.log 2>&1
exec /env/bin/python -P '/src/my job.py' /state/job.json
""",
    "sge": """\
#!/bin/sh
#$ -N cluster-1a2b3c4
#$ -S /bin/sh
#$ -V
#$ -cwd
#$ -j y
#$ -o /dev/null
#$ -r n
#$ -notify
#$ -q gpu
#$ -P physics
#$ -l h_rt=01:00:00
#$ -pe mpi 8
#$ -W group_list=lab
#$ -m n
exec >> /state/job.log 2>&1
exec /env/bin/python -P '/src/my job.py' /state/job.json
""",
    "htcondor": """\
batch_name = cluster-1a2b3c4
universe = vanilla
executable = /usr/bin/env
arguments = "/env/bin/python -P '/src/my job.py' /state/job.json"
transfer_executable = False
should_transfer_files = NO
getenv = True
output = /state/job.log
error = /state/job.log
accounting_group = physics
allowed_execute_duration = 3600
request_cpus = 8
-W group_list=lab
-m n
queue
""",
}
SHORT = {
    "pbs": """\
#!/bin/sh
#PBS -N cluster-1a2b3c4
#PBS -V
#PBS -j oe
#PBS -o /dev/null
#PBS -r n
#PBS -l select=1:ncpus=8:mpiprocs=8
#PBS -l place=scatter
exec >> /state/job.log 2>&1
cd "$PBS_O_WORKDIR"
exec /env/bin/python -P '/src/my job.py' /state/job.json
""",
    "lsf": """\
#!/bin/sh
#BSUB -J cluster-1a2b3c4
#BSUB -o /dev/null
#BSUB -rn
#BSUB -n 8
exec >> /state/job.log 2>&1
exec /env/bin/python -P '/src/my job.py' /state/job.json
""",
    "sge": """\
#!/bin/sh
#$ -N cluster-1a2b3c4
#$ -S /bin/sh
#$ -V
#$ -cwd
#$ -j y
#$ -o /dev/null
#$ -r n
#$ -notify
#$ -pe mpi 8
exec >> /state/job.log 2>&1
exec /env/bin/python -P '/src/my job.py' /state/job.json
""",
    "htcondor": """\
batch_name = cluster-1a2b3c4
universe = vanilla
executable = /usr/bin/env
arguments = "/env/bin/python -P '/src/my job.py' /state/job.json"
transfer_executable = False
should_transfer_files = NO
getenv = True
output = /state/job.log
error = /state/job.log
request_cpus = 8
queue
""",
}


def own(scheduler: str, **options: Any) -> BatchJob:
    """A job with only the options that this scheduler needs or accepts."""
    refused = {"htcondor": ("queue", "nodes"), "sge": ("nodes",)}.get(scheduler, ())
    fixed = {"pe": "mpi"} if scheduler == "sge" else {}
    return BatchJob(scheduler, **fixed, **{name: value for name, value in options.items() if name not in refused})


def script(job: BatchJob, num_ranks: int = 8) -> str:
    return job.script(num_ranks, name=NAME, output="/state/job.log", command=COMMAND)


@pytest.mark.parametrize("scheduler", DIALECTS)
def test_script_has_all_options(scheduler: str) -> None:
    extra = ["-W group_list=lab", "-m n"]
    job = own(scheduler, queue="gpu", account="physics", walltime="01:00:00", nodes=2, extra=extra)
    assert script(job) == FULL[scheduler]


@pytest.mark.parametrize("scheduler", DIALECTS)
def test_script_without_options(scheduler: str) -> None:
    assert script(own(scheduler)) == SHORT[scheduler]


def test_ranks_per_node_are_rounded_up() -> None:
    assert "select=3:ncpus=3:mpiprocs=3" in script(BatchJob("pbs", nodes=3), 8)
    assert '#BSUB -R "span[ptile=3]"' in script(BatchJob("lsf", nodes=3), 8)


def test_walltime_in_each_unit() -> None:
    assert "#BSUB -W 91\n" in script(BatchJob("lsf", walltime="01:30:01"))
    assert "allowed_execute_duration = 5401\n" in script(BatchJob("htcondor", walltime="01:30:01"))


def test_the_training_is_asked_to_stop_before_the_time_limit() -> None:
    assert BatchJob("pbs").warn_after_s is None
    assert BatchJob("pbs", walltime="01:00:00").warn_after_s == 3540
    assert BatchJob("pbs", walltime="00:01:30").warn_after_s == 45


def test_text_and_object_are_the_same() -> None:
    text = "pbs:queue=gpu, walltime=01:00:00,nodes=2,account=physics,controller=job,extra=-l mem=16gb,extra=-W x=y"
    extra = ["-l mem=16gb", "-W x=y"]
    expected = BatchJob(
        "pbs", queue="gpu", walltime="01:00:00", nodes=2, account="physics", controller="job", extra=tuple(extra)
    )
    assert BatchJob.parse(text) == expected
    assert BatchJob("pbs", extra=extra) == BatchJob("pbs", extra=tuple(extra))  # type: ignore[arg-type]
    assert BatchJob.parse("lsf") == BatchJob("lsf") == workbench.clusters.BatchJob("lsf")


def test_a_condor_argument_with_quotes() -> None:
    assert DIALECTS["htcondor"].quote(["it's", 'a "b"', "", "c"]) == """'it''s' 'a ""b""' '' c"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pbs:queeu=gpu", r"did you mean queue\?"),
        ("pbs:gpu", "'gpu' is no option of it"),
        ("lsf:queue=a,queue=b", "queue is given twice"),
        ("pbs:nodes=two", "nodes='two': give a whole number"),
        ("pbs:nodes=0", "1 or more"),
        ("pbs:walltime=30", "'HH:MM:SS'"),
        ("lsf:controller=there", "'here', 'job'"),
        ("pbs:queue=a b", "without blanks"),
        ("sge:queue=all.q", "SGE needs pe=NAME, a parallel environment"),
        ("sge:pe=mpi,nodes=2", "the SGE script does not use nodes: leave it out"),
        ("pbs:pe=mpi", "the PBS script does not use pe"),
        ("htcondor:queue=gpu", "the HTCondor script does not use queue"),
        ("htcondor:nodes=2", "the HTCondor script does not use nodes"),
        ("pbs:template=/no/such/job.sh", "cannot be read"),
        ("moab:queue=a", "'pbs', 'lsf', 'sge', 'htcondor'"),
    ],
)
def test_wrong_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchJob.parse(text)


@pytest.mark.parametrize(
    "options",
    [{"queue": "a\n#PBS -q b"}, {"extra": "-m n"}, {"extra": ["-m n\n#PBS -q b"]}, {"extra": [""]}, {"account": ""}],
)
def test_nothing_else_gets_into_the_script(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BatchJob("pbs", **options)


# ---------------------------------------------------------------- a template


def template(folder: Path, text: str) -> str:
    path = folder / "job.sh"
    path.write_text(text)
    return str(path)


def test_own_template_is_filled(tmp_path: Path) -> None:
    path = template(
        tmp_path,
        "#!/bin/bash\n#PBS -l nodes={nodes}:ppn={ranks_per_node}:gpus={ranks_per_node},walltime={walltime}\n"
        "#PBS -q {queue}\n#PBS -A {account}\n#PBS {extra}\nmodule load ${MPI}\n"
        "awk '{ print }' $PBS_NODEFILE > {log}\nexec {command}\n",
    )
    job = BatchJob.parse(f"pbs:template={path},nodes=2,walltime=00:10:00,queue=gpu")
    assert script(job) == (
        "#!/bin/bash\n#PBS -l nodes=2:ppn=4:gpus=4,walltime=00:10:00\n#PBS -q gpu\nmodule load ${MPI}\n"
        "awk '{ print }' $PBS_NODEFILE > /state/job.log\nexec /env/bin/python -P '/src/my job.py' /state/job.json\n"
    )


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("exec {comand}\n", {}, r"\{comand\} is no placeholder.*did you mean command\?"),
        ("#PBS -q gpu\n", {}, r"has no \{command\}"),
        ("exec {command}\n", {"queue": "gpu"}, r"does not use queue: leave it out, or write \{queue\} into it"),
        ("exec {command}\n", {"nodes": 2}, r"does not use nodes"),
    ],
)
def test_a_template_that_cannot_work_is_refused(
    tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchJob("pbs", template=template(tmp_path, text), **options)


def test_a_template_needs_no_option_that_it_does_not_use(tmp_path: Path) -> None:
    assert "exec /env" in script(BatchJob("sge", template=template(tmp_path, "exec {command}\n")))


def test_the_page_has_all_placeholders_and_scripts_that_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "schedulers.md").read_text()
    assert [name for name in PLACEHOLDERS if f"`{{{name}}}`" not in page] == []
    built_in, *others = re.findall(r"^```text\n(#!.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert built_in == DIALECTS["pbs"].template
    (own,) = [text for text in others if "{command}" in text]
    text = script(BatchJob("pbs", queue="gpu", walltime="01:00:00", nodes=2, template=template(tmp_path, own)))
    assert "#PBS -l select=2:ncpus=32:ngpus=4:mpiprocs=4:mem=128gb\n" in text and text.endswith("/state/job.json\n")


# ---------------------------------------------------------------- the command that starts ranks


def test_ranks_start_on_the_nodes_of_the_job() -> None:
    open_mpi = MPIInstall(name=OPEN_MPI, version="5.0.11", mpiexec="/mpi/mpiexec", args=("--bind-to", "none"))
    assert BatchJob("pbs").start_command(8, open_mpi, ["-x", "PATH"]) == [
        "sh",
        "-c",
        'hosts="$PBS_NODEFILE"; exec "$0" ${hosts:+--hostfile "$hosts"} "$@"',
        *("/mpi/mpiexec", "-n", "8", "--bind-to", "none", "-x", "PATH"),
    ]
    mpich = MPIInstall(name=MPICH, version="4.3", mpiexec="mpiexec")
    assert BatchJob("lsf").start_command(8, mpich, []) == [
        "sh",
        "-c",
        'hosts="$LSB_DJOB_HOSTFILE"; exec "$0" ${hosts:+-f "$hosts"} "$@"',
        *("mpiexec", "-n", "8"),
    ]
    assert BatchJob("htcondor").start_command(8, mpich, []) == ["mpiexec", "-n", "8"]


@pytest.mark.parametrize(
    ("scheduler", "variable", "given", "expected"),
    [
        ("pbs", "PBS_NODEFILE", "a\na\nb\n", "a\na\nb\n"),
        ("lsf", "LSB_DJOB_HOSTFILE", "a\na\nb\n", "a\na\nb\n"),
        ("sge", "PE_HOSTFILE", "a 2 all.q@a UNDEFINED\nb 1 all.q@b UNDEFINED\n", "a\na\nb\n"),
    ],
)
def test_mpiexec_gets_a_line_for_each_ranks_host(
    tmp_path: Path, scheduler: str, variable: str, given: str, expected: str
) -> None:
    (tmp_path / "given").write_text(given)
    echo = MPIInstall(name=OPEN_MPI, version="5", mpiexec="echo")
    env = {"PATH": os.environ["PATH"], "IPP_PROFILE_DIR": str(tmp_path), variable: str(tmp_path / "given")}
    command = own(scheduler).start_command(3, echo, [])
    done = subprocess.run([*command, "engine"], env=env, capture_output=True, text=True, timeout=30, check=True)
    option, path, *rest = done.stdout.split()
    assert (option, Path(path).read_text(), rest) == ("--hostfile", expected, ["-n", "3", "engine"])


def test_more_nodes_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 ranks on 3 nodes.*nodes=2"):
        BatchJob("pbs", nodes=3).check_num_ranks(2)


@pytest.mark.parametrize(
    ("scheduler", "command"), [("pbs", "qsub"), ("lsf", "bsub"), ("sge", "qsub"), ("htcondor", "condor_submit")]
)
def test_a_machine_without_the_scheduler_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheduler: str, command: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"there is no {command} on this machine: log in where {DIALECTS[scheduler].name} is"
    ):
        own(scheduler).check_num_ranks(1)


# ---------------------------------------------------------------- what the schedulers print

WRAPPED = """Job Id: 12.server
    Job_Name = cluster-1
    job_state = {code}
    queue = workq
    comment = Not Running: Insufficient amount of resource: ncpus
\t(R: 8 A: 4 T: 4)
"""
SGE_ROWS = """job-ID  prior   name       user         state submit/start at     queue                          slots ja-task-ID
-----------------------------------------------------------------------------------------------------------------
    112 0.55500 other      ada          r     11/26/2026 10:00:00 all.q@node1                        1
     12 0.55500 cluster-1  ada          {code}     11/26/2026 10:00:00 all.q@node1                        8
"""
PRINTED = [
    ("pbs", WRAPPED.format(code="Q"), State("PENDING", "Not Running: Insufficient amount of resource: ncpus")),
    ("pbs", "    job_state = H\n", State("PENDING", "state H")),
    ("pbs", WRAPPED.format(code="R"), State("RUNNING")),
    ("pbs", "    job_state = E\n", State("RUNNING")),
    ("pbs", "    job_state = F\n", State("ENDED", "state F")),
    ("pbs", LaunchError("qstat: Unknown Job Id 12.server"), State("UNKNOWN", "PBS does not know it any more")),
    (
        "pbs",
        LaunchError("qstat: 12.server Job has finished, use -x"),
        State("UNKNOWN", "PBS does not know it any more"),
    ),
    ("lsf", "PEND\n", State("PENDING", "state PEND")),
    ("lsf", "RUN\n", State("RUNNING")),
    ("lsf", "UNKWN\n", State("RUNNING")),
    ("lsf", "EXIT\n", State("ENDED", "state EXIT")),
    ("lsf", "DONE\n", State("ENDED", "state DONE")),
    ("lsf", LaunchError("Job <12> is not found"), State("UNKNOWN", "LSF does not know it any more")),
    ("sge", SGE_ROWS.format(code="qw"), State("PENDING", "state qw")),
    ("sge", SGE_ROWS.format(code="hqw"), State("PENDING", "state hqw")),
    ("sge", SGE_ROWS.format(code="r"), State("RUNNING")),
    ("sge", SGE_ROWS.format(code="t"), State("RUNNING")),
    ("sge", SGE_ROWS.format(code="dr"), State("RUNNING")),
    ("sge", SGE_ROWS.format(code="Eqw"), State("ENDED", "state Eqw")),
    ("sge", "", State("UNKNOWN", "SGE does not know it any more")),
    ("sge", SGE_ROWS.replace(" 12 ", " 13 "), State("UNKNOWN", "SGE does not know it any more")),
    ("htcondor", "1 undefined\n", State("PENDING", "state 1")),
    ("htcondor", "2 undefined\n", State("RUNNING")),
    ("htcondor", "5 via condor_hold (by user ada)\n", State("ENDED", "via condor_hold (by user ada)")),
    ("htcondor", "4 undefined\n", State("ENDED", "state 4")),
    ("htcondor", "", State("UNKNOWN", "HTCondor does not know it any more")),
]


@pytest.mark.parametrize(("scheduler", "printed", "expected"), PRINTED)
def test_states_are_read(
    monkeypatch: pytest.MonkeyPatch, scheduler: str, printed: str | LaunchError, expected: State
) -> None:
    def answer(*_: object) -> str:
        if isinstance(printed, LaunchError):
            raise printed
        return printed

    monkeypatch.setattr(dialects, "run_command", answer)
    assert DIALECTS[scheduler].state("12") == expected


def test_a_scheduler_that_does_not_answer_is_no_end_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise LaunchError("pbs_iff: cannot connect to host")

    monkeypatch.setattr(dialects, "run_command", fail)
    with pytest.raises(LaunchError, match="cannot connect"):
        DIALECTS["pbs"].state("12")


@pytest.mark.parametrize(
    ("scheduler", "printed", "number"),
    [
        ("pbs", "welcome to the site\n12.server\n", "12.server"),
        ("lsf", "Job <12> is submitted to default queue <normal>.\n", "12"),
        ("sge", 'Your job 12 ("cluster-1") has been submitted\n', "12"),
        ("htcondor", "Submitting job(s).\n1 job(s) submitted to cluster 12.\n", "12"),
    ],
)
def test_the_jobs_number_is_read(monkeypatch: pytest.MonkeyPatch, scheduler: str, printed: str, number: str) -> None:
    monkeypatch.setattr(dialects, "run_command", lambda *_: printed)
    assert DIALECTS[scheduler].submit("script") == number
    monkeypatch.setattr(dialects, "run_command", lambda *_: "no\n")
    with pytest.raises(LaunchError, match="printed no job number: 'no'"):
        DIALECTS[scheduler].submit("script")


def test_doctor_names_the_commands_that_it_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(machine.schedulers()) == []
    (tmp_path / "qsub").touch(0o755)
    assert [(found.state, found.found) for found in machine.schedulers()] == [
        ("ok", "qsub: launcher='pbs:...' or 'sge:...'; docs/how-to/schedulers.md says what was tested")
    ]
