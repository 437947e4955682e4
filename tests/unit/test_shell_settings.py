"""`--set NAME=VALUE`: every setting of every algorithm from the shell, and one clear error for an invalid value."""

from __future__ import annotations

from typing import Any

import pytest

from workbench import algorithms, catalogue, topologies
from workbench.algorithms import Empirical, Geometric
from workbench.cli import main as cli
from workbench.cli.main import HEADINGS, main
from workbench.codecs import QSGD, ErrorFeedback, TopK, Truncate16
from workbench.collectives import Auto, HalvingDoubling, Native, Once, PowerSGD, Ring
from workbench.errors import ConfigError
from workbench.naming import parse_pairs, parse_value
from workbench.program import Algorithm
from workbench.run_spec import parse_train
from workbench.topologies import FromAdjacency, RandomRegular, Torus

SETTINGS = [
    (name, setting) for name in algorithms.names() for setting in catalogue.describe("algorithms", name)["settings"]
]
CHOICES = [(name, setting) for name, setting in SETTINGS if setting["choices"]]


def ids(settings: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [f"{name}-{setting['name']}" for name, setting in settings]


def from_shell(name: str, *words: str) -> Algorithm:
    return algorithms.get(name, **parse_pairs(words, "--set"))


@pytest.mark.parametrize("name", algorithms.names())
def test_defaults_as_shown_give_the_default(name: str) -> None:
    """What `workbench algorithms NAME` prints in the column `default` can be typed as it stands."""
    shown = catalogue.show("algorithms", name, 1000).partition("Settings, given as")[2].splitlines()[1:]
    begin, end = (shown[0].index(title) for title in ("default", "description")) if shown else (0, 0)
    words = [f"{line.split()[0]}={line[begin:end].strip()}" for line in shown[2:]]
    assert len(words) == len(catalogue.describe("algorithms", name)["settings"])
    assert from_shell(name, *words) == algorithms.get(name)
    assert from_shell(name, *(word.replace("_", "-") for word in words)) == algorithms.get(name), (
        "also as options are spelled"
    )


@pytest.mark.parametrize(
    ("name", "word", "expected"),
    [
        ("layerwise-sgd", "bucket_bytes=4MiB", 4194304.0),
        ("layerwise-sgd", "bucket_bytes=none", None),
        ("layerwise-sgd", "bucket_bytes=0", 0),
        ("layerwise-sgd", "apply=any", algorithms.ApplyOrder.ANY),
        ("pipe-sgd", "first=duplicate", algorithms.FirstSteps.DUPLICATE),
        ("pipe-sgd", "collective=ring:truncate16", Ring(codec=Truncate16())),
        ("pipe-sgd", "collective=Ring", Ring()),
        ("synchronous-sgd", "collective=native", Native()),
        ("synchronous-sgd", "collective=once:top-k+feedback", Once(codec=ErrorFeedback(codec=TopK()))),
        ("synchronous-sgd", "collective=once:qsgd", Once(codec=QSGD())),
        ("synchronous-sgd", "collective=power-sgd", PowerSGD()),
        ("synchronous-sgd", "collective=auto", Auto()),
        ("local-sgd", "collective=halving-doubling", HalvingDoubling()),
        ("dear", "collective=ring:linear8", None),
        ("backup-sgd", "backups=2", 2),
        ("backup-sgd", "timeout_s=1e-2", 0.01),
        ("online-backup-sgd", "noise_scale=none", None),
        ("async-sgd", "clip_norm=1", 1),
        ("async-sgd", "cutoff=0", 0),
        ("async-sgd", "dedicated=true", True),
        ("softsync-sgd", "divide=False", False),
        ("partial-all-reduce", "quorum=0.5", 0.5),
        ("partial-all-reduce", "quorum=2", 2),
        ("partial-all-reduce", "quorum=solo", algorithms.Quorum.SOLO),
        ("diloco", "outer_lr=1", 1),
        ("streaming-diloco", "delay=2", 2),
        ("d-psgd", "topology=torus", Torus()),
        ("d-psgd", "topology=random-regular:3:7", RandomRegular(degree=3, seed=7)),
        ("d-psgd", "topology=Ring()", topologies.Ring()),
        ("d-psgd", "topology=FromAdjacency(lists=((1,),(0,)))", FromAdjacency(lists=((1,), (0,)))),
        ("choco-sgd", "codec=top-k", TopK()),
        ("stale-sgd", "staleness=geometric:20", Geometric(20.0)),
        ("stale-sgd", "staleness=empirical:0,1,5@3,2,1", Empirical((0, 1, 5), (3.0, 2.0, 1.0))),
    ],
)
def test_a_word_becomes_the_setting(name: str, word: str, expected: object) -> None:
    setting, _, text = word.partition("=")
    found = getattr(from_shell(name, word), setting)
    if expected is None and text != "none":
        assert found is not None and found != getattr(algorithms.get(name), setting)
    else:
        assert found == expected and type(found) in (type(expected), str)


@pytest.mark.parametrize(("name", "setting"), CHOICES, ids=ids(CHOICES))
def test_each_choice_is_taken(name: str, setting: dict[str, Any]) -> None:
    """Alone or, where only together with others, refused with a reason that names the way out."""
    for choice in setting["choices"]:
        word = f"{choice}:top-k" if choice == "once" else choice
        try:
            found = getattr(from_shell(name, f"{setting['name']}={word}"), setting["name"], None)
        except ConfigError as error:
            assert ": " in str(error) and any(way in str(error) for way in ("use ", "leave ")), str(error)  # noqa: PT017
        else:
            assert found is None or setting["name"] in ("collective", "topology", "codec", "inner") or found == choice


@pytest.mark.parametrize(("name", "setting"), SETTINGS, ids=ids(SETTINGS))
@pytest.mark.parametrize("wrong", ["perhaps", "[1, 2]", "-3", "''"])
def test_what_a_setting_cannot_be_is_one_error_that_names_it(name: str, setting: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_shell(name, f"{setting['name']}={wrong}")
    told = str(refused.value)
    assert "\n" not in told
    assert setting["name"] in told or "distribution" in told or "collective" in told
    assert "not supported" not in told and "object has no" not in told, "Python's own words say nothing of the fix"


@pytest.mark.parametrize(
    ("name", "word", "told"),
    [
        ("softsync-sgd", "divide=yes", "softsync-sgd: divide='yes': give true, or false"),
        ("softsync-sgd", "divide=1", "give true, or false"),
        ("async-sgd", "dedicated=on", "give true, or false"),
        ("pipe-sgd", "width=two", "width='two': give a whole number"),
        ("pipe-sgd", "width=2.0", "give a whole number"),
        ("local-sgd", "every=true", "give a whole number"),
        ("backup-sgd", "backups=online", "give a whole number"),
        ("layerwise-sgd", "apply=some", "give all, or backward, or any"),
        ("diloco", "outer_lr=fast", "give a number"),
        ("diloco", "eager=true", "DiLoCo has no setting eager: use EagerDiLoCo"),
        ("diloco", "fragments=2", "use StreamingDiLoCo"),
        ("eager-diloco", "delay=1", "use StreamingDiLoCo"),
        ("partial-all-reduce", "quorum=none", "give a whole number, or a number, or solo, or majority, or all"),
        ("pipe-sgd", "widht=2", "did you mean width?"),
        ("pipe-sgd", "collective=rign", "did you mean ring?"),
        ("pipe-sgd", "collective=ring:truncate", "did you mean truncate16?"),
        ("pipe-sgd", "collective=once", "needs a codec"),
        ("pipe-sgd", "collective=4", "give one of"),
        ("stale-sgd", "staleness=geometrical:3", "did you mean geometric"),
        ("stale-sgd", "staleness=uniform:0", "write it like uniform:0:8"),
        ("stale-sgd", "staleness=4", "give a distribution"),
    ],
)
def test_errors_say_what_to_write(name: str, word: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_shell(name, word)
    assert told in str(refused.value)


def test_a_setting_is_given_once() -> None:
    with pytest.raises(ConfigError, match="width: given twice, as 2 and as 3"):
        parse_pairs(["width=2", "width=3"], "--set")
    with pytest.raises(ConfigError, match="write it as name=value"):
        parse_pairs(["width"], "--set")


@pytest.mark.parametrize("text", ["1.2.3kb", "{[]: 1}", "", "ring:truncate16", "1:2", "..5MiB", "(" * 300])
def test_what_is_no_value_is_a_word(text: str) -> None:
    assert parse_value(text) == text


def test_the_error_reaches_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "softsync-sgd", "--runtime", "simulated", "--set", "divide=no"]) == ConfigError.exit_code
    assert capsys.readouterr().err == "workbench: softsync-sgd: divide='no': give true, or false\n"


# -- settings as options


def test_a_setting_of_the_algorithm_is_an_option() -> None:
    options = parse_train(["pipe-sgd", "--width", "3", "--collective=ring", "--epochs", "2", "--set", "lanes=2"])
    assert sorted(options.set) == ["collective=ring", "lanes=2", "width=3"]
    assert options.epochs == 2


@pytest.mark.parametrize("word", ["--wdith", "--set=wdith"])
def test_a_misspelt_setting_names_the_right_one(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "wdith=3"] if "set" in word else [word, "3"]
    assert main(["train", "pipe-sgd", *given, "--runtime", "simulated", "--steps", "1"]) == 2
    assert "did you mean width?" in capsys.readouterr().err


def test_the_help_of_a_training_lists_the_algorithms_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "pipe-sgd", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "width" in shown and "warmup_steps" in shown
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--problem" in capsys.readouterr().out


def test_the_help_groups_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for heading in HEADINGS.values():
        assert f"\n{heading}:\n" in shown
    assert (
        shown.index("  train ")
        < shown.index("find out which algorithm would help")
        < shown.index("  study ")
        < shown.index("  bench ")
    )
