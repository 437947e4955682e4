"""`workbench.config`: what counts, where it is from, and errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench import config
from workbench.cli.main import main
from workbench.clusters.cluster import Cluster
from workbench.clusters.launchers.mpi import MPILauncher
from workbench.clusters.launchers.processes import ProcessLauncher
from workbench.clusters.slurm.request import Slurm
from workbench.errors import ConfigError
from workbench.papers.site import site_name
from workbench.trace.store import runs_root


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a current folder without files; returns the place of the user's file."""
    monkeypatch.delenv("WORKBENCH_CONFIG")
    for variable in config.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "home" / "workbench" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def test_without_a_file_the_defaults_hold(home: Path) -> None:
    assert (runs_root(), config.value_of("launcher"), config.value_of("slurm.account")) == (Path("runs"), "local", None)


def test_the_variable_counts_more_than_the_folder_and_that_more_than_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text('runs = "~/all"\nsite = "home-site"\nlauncher = "slurm"\n')
    assert runs_root() == Path("~/all").expanduser()
    Path("workbench.toml").write_text('runs = "/here/runs"\n')
    assert (runs_root(), site_name(), config.value_of("launcher")) == (Path("/here/runs"), "home-site", "slurm")
    monkeypatch.setenv("WORKBENCH_RUNS", "/variable")
    assert config.find("runs") == config.Found("runs", "/variable", "$WORKBENCH_RUNS")
    assert site_name("given") == "given"


def test_a_cluster_starts_with_the_launcher_of_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_launch", lambda *_, **__: None)  # starts nothing
    home.write_text('launcher = "torch"\n')
    assert isinstance(Cluster(2)._engines.launcher, ProcessLauncher)
    assert isinstance(Cluster(2, launcher="local")._engines.launcher, MPILauncher), "a call counts more"
    monkeypatch.setenv("WORKBENCH_LAUNCHER", "local")
    assert isinstance(Cluster(2)._engines.launcher, MPILauncher), "so does a variable"


def test_slurms_options_are_defaults(home: Path) -> None:
    home.write_text('[slurm]\naccount = "physics"\npartition = "gpu"\n')
    assert Slurm().options(1)[:2] == ["--partition=gpu", "--account=physics"]
    assert "--partition=debug" in Slurm(partition="debug").options(1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('lancher = "slurm"', "did you mean launcher"),
        ('[slurm]\ntime = "1"', "slurm.time"),
        ("runs = 3", "give a text in quotation marks"),
        ("runs = ", r"config\.toml cannot be read"),
    ],
)
def test_errors_name_the_file(home: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    home.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        runs_root()
    assert str(home) in str(caught.value)
    assert main(["config"]) == 2
    assert str(home) in capsys.readouterr().err


def test_the_command_shows_values_and_origins(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.write_text('site = "lab"\n')
    assert main(["config", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["site"] == {"name": "site", "value": "lab", "from": str(home)}
    assert rows["slurm.account"]["value"] is None
    assert list(rows) == list(config.KNOWN)
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert "lab" in shown and str(home) in shown and "not set" in shown
