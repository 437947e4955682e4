"""The tables of algorithms, collectives and codecs: complete, the same as JSON, and right about the bytes that are sent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from math import log2, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workbench import algorithms, catalogue, codecs, collectives
from workbench.cli import main as cli
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.problems.base import Problem
from workbench.runtimes.simulator.simulate import simulate

ROOT = Path(__file__).parents[2]
RANKS = 4
NAMES = {"algorithms": algorithms.names(), "collectives": collectives.names(), "codecs": codecs.names()}
ALL = [(what, name) for what, names in NAMES.items() for name in names]
each_algorithm = pytest.mark.parametrize("name", algorithms.names())


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(words) == 0
    return capsys.readouterr().out


def model() -> nn.Module:
    """Large enough that tails are small, also next to votes of two bits."""
    return nn.Sequential(nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 90), nn.Tanh(), nn.Linear(90, 10))


@each_algorithm
def test_every_algorithm_has_a_card_with_every_field(name: str) -> None:
    found = catalogue.describe("algorithms", name)
    for field in ("summary", "about", "paper", "staleness", "bytes_per_step", "memory", "roles"):
        assert isinstance(found[field], str) and found[field].strip(), field
    assert found["rule"] and all(line.strip() for line in found["rule"])
    assert re.search(r"=|<-", " ".join(found["rule"])), "a rule is an equation"


@pytest.mark.parametrize("what", NAMES)
def test_json_is_one_array_of_all(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, what, "--json"))
    assert tuple(item["name"] for item in found) == NAMES[what]
    for item in found:
        assert {"class", "summary", "rule", "settings"} <= set(item)
        assert json.loads(run(capsys, what, item["name"], "--json")) == item


@pytest.mark.parametrize("what", NAMES)
@pytest.mark.parametrize("columns", [100, 140])
def test_the_table_names_all_and_is_readable(
    what: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = run(capsys, what)
    assert max(map(len, table.splitlines())) <= columns
    _, below = re.split(r"^-[- ]+\n", table.split("\n\n")[0], flags=re.MULTILINE)
    first = [line.split()[0] for line in below.splitlines() if not line.startswith(" ") and not line.endswith(":")]
    assert tuple(first) == NAMES[what]
    words = set(re.findall(r"\S+", table))
    for item in catalogue.describe_all(what):
        assert set(str(item["paper" if what == "algorithms" else "summary"]).split()) <= words, "nothing is cut off"


def test_algorithms_are_in_families(capsys: pytest.CaptureFixture[str]) -> None:
    """Each heading is there once, and the algorithms of a family are together."""
    families = [algorithms.family_of(name) for name in algorithms.names()]
    together = [family for family, before in zip(families, ["", *families], strict=False) if family != before]
    assert len(together) == len(set(families))
    table, _, _ = run(capsys, "algorithms").partition("\n\n")  # the legend below may break at a colon
    assert [line[:-1] for line in table.splitlines() if line.endswith(":")] == together
    gossip = [name for name in algorithms.names() if algorithms.family_of(name) == "gossip"]
    assert gossip == ["d-psgd", "gradient-tracking", "stochastic-gradient-push", "choco-sgd", "ad-psgd", "noloco"]


@pytest.mark.parametrize(("what", "name"), ALL)
def test_one_is_told_whole(what: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, what, name)
    found = catalogue.describe(what, name)
    assert shown.startswith(f"{name}: {found['class']}\n")
    assert all(line in shown for line in found["rule"])
    for setting in found["settings"]:
        assert re.search(rf"^  {setting['name']} ", shown, re.MULTILINE)
    assert "Paper: " in shown or what == "collectives" or name == "shared-int8"


WRONG = {"bool": (0, 1, "no", None), "int": (True, False, "2", 2.5), "float": (True, False, "2")}
TYPED = [
    (what, name, setting["name"], value)
    for what, name in ALL
    for setting in catalogue.describe(what, name)["settings"]
    for kind in (["float"] if "float" in setting["type"] else setting["type"])
    for value in WRONG.get(kind, ())
]


@pytest.mark.parametrize(("what", "name", "setting", "value"), TYPED)
def test_a_number_is_not_true_or_false_and_the_error_says_what_to_give(
    what: str, name: str, setting: str, value: Any
) -> None:
    make = catalogue.FIND[what][1](name)
    with pytest.raises(ConfigError, match=rf"^{setting}={re.escape(repr(value))}: (give|choose) "):
        make(**{setting: value})


def test_an_algorithm_says_what_it_can_be_given() -> None:
    assert catalogue.describe("algorithms", "backup-sgd")["settings"] == [
        {"name": "shards", "type": ["int"], "choices": None, "default": 1, "required": False},
        {"name": "dedicated", "type": ["bool"], "choices": None, "default": False, "required": False},
        {"name": "timeout_s", "type": ["float", "none"], "choices": None, "default": None, "required": False},
        {"name": "backups", "type": ["int"], "choices": None, "default": 1, "required": False},
    ]
    first = next(
        setting for setting in catalogue.describe("algorithms", "delayed-sgd")["settings"] if setting["name"] == "first"
    )
    assert first["choices"] == ["zero", "duplicate"] and first["default"] == "zero"


def test_a_rule_of_several_lines_is_whole() -> None:
    assert [line.split(" ")[0] for line in catalogue.describe("algorithms", "diloco")["rule"]] == ["Every", "D_i"]


def test_a_name_of_two_makers_has_the_card_of_what_it_makes() -> None:
    assert catalogue.describe("algorithms", "delayed-sgd")["class"] == "DelayedSGD"
    assert catalogue.card_of(algorithms.DelayedSGD) is algorithms.PipeSGD.card
    assert catalogue.card_of(algorithms.ParameterServerSGD) is algorithms.BackupSGD.card


NEAR = [
    (
        "algorithms",
        algorithms,
        "_ALGORITHMS",
        {"pipe-sgd": algorithms.PipeSGD, "diloco": algorithms.DiLoCo},
        "pipe-sdg",
        "pipe-sgd",
    ),
    (
        "collectives",
        collectives,
        "_COLLECTIVES",
        {"ring": collectives.Ring, "linear": collectives.Linear},
        "rign",
        "ring",
    ),
    ("codecs", codecs, "_CODECS", {"top-k": codecs.TopK, "linear8": codecs.Linear8}, "top_q", "top-k"),
]


@pytest.mark.parametrize(("what", "module", "table", "known", "wrong", "near"), NEAR, ids=[case[0] for case in NEAR])
def test_a_near_miss_is_named(
    what: str,
    module: Any,
    table: str,
    known: dict[str, Any],
    wrong: str,
    near: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two names alone: a name that is added to the package later may be as near."""
    monkeypatch.setattr(module, table, known)
    assert cli.main([what, wrong]) == ConfigError.exit_code
    assert f"did you mean {near}? There are {', '.join(known)}" in capsys.readouterr().err


