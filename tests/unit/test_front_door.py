"""Messages of the command line for a wrong argument: the near miss, the limit, a file of another kind."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import workbench as wb
from workbench import problems
from workbench.cli.doctor import _conclusion
from workbench.cli.main import main
from workbench.doctor import software
from workbench.doctor.check_result import CheckResult
from workbench.errors import ConfigError
from workbench.resources import PACKAGE
from workbench.trace.run import Run


def test_a_command_that_is_none_names_the_near_miss_and_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words, status, said in ((["trian"], 2, "Did you mean train?"), (["--version"], 0, wb.__version__)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        told = capsys.readouterr()
        assert ended.value.code == status and said in told.out + told.err


def test_problems_tell_all_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["problems", "digits-mlp"]) == 0
    assert "hidden" in capsys.readouterr().out
    assert main(["problems", "digits-mpl"]) == 2
    assert "did you mean digits-mlp" in capsys.readouterr().err


def test_more_ranks_than_the_machine_can_start_are_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    for runtime in ("torch", "mpi"):
        assert main(["train", "pipe-sgd", "--workers", "50000", "--runtime", runtime]) == 2
        said = capsys.readouterr().err
        assert "at most" in said and "--runtime simulated" in said
    assert not list(runs.glob("*"))


def test_a_profile_is_told_from_a_run_and_from_a_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"traceEvents": []}))
    for words in (["show", str(file)], ["predict", str(file)], ["recommend", str(file)]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "torch.profiler" in said and "workbench calibrate" in said and "remove" not in said


def test_codecs_are_listed_with_their_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs"]) == 0
    said = capsys.readouterr().out
    assert "truncate16" in said and "Truncate16" in said and "TopK" in said


OWN = """
    import torch, workbench as wb
    from torch import nn
    from beside import WIDTH

    def small(width: int = WIDTH) -> wb.Problem:
        data = (torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(64, dtype=torch.int64))
        return wb.Problem(model=lambda: nn.Linear(4, width), loss=nn.functional.cross_entropy, train=data, name="small", batch_size=8)

    here, number = small(), 3

    def nothing():
        return 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("WIDTH = 2\n")
    file = tmp_path / "own problem.py"
    file.write_text(textwrap.dedent(OWN))
    return str(file)


def test_a_problem_of_an_own_file(own: str, runs: Path) -> None:
    assert problems.get(f"{own}:here").name == "small"
    assert problems.get(f"{own}:small", width=5).model().out_features == 5  # type: ignore[union-attr]
    arguments = ["--runtime", "simulated", "--workers", "2", "--steps", "2", "--timing-only"]
    assert main(["train", "pipe-sgd", "--problem", f"{own}:small", "--option", "width=3", *arguments]) == 0
    assert len(list(runs.glob("*small*"))) == 1


SUBMIT = ["submit", "--dry-run", "--", "train", "pipe-sgd"]


