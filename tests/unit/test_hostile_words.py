"""Invalid texts on command lines, in notebooks' parameters and in commands to a run: refused with the fix, and never executed."""

from __future__ import annotations

import ast
import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.hostile import FEW, OFTEN, SLOW, WORDS, calm, scalars, texts, values
from workbench import algorithms, codecs, collectives, costs, problems
from workbench.analysis import runs_table
from workbench.analysis.runs_table import Condition
from workbench.cli.main import _parser, main
from workbench.clusters.emulated.launcher import network_of
from workbench.clusters.emulated.rates import parse_rate, parse_seconds
from workbench.clusters.launchers.ssh import parse_hosts
from workbench.clusters.schedulers.request import BatchJob
from workbench.clusters.slurm.request import Slurm
from workbench.clusters.supervision.registry import find_entry
from workbench.errors import ConfigError
from workbench.naming import build, parse_pairs, parse_value
from workbench.program import Algorithm
from workbench.run_spec import check_train
from workbench.runtimes.control.reconfigure import changed, encoded
from workbench.settings import Settings
from workbench.trace.store import find_run

SIGNS = st.text("0123456789.:,=+-/*xX_()[]{}'\"@ eEinfa\\\n", max_size=12)
PIECES = [
    "8x",
    "nvlink-3",
    "+",
    "ethernet-1g",
    "/",
    "16hosts",
    "4:1",
    "0",
    "-1",
    "9" * 500,
    "lognormal",
    ":",
    "0.3",
    ",",
    "sigma=",
    "pipe-sgd",
    "width=2",
]
phrases = st.one_of(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), SIGNS, texts)
CALLS = ["Ring(chunks=2)", "Ring(codec=TopK(k=5))", "Constant(3)", "Truncate16()", "Native()"]
calls = st.one_of(
    st.sampled_from(CALLS),
    st.builds(lambda call, at, sign: call[:at] + sign + call[at:], st.sampled_from(CALLS), st.integers(0, 12), SIGNS),
    SIGNS.map(lambda signs: f"Ring({signs})"),
    st.sampled_from(
        [
            "__import__('os').system('false')",
            "Ring(**{'chunks': 2})",
            "Ring(*[1])",
            "Ring(chunks=(lambda: 1)())",
            "Ring(" * 3000 + ")",
        ]
    ),
)

READERS: dict[str, Callable[[str], Any]] = {
    "network": costs.get,
    "stragglers": costs.stragglers.get,
    "collective": collectives.get,
    "codec": codecs.get,
    "condition": Condition.parse,
    "launcher": lambda text: network_of(f"{text}:", 2),
    "rate": parse_rate,
    "latency": parse_seconds,
    "slurm": lambda text: Slurm.parse(f"slurm:{text}"),
    "pbs": lambda text: BatchJob.parse(f"pbs:{text}"),
    "ssh": lambda text: parse_hosts(f"ssh:{text}"),
    "algorithm": algorithms.get,
    "problem": problems.get,
    "cluster": find_entry,
    "run": find_run,
}


@pytest.mark.parametrize("what", sorted(READERS))
@FEW
@given(phrases)
def test_names_and_specifications(runs_of_module: None, what: str, text: str) -> None:
    with calm(f"words: {what}"):
        READERS[what](text)


@pytest.fixture(scope="module")
def runs_of_module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run store and a home of their own, for all examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@OFTEN
@given(st.one_of(SIGNS, texts, phrases))
def test_a_value_is_plain_whatever_is_written(text: str) -> None:
    with calm("values"):
        found = parse_value(text)
        assert isinstance(found, bool | int | float | str | list | tuple | dict | None)
        if isinstance(found, int):
            float(found)
    with calm("pairs"):
        parse_pairs([text, f"width={text}"], "--set")


@OFTEN
@given(calls)
def test_an_expression_is_read_and_never_run(text: str) -> None:
    known = {
        name: getattr(module, name)
        for module in (collectives, codecs)
        for name in module.__all__
        if isinstance(getattr(module, name), type)
    }
    with calm("expressions"):
        build(text, known)