@pytest.mark.parametrize("name", codecs.names())
def test_a_codec_says_what_it_sends(name: str) -> None:
    codec, found = codecs.get(name), catalogue.describe("codecs", name)
    assert found["wire_bytes"] == codec.encode(torch.randn(1_000_000), torch.Generator().manual_seed(0)).numel()
    assert found["raw_bytes"] == 4_000_000
    assert found["summable"] == name.startswith("shared")
    assert found["unbiased"] == (name in ("qsgd", "tern-grad", "natural-compression"))


@pytest.mark.parametrize("name", collectives.names())
def test_a_collective_says_where_a_codec_goes(name: str) -> None:
    place = catalogue.describe("collectives", name)["codec"]
    if place == "none":
        with pytest.raises(ConfigError):
            collectives.get(f"{name}:truncate16")
    else:
        assert collectives.get(f"{name}:truncate16").lossy
        assert (place == "once around the sum") == (name == "once")


@pytest.mark.parametrize("words", [["algorithms"], ["notebook", "list"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_may_stop_early(words: list[str], unbuffered: str) -> None:
    """`workbench algorithms | head`: no traceback where the pipe is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    listed = subprocess.run(
        [sys.executable, "-m", "workbench", *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=env,
    )
    os.close(writing)
    assert (listed.returncode, listed.stderr) == (0, "")


def test_the_docs_have_this_table() -> None:
    """Step 5 of CONTRIBUTING.md: what `workbench algorithms --markdown` prints is put there whenever a card changes."""
    page = (ROOT / "docs" / "algorithms" / "index.md").read_text()
    assert re.findall(r"(?:^\| algorithm \|.*\n(?:\|.*\n)*)", page, re.MULTILINE) == [
        catalogue.markdown("algorithms") + "\n"
    ]


# ---------------------------------------------------------------- the bytes


def evaluated(formula: str, **values: float) -> float:
    """A card's formula, in which a space between two terms multiplies: "2 (p-1)/p n".

    >>> evaluated("2 (p-1)/p n", p=4, n=8.0), evaluated("lg(p) n", p=4, n=8.0)
    (12.0, 16.0)
    """
    assert re.fullmatch(r"([0-9pnMH+\-*/() ]|lg(?=\())+", formula), (
        f"{formula!r}: numbers, p, n, M, H, lg and + - * / ( )"
    )
    product = re.sub(r"(?<=[0-9a-zA-Z)])\s+(?=[0-9a-zA-Z(])|(?<=[0-9])(?=[a-zA-Z(])", "*", formula)
    return float(eval(product, {"__builtins__": {}}, {"lg": log2, "p": nan, "n": nan, "M": nan, "H": nan, **values}))


def promised(name: str, algorithm: Any, num_bytes: float) -> tuple[float, float]:
    """Bytes a step of a rank that is no server and, if there are servers, of one that is."""
    formula, _, server = catalogue.describe("algorithms", name)["bytes_per_step"].partition("; server ")
    values = {"p": RANKS, "n": num_bytes, "M": getattr(algorithm, "shards", nan), "H": getattr(algorithm, "every", nan)}
    plain = evaluated(formula, **values)
    return plain, evaluated(server, **values) if server else plain


def laid_out(algorithm: Any) -> Any:
    buckets = algorithm.requires.buckets
    return build_layout(trainable(model()), buckets.max_bytes, buckets.count)


def closed_forms() -> list[tuple[str, dict[str, int]]]:
    """(name, settings) of algorithms whose bytes do not depend on the step or on chance; the others are measured below."""
    having = [
        name
        for name in algorithms.names()
        if algorithms.get(name).bytes_per_step(0, RANKS, laid_out(algorithms.get(name))) is not None
    ]
    counts: list[dict[str, int]] = [{"shards": 1}, {"shards": 3}]
    return [(name, given) for name in having for given in (counts if algorithms.get(name).requires.servers else [{}])]


@pytest.mark.parametrize(("name", "settings"), closed_forms())
def test_bytes_of_the_card_are_those_of_the_closed_form(name: str, settings: dict[str, int]) -> None:
    algorithm, shards = algorithms.get(name, **settings), settings.get("shards", 0)
    layout = laid_out(algorithm)
    num_bytes = layout.parameter_numel * layout.itemsize
    tails = (layout.numel - layout.parameter_numel) * layout.itemsize
    uneven = RANKS * num_bytes * 0.5 if shards > 1 else 0.0  # shards are whole parameters: judged by their sum below
    plain, serving = promised(name, algorithm, num_bytes)
    ranks = [algorithm.bytes_per_step(rank, RANKS, layout) for rank in range(RANKS)]
    expected = [serving] * shards + [plain] * (RANKS - shards)
    assert RANKS * tails < 0.03 * num_bytes, "the tails are small, so that a wrong factor shows"
    for found, wanted in zip(ranks, expected, strict=True):
        assert abs(found - wanted) <= RANKS * tails + uneven
    assert abs(sum(ranks) - sum(expected)) <= RANKS**2 * tails, "DeMo sends a tail to each other rank"


def zeros() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(64, 40), torch.zeros(64, dtype=torch.long)


STEPS = 120  # whole periods of every algorithm
# Stragglers take fewer steps; partners are drawn: test_ad_psgd.py has the sum over ranks
BY_CHANCE = {"backup-sgd", "online-backup-sgd", "ad-psgd"}


@pytest.mark.parametrize("name", sorted(set(algorithms.names()) - BY_CHANCE))
def test_bytes_of_the_card_are_those_that_are_sent(name: str) -> None:
    """On simulated ranks whose speeds do not vary, after the first step, in which a pipeline fills."""
    ranks = 1 if name == "serial-sgd" else RANKS
    settings = {"quorum": "all"} if name == "partial-all-reduce" else {}
    algorithm = algorithms.get(name, **settings)
    problem = Problem(model=model, loss=nn.functional.cross_entropy, train=zeros, batch_size=4)
    record = simulate(
        algorithm,
        problem,
        workers=ranks,
        network=Network(latency_s=1e-4, bandwidth_bytes_per_s=1e7),
        compute=Compute(forward_s=0.01, backward_s=0.02, update_s=0.001),
        timing_only=True,
        steps=STEPS + 1,
        trace_steps=0,
    )
    layout = laid_out(algorithm)
    plain, serving = promised(name, algorithm, layout.parameter_numel * layout.itemsize)
    sent = [
        (record.metrics[rank][-1]["bytes_sent"] - record.metrics[rank][0]["bytes_sent"]) / STEPS
        for rank in range(ranks)
    ]
    expected = [serving if rank < getattr(algorithm, "shards", 0) else plain for rank in range(ranks)]
    assert sent == pytest.approx(expected, rel=0.04)
