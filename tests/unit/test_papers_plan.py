"""Sizes of notebooks, which notebooks reproduce what, sites, artefacts: without running a notebook."""

from __future__ import annotations

import json
import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.papers_share import KEY, commit, facts, finding, git, make_share, write_claims, write_notebook
from workbench import resources
from workbench.cli.main import main
from workbench.clusters.slurm import batch_job
from workbench.errors import ConfigError
from workbench.papers import digest, history
from workbench.papers.artefact import write_artefact
from workbench.papers.claims import find_claim
from workbench.papers.digest import experiment_digest, source_digest
from workbench.papers.findings import Finding
from workbench.papers.plan import claimed_notebooks, plan
from workbench.papers.records import findings_of, only_writer, read_findings, record_file, write_record
from workbench.papers.reproduction import refuse_uncommitted
from workbench.papers.site import machine, site_name, without_paths
from workbench.papers.sizes import read_sizes, values_at

pytestmark = pytest.mark.notebooks


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_share(tmp_path / "share", "20-one", "21-two")
    write_notebook(folder, "22-ranks", finding("22-ranks"), ranks="['local:4', 'emulated:1gbit:4']", ci="{scale: 1.05}")
    write_claims(folder, "22-ranks")
    commit(folder)
    monkeypatch.setenv("WORKBENCH_SHARE", str(folder))
    return folder


def test_a_share_of_ones_own_goes_before_the_packages(share: Path) -> None:
    assert resources.notebooks() == ("20-one", "21-two", "22-ranks")
    assert resources.shared("kernels").parent != share, "what it does not hold comes from the package"


def test_sizes_are_read(share: Path) -> None:
    sizes = read_sizes(resources.notebook("22-ranks"))
    assert sizes is not None and sizes.ranks == ("local:4", "emulated:1gbit:4")
    assert values_at(resources.notebook("22-ranks"), "ci") == {"scale": 1.05, "size": "ci"}
    assert values_at(resources.notebook("20-one"), "full") == {"scale": 2.0, "size": "full"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("smoke: {}\nci: {}\nfull: {}\nsmok: {}", "no size is called 'smok': did you mean smoke"),
        ("smoke: {}\nci: {scal: 2}\nfull: {}", "no parameter of 20-one is called 'scal': did you mean scale"),
        ("smoke: {}\nci: {}", "has no `full`"),
        ("smoke: {}\nci: 3\nfull: {}", "ci is a mapping"),
        ("smoke: {}\nci: {size: ci}\nfull: {}", "`size` is set automatically"),
        ("smoke: {}\nci: {}\nfull: {}\nranks: [local]", "write LAUNCHER:NUMBER"),
        ("smoke: {}\nci: {}\nfull: {}\nranks: local:4", "must be a list of texts"),
        ("smoke: {}\nci: {}\nfull: {}\nclock: virtuel", "write real or virtual"),
        ("smoke: {}\nci: {}\nfull: {}\nclock: {cj: virtual}", "SIZE: virtual for some sizes"),
        ("smoke: {}\nci: {}\nfull: {}\nranks: [local:4]\nclock: virtual", "ranks have a real clock"),
    ],
)
def test_what_is_no_size_is_refused(share: Path, text: str, says: str) -> None:
    path = share / "notebooks" / "sizes" / "20-one.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_sizes(resources.notebook("20-one"))
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_a_notebook_may_be_virtual_at_some_sizes_only(share: Path) -> None:
    path = share / "notebooks" / "sizes" / "20-one.yaml"
    path.write_text("smoke: {}\nci: {}\nfull: {}\nclock: {ci: virtual}")
    assert [plan("20-one", size)[0].is_virtual for size in ("smoke", "ci", "full")] == [False, True, False]


def test_the_command_tells_and_takes_sizes(share: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["notebook", "list", "22-ranks"]) == 0
    assert "  --size ci: scale = 1.05\n" in capsys.readouterr().out
    assert main(["notebook", "run", "22-ranks", "--size", "cj"]) == 2
    assert "did you mean ci" in capsys.readouterr().err


def test_a_notebook_without_sizes_has_none_but_its_own(share: Path) -> None:
    (share / "notebooks" / "sizes" / "20-one.yaml").unlink()
    assert values_at(resources.notebook("20-one"), "smoke") == {"size": "smoke"}
    with pytest.raises(ConfigError, match="20-one has no sizes"):
        values_at(resources.notebook("20-one"), "ci")