def test_each_command_takes_a_problem_of_an_own_file(
    own: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid.yaml"
    how = {"runtime": "simulated", "workers": 2, "steps": 2, "timing_only": True}
    grid.write_text(json.dumps({"base": {**how, "problem": f"{own}:here"}, "axes": {"algorithm": ["pipe-sgd"]}}))
    assert main(["sweep", str(grid)]) == 0
    (run,) = runs.glob("*small*")
    for command in (
        ["calibrate", run.name],
        ["evaluate", run.name],
        SUBMIT,
        ["train", "pipe-sgd", "--runtime", "simulated"],
    ):
        assert main([*command, "--problem", f"{own}:heer"]) == 2
        assert "did you mean here" in capsys.readouterr().err, command[0]


def test_what_is_wrong_with_an_own_file_is_said(own: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    for name, options, words in (
        (f"{own}:smal", {}, "did you mean small"),
        (f"{own}:number", {}, "is a int"),
        (f"{own}:nothing", {}, "returned a int"),
        (f"{own}:here", {"width": 2}, "takes no options"),
        (f"{own}:small", {"widht": 2}, "did you mean width"),
        (f"{tmp_path}/none.py:x", {}, "no file"),
        (f"{tmp_path}/broken.py:x", {}, "ZeroDivisionError"),
        ("vit", {}, "file.py:name"),
    ):
        with pytest.raises(ConfigError, match=words):
            problems.get(name, **options)


# -- what is installed -----------------------------------------------------------------------------------------------


def distribution(folder: Path, name: str, files: list[str], written: bool = True) -> None:
    """A distribution as pip leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA"]))
    for file in files if written else []:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")


def test_a_distribution_is_there_if_its_files_are_whatever_its_module_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pyzmq, whose module is zmq."""
    distribution(tmp_path, "pyfoo", ["foo/__init__.py"])
    distribution(tmp_path, "pygone", ["gone/__init__.py"], written=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert software._versions(["pyfoo", "pygone", "pynever"]) == (
        ["pyfoo 1.0"],
        ["pygone (its files are gone)", "pynever"],
    )
    found, missing = software._versions(["pyzmq"])
    assert found[0].startswith("pyzmq") and not missing


def test_a_record_of_another_folder_or_none_is_no_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a distribution whose modules were moved, and of Debian's packages, which have no RECORD."""
    distribution(tmp_path / "info", "pymoved", ["moved/__init__.py", "moved.libs/a.so"], written=False)
    (tmp_path / "modules" / "moved").mkdir(parents=True)
    (tmp_path / "modules" / "moved" / "__init__.py").touch()
    debian = tmp_path / "info" / "pydebian-1.0.egg-info"
    debian.mkdir()
    (debian / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: pydebian\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "info"))
    assert software._versions(["pymoved", "pydebian"]) == (["pydebian 1.0"], ["pymoved (its files are gone)"])
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    assert software._versions(["pymoved"]) == (["pymoved 1.0"], [])


def test_the_last_line_of_doctor_contradicts_none_above_it() -> None:
    missing, fault = (
        CheckResult("extra notebooks", "missing", "not there: pyzmq"),
        CheckResult("core", "fault", "not there: numpy", core=True),
    )
    assert "extra notebooks" in _conclusion([missing]) and "1 to fix" in _conclusion([missing, fault])


def test_another_distribution_in_the_packages_folder_is_noticed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    distribution(site, "sgd_workbench", ["workbench/__init__.py", "workbench/ops.py"])
    assert not list(software.one_installation(site / "workbench"))
    distribution(site, "other-workbench", ["workbench/__init__.py", "workbench/api.py"])
    distribution(site, "innocent", ["innocent/workbench/__init__.py"])
    (found,) = software.one_installation(site / "workbench")
    assert found.state == "fault" and "other-workbench" in found.found and "innocent" not in found.found
    assert "pip uninstall other-workbench sgd-workbench" in found.fix


def test_import_warns_where_another_distribution_has_written_into_the_packages_folder(tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site / "workbench", ignore=shutil.ignore_patterns("__pycache__"))
    distribution(site, "sgd_workbench", ["workbench/py.typed"])

    def said() -> str:
        code = "import workbench, sys; assert 'numpy' not in sys.modules; print(workbench.__file__)"
        environment = os.environ | {"PYTHONPATH": str(site)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert str(site) in done.stdout, done.stderr
        return done.stderr

    (site / "workbench" / ".DS_Store").touch()
    assert said() == "", "a file that belongs to no distribution is not worth a word"
    distribution(site, "other-workbench", ["workbench/__init__.py", "workbench/api.py"], written=False)
    (site / "workbench" / "api.py").touch()
    told = said()
    assert told.count("RuntimeWarning") == 1
    assert "other-workbench" in told and "sgd-workbench" in told and "pip uninstall" in told


def test_the_names_that_import_knows_are_the_files_of_the_package() -> None:
    assert {path.name for path in PACKAGE.iterdir() if not path.name.startswith(".")} | {
        "_share",
        "__pycache__",
    } == wb._FILES


def test_compressed_profiles_are_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json.gz"
    file.write_bytes(gzip.compress(b"{}"))
    assert main(["show", str(file)]) == 2
    assert "workbench calibrate" in capsys.readouterr().err


def test_show_prints_what_a_record_notes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as that times are wrong; the problem's own note is in the table."""
    row = {"step": 0, "seconds": 1.0, "samples": 8, "bytes_sent": 0, "loss": 1.0, "num_samples": 8, "staleness": 0}
    info = {"status": "finished", "clock": "wall", "problem": {"name": "digits", "note": "synthetic"}}
    late = "compute took longer than the slept time in 50 % of the steps (by 10 ms)"
    made = [Run({**info, "notes": ["synthetic", late]}, {0: [row]}).save() for _ in range(2)]
    assert main(["show", made[0].name]) == 0
    assert capsys.readouterr().out.count(f"note: {late}") == 1
    assert main(["show", *(path.name for path in made)]) == 0
    said = capsys.readouterr().out
    assert all(f"note on {path.name}: {late}" in said for path in made) and "note on x: synthetic" not in said
    assert said.count("note on") == 2