def commands() -> st.SearchStrategy[list[str]]:
    """Command lines of the commands that only read and check."""
    options = [
        "--set",
        "--network",
        "--stragglers",
        "--workers",
        "--steps",
        "--lr",
        "--batch-size",
        "--optimizer",
        "--optimizer-set",
        "--option",
        "--seed",
    ]
    pair = st.tuples(st.sampled_from(options), st.one_of(phrases, SIGNS.map(lambda signs: f"width={signs}")))
    return st.builds(
        lambda algorithm, pairs: [
            "train",
            algorithm,
            "--runtime",
            "simulated",
            *(f"{name}={value}" for name, value in pairs),
        ],
        st.one_of(st.sampled_from(algorithms.names()), phrases.filter(lambda text: not text.startswith("-"))),
        st.lists(pair, max_size=4),
    )


@SLOW
@given(commands())
def test_trainings_are_checked(words: list[str]) -> None:
    """As far as they go before anything is trained."""
    with redirect_stderr(io.StringIO()), suppress(SystemExit):
        _parser().parse_args(words)
    with calm("command line"):
        check_train(words[1:])


LISTING = [
    ["runs", "--where"],
    ["runs", "--since"],
    ["runs", "--sort"],
    ["runs", "--columns"],
    ["show"],
    ["algorithms"],
    ["codecs"],
    ["runs", "remove"],
    ["steer", "last"],
]


@pytest.mark.parametrize("begin", LISTING, ids=" ".join)
@FEW
@given(text=phrases.filter(lambda text: "\0" not in text))
def test_commands_end_with_a_status_and_a_word(runs_of_module: None, begin: list[str], text: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with calm("command line"), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([*begin, text])
        except SystemExit as left:  # argparse
            status = int(left.code or 0)
        assert status in (0, 2) and "Traceback" not in err.getvalue()
        assert status == 0 or err.getvalue()


@SLOW
@given(
    st.sampled_from(
        [
            "epochs",
            "steps",
            "batch_size",
            "lr",
            "clip_norm",
            "ema_decay",
            "num_micro",
            "precision",
            "seed",
            "threads",
            "timeout_s",
        ]
    ),
    scalars,
)
def test_settings(name: str, value: Any) -> None:
    with calm("settings"):
        Settings(**{"steps": 3, name: value})


ALGORITHMS = [
    algorithms.get(name)
    for name in ("pipe-sgd", "local-sgd", "async-sgd", "stale-sgd", "adaptive-delay-sgd")
    if name in algorithms.names()
]


@OFTEN
@given(
    st.sampled_from(ALGORITHMS),
    st.dictionaries(
        st.sampled_from(["lr", "width", "delay", "codec", "collective", "staleness", "every", "first", "lanes", "x"]),
        st.one_of(values, calls),
        max_size=3,
    ),
)
def test_words_to_a_run_change_settings_or_are_refused(algorithm: Algorithm, changes: dict[str, Any]) -> None:
    """Ranks read them from a file: an error that is no `ConfigError` would end them."""
    with calm("set"), suppress(ConfigError):
        changed(algorithm, changes, 4)
    with calm("set"):
        encoded(algorithm, changes)


@pytest.mark.notebooks
@SLOW
@given(
    st.dictionaries(
        st.sampled_from(["lr", "name", "sizes"]), st.one_of(values, texts, st.sampled_from(WORDS)), max_size=3
    )
)
def test_parameters_of_a_notebook_are_values_and_no_code(parameters: dict[str, Any]) -> None:
    """What papermill writes into the notebook's own cell is names, and values that mean what was given."""
    from papermill.translators import papermill_translators

    with calm("notebook parameters"):
        text = papermill_translators.find_translator("python3", "python").codify(parameters, "Parameters")
        for node in ast.parse(text).body:
            assert isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            called = {ast.unparse(item) for item in ast.walk(node.value) if isinstance(item, ast.Call)}
            assert called <= {"float('nan')", "float('inf')", "float('-inf')"}, called


def test_a_table_of_hostile_conditions_is_refused(runs_of_module: None) -> None:
    for text in (*WORDS, "9" * 400, "workers>=" + "9" * 400):
        with calm("conditions"):
            runs_table(where=[text])
        with calm("conditions"):
            runs_table(since=text)