def test_what_reproduces_what(share: Path) -> None:
    assert claimed_notebooks() == dict.fromkeys(("20-one", "21-two", "22-ranks"), (KEY,))
    for name in ("all", KEY):
        assert [job.name for job in plan(name, "smoke")] == ["20-one", "21-two", "22-ranks"]
    assert [job.name for job in plan("21-two", "smoke")] == ["21-two"]
    assert [job.name for job in plan(KEY, "smoke", claim="21-two-near-one")] == ["21-two"]
    assert [job.name for job in plan("all", "smoke", claim=f"{KEY}/22-ranks-near-one")] == ["22-ranks"]
    assert plan(KEY, "ci", parameters={"scale": 3.0})[0].parameters == {"scale": 3.0, "size": "ci"}
    for words, says in (
        ({"name": "doe2020on"}, "did you mean doe2020one"),
        ({"name": KEY, "claim": "20-one-nearone"}, "did you mean 20-one-near-one"),
        ({"name": KEY, "parameters": {"scal": 1}}, "did you mean scale"),
    ):
        with pytest.raises(ConfigError, match=says):
            plan(size="smoke", **words)  # type: ignore[arg-type]


def test_the_notebooks_of_headlines_are_those_that_test_one(share: Path) -> None:
    with pytest.raises(ConfigError, match="no claim is a headline"):
        plan("headlines", "smoke")
    for name in ("22-ranks", "20-one"):
        path = share / "papers" / KEY / "claims" / f"{name}.yaml"
        path.write_text(path.read_text().replace("    provenance:", "    headline: true\n    provenance:", 1))
    assert [job.name for job in plan("headlines", "smoke")] == ["20-one", "22-ranks"]


def test_claims_are_committed_before_they_are_recorded(share: Path) -> None:
    jobs = plan(KEY, "smoke")
    refuse_uncommitted(jobs, share / "papers")
    path = share / "papers" / KEY / "claims" / "21-two.yaml"
    path.write_text(path.read_text() + "\n# another word\n")
    with pytest.raises(ConfigError, match=r"21-two\.yaml differs from its committed version"):
        refuse_uncommitted(jobs, share / "papers")
    git(share, "add", "--all")
    with pytest.raises(ConfigError, match="differs from its committed version"):
        refuse_uncommitted(jobs, share / "papers")
    git(share, "rm", "--quiet", "--cached", str(path))
    with pytest.raises(ConfigError, match="differs from its committed version"):
        refuse_uncommitted(jobs, share / "papers")


def test_parameters_are_committed_before_they_are_recorded(share: Path) -> None:
    jobs = plan(KEY, "smoke")
    path = share / "notebooks" / "sizes" / "20-one.yaml"
    path.write_text(path.read_text().replace("scale: 2.0", "scale: 3.0"))
    with pytest.raises(ConfigError, match=r"20-one\.yaml differs from its committed version"):
        refuse_uncommitted(jobs, share / "papers")


def test_a_records_commit_is_dirty_by_code_and_claims_but_not_by_records(share: Path) -> None:
    papers = share / "papers"
    assert history.commit_of(papers) == {"sha": git(share, "rev-parse", "HEAD").strip(), "dirty": False}
    for name in ("records/20-one.ci.x.json", "figures/a.svg", "card.md"):
        path = papers / KEY / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    (papers / "README.md").write_text("other")
    assert history.commit_of(papers) == {"sha": git(share, "rev-parse", "HEAD").strip(), "dirty": False}
    (share / "notebooks" / "20-one.ipynb").write_text("{}")
    assert (history.commit_of(papers) or {})["dirty"]


def test_update_takes_no_parameters(share: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", KEY, "--update", "-p", "scale=2"]) == 2
    assert "--update needs the parameters of the size" in capsys.readouterr().err


def test_a_site_has_a_name_that_may_be_published(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORKBENCH_SITE", "SLURM_JOB_ID", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert site_name().endswith("-cores")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "Big_Iron")
    assert site_name().endswith("-cores"), "a login node is no job"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert site_name() == "slurm-big-iron"
    monkeypatch.setenv("WORKBENCH_SITE", "lab")
    assert (site_name(), site_name("desk")) == ("lab", "desk")
    with pytest.raises(ConfigError, match="a-z, 0-9 and hyphens"):
        site_name("my host.local")
    assert {"cores", "memory_gib", "cpu"} <= machine().keys() <= {"cores", "memory_gib", "cpu", "gpus"}
    assert without_paths({"folder": "~/data/cifar", "lr": 0.1}) == {"folder": ".../cifar", "lr": 0.1}


def test_an_experiment_is_its_code_and_its_parameters(share: Path) -> None:
    path = resources.notebook("20-one")
    given = {"size": "ci"}
    before = experiment_digest(path, given, ["formula"])
    content = json.loads(path.read_text())
    content["cells"][1] |= {"execution_count": 3, "outputs": [{"output_type": "stream", "name": "stdout", "text": "1"}]}
    content["cells"][0]["source"] += "\nMore words."
    content["cells"][1]["source"] += "\n\n# a comment"
    path.write_text(json.dumps(content))
    assert experiment_digest(path, given, ["formula"]) == before
    assert experiment_digest(path, {"size": "full"}, ["formula"]) != before
    assert experiment_digest(path, given, ["simulated cluster"]) != before, "it depends on the simulator"
    content["cells"][1]["source"] += "\nother: int = 1"
    path.write_text(json.dumps(content))
    assert experiment_digest(path, given, ["formula"]) != before
    assert read_findings(path) == ((), None)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ('def f(x: float) -> float:\n    """Words."""\n    return 2 * x  # twice', True),
        ("def f(x):\n    return (\n        2 * x\n    )", True),
        ("def f(x):\n    return 3 * x", False),
        ("def f(y):\n    return 2 * y", False),
    ],
)
def test_comments_and_layout_are_no_code(other: str, same: bool) -> None:
    assert (source_digest(other) == source_digest("def f(x):\n    return 2 * x")) is same


@pytest.mark.parametrize(
    ("code", "parameters", "has", "lacks"),
    [
        ("wb.StaleSGD()", {}, "algorithms/stale.py", "algorithms/partial.py"),
        ('LayerwiseSGD(bucket_bytes="auto")', {}, "algorithms/bucket_plans.py", "algorithms/partial.py"),
        ("LayerwiseSGD(bucket_bytes=size)", {"size": "auto"}, "algorithms/bucket_plans.py", "algorithms/partial.py"),
        ("LayerwiseSGD(bucket_bytes=0)", {}, "algorithms/layerwise.py", "algorithms/bucket_plans.py"),
        ("wb.algorithms.get(name)", {"name": "partial-all-reduce"}, "algorithms/partial.py", "algorithms/stale.py"),
        ("wb.StreamingDiLoCo()", {}, "algorithms/outer_optimizer.py", "algorithms/stale.py"),
        (
            "from workbench.papers.studies import compare_with_ddp",
            {},
            "runtimes/user_loop/trainer.py",
            "algorithms/diloco.py",
        ),
        ("wb.simulate()", {}, "algorithms/synchronous.py", "runtimes/user_loop/trainer.py"),
        ("Ring(codec=QSGD())", {}, "codecs/qsgd.py", "codecs/sign.py"),
        ("f()", {"codec": "sign"}, "codecs/sign.py", "codecs/qsgd.py"),
        ("f()", {}, "codecs/linear.py", "codecs/qsgd.py"),
        ("Hierarchical()", {}, "collectives/hierarchical.py", "collectives/low_rank.py"),
        ("f()", {}, "collectives/ring.py", "collectives/hierarchical.py"),
        ("wb.simulate()", {}, "analysis", "calibration"),
        ("wb.predict(run)", {}, "calibration", "collectives/hierarchical.py"),
        ("from workbench.papers.studies import predictions", {}, "calibration", "algorithms/stale.py"),
    ],
)
def test_an_experiment_includes_the_alternatives_that_it_names(
    code: str, parameters: dict[str, Any], has: str, lacks: str, share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("workbench.papers.digest.library_digest", lambda modules: asked.append(modules) or "0")
    experiment_digest(write_notebook(share, "23-names", ("", code)), parameters, ["torch"])
    assert has in asked[0] and lacks not in asked[0]


def test_an_experiment_includes_what_it_imports_from_the_papers_and_what_that_imports(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("workbench.papers.digest.library_digest", lambda modules: asked.append(modules) or "0")
    lines = "from workbench import papers\nfrom workbench.papers.studies import training\nfrom workbench.papers.studies.sums import sum_s\n"
    path = write_notebook(share, "23-imports", ("", lines + "from workbench.papers.verdicts import interval"))
    experiment_digest(path, {}, ["formula"])
    assert [name for name in asked[0] if name.startswith("papers/")] == [
        "papers/pool_client.py",
        "papers/studies/sums.py",
        "papers/studies/training.py",
    ]


def test_what_writes_files_and_labels_is_no_part_of_an_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = digest._module_digest
    before = digest.library_digest.__wrapped__(("analysis",))
    monkeypatch.setattr(digest, "_module_digest", lambda path: "x" if path.name == "export.py" else kept(path))
    assert digest.library_digest.__wrapped__(("analysis",)) == before
    monkeypatch.setattr(digest, "_module_digest", lambda path: "x" if path.name == "summary.py" else kept(path))
    assert digest.library_digest.__wrapped__(("analysis",)) != before


def test_a_message_is_no_code() -> None:
    one = "if x < 0:\n    raise ValueError(f'{x}: give more')"
    assert source_digest(one) == source_digest(one.replace("give more", "too small"))
    assert source_digest(one) != source_digest(one.replace("ValueError", "TypeError"))
    assert source_digest("%pip list") != source_digest("%pip freeze"), "a magic command is taken as it is"


def test_a_session_is_added_to_a_record(share: Path) -> None:
    name = "20-one-near-one"
    claims = {name: find_claim(f"{KEY}/{name}")}

    def measured(*values: float, where: str = "local ranks") -> list[Finding]:
        seeds = tuple(range(len(values)))
        return [Finding(claim=f"{KEY}/{name}", size="ci", values=values, seeds=seeds, where=where, how="2 ranks")]  # type: ignore[arg-type]

    first = findings_of(KEY, measured(1.0, 1.01, 0.99, 1.0, 1.0), claims)
    assert "sessions" not in first[name] and first[name]["verdict"] == "reproduced"
    second = findings_of(KEY, measured(1.2, 1.21, 1.19, 1.2, 1.2), claims, first)
    third = findings_of(KEY, measured(0.8, 0.81, 0.79, 0.8, 0.8), claims, second)
    assert third[name]["sessions"] == [0] * 5 + [1] * 5 + [2] * 5
    assert third[name]["values"][5] == 1.2 and third[name]["seeds"] == [0, 1, 2, 3, 4] * 3
    assert third[name]["verdict"] == "underpowered", "sessions differ more than seeds"
    with pytest.raises(ConfigError, match="are not those of the sessions before"):
        findings_of(KEY, measured(1.0, where="formula"), claims, first)


def test_one_writes_at_a_time(tmp_path: Path) -> None:
    with (
        only_writer(tmp_path),
        pytest.raises(ConfigError, match="another `workbench reproduce` writes into"),
        only_writer(tmp_path),
    ):
        pass
    with only_writer(tmp_path):
        pass


def test_an_artefact_can_be_run_by_itself_and_is_the_same_twice(
    share: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = git(share, "rev-parse", "HEAD").strip()
    write_record(
        record_file(share / "papers", KEY, "20-one", "ci", "2-cores"),
        facts("20-one", find_claim(f"{KEY}/20-one-near-one"), sha),
    )
    archives = [tmp_path / "one.zip", tmp_path / "two.zip"]
    for path in archives:
        assert main(["artefact", KEY, "-o", str(path)]) == 0
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with zipfile.ZipFile(archives[0]) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / KEY
    text = (folder / "ARTEFACT.md").read_text()
    for words in (
        "## Abstract",
        "## Requirements",
        "## Install",
        "## Durations",
        "- size ci on 2-cores: 0.1 min",
        "single seeds from 0.98 to 1.02",
    ):
        assert words in text
    assert f"workbench reproduce {KEY} --claim 20-one-near-one --size ci" in text
    assert (
        str(tmp_path) not in (folder / "environment.txt").read_text()
        and "torch==" in (folder / "environment.txt").read_text()
    )
    monkeypatch.setenv("WORKBENCH_SHARE", str(folder))
    assert [job.name for job in plan(KEY, "ci")] == ["20-one", "21-two", "22-ranks"]
    assert main(["papers", "table"]) == 0 and main(["papers", "check"]) == 0
    with pytest.raises(ConfigError, match="did you mean doe2020one"):
        write_artefact("doe2020oen", tmp_path / "x.zip")


def test_a_job_runs_the_same_command(share: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--partition", "gpu", "--time", "02:00:00", "--nodes", "2", "--dry-run"]
    assert main(["reproduce", KEY, "--size", "full", "--submit", "slurm", *words]) == 0
    script = capsys.readouterr().out
    for line in ("--ntasks=4", "--nodes=2", "--partition=gpu", "--time=02:00:00", "--no-requeue", "--signal=B:USR1@60"):
        assert f"#SBATCH {line}\n" in script
    program = next(word for word in shlex.split(script.splitlines()[-1]) if word.endswith(".py"))
    assert Path(program).samefile(batch_job.__file__) and "--job-name=reproduce-" in script
