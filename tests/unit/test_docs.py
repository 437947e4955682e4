"""README and the pages in `docs/`: their links, commands and code."""

from __future__ import annotations

import ast
import html
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import workbench as wb
from workbench import algorithms
from workbench.cli.main import _parser, main
from workbench.naming import kinds_of
from workbench.run_spec import algorithm_in, expand_settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in PAGES if "_build" not in path.parts]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
NO_COMMAND = ("--engine", "--kernel", "-k", "activate")  # options after which `workbench` is a name
QUICK = (
    "runs",
    "show last",
    "export last",
    "notebook list",
    "papers list",
    "cluster list",
    "submit",
)  # need no cluster
GENERATED = {"docs/reference.md", "docs/notebooks.md", "docs/papers/cards.md"}  # by docs/build.py


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a page."""
    return [text for name, text in BLOCK.findall(path.read_text(encoding="utf-8")) if name == language]


def commands(path: Path) -> Iterator[str]:
    """The lines of a page's shell blocks, without comments; continued lines are joined."""
    for block in blocks(path, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        file, _, anchor = target.partition("#")
        if "://" in target or not file:
            continue
        found = (path.parent / file).resolve()
        assert found.exists() or str(found.relative_to(ROOT)) in GENERATED, f"{target}: no such file"
        if anchor and found.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{target}: no such heading"


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def checked_settings(words: list[str], line: str) -> list[str]:
    """The words of `workbench train` with its settings as `--set`; those of an algorithm of the package exist."""
    words, algorithm = expand_settings(words), algorithm_in(words)
    if algorithm in algorithms.names():
        known = kinds_of(algorithms.find(algorithm))
        for before, word in pairwise(words):
            assert before != "--set" or word.partition("=")[0] in known, f"{line}: no setting {word}"
    return words


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_understood(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in commands(path):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines
            continue
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        before = ["", *words]
        for start in (n for n, word in enumerate(words) if word == "workbench" and before[n] not in NO_COMMAND):
            ends = [place for place, word in enumerate(words) if word in ("|", "&&", ";", ">", "&") and place > start]
            given = words[start + 1 : min(ends, default=len(words))]
            if given[:1] == ["train"]:
                given = ["train", *checked_settings(given[1:], line)]
            status: object = 0
            try:
                _parser().parse_args(given)
            except SystemExit as end:  # --help and --version end it, too
                status = end.code
            assert status == 0, f"{line}\n{capsys.readouterr().err}"


def quick_commands() -> list[str]:
    """Commands of the pages that run in a second; jobs are not submitted."""
    lines = {line.partition(" #")[0].strip() for path in PAGES for line in commands(path)}
    quick = [line for line in lines if line.startswith(tuple(f"workbench {name}" for name in QUICK))]
    return sorted(
        line for line in quick if not any(word in line for word in ("--sweep", "remove", "--json", "chakra", ".py:"))
    )


@pytest.mark.parametrize("line", quick_commands())
def test_quick_commands_run(
    line: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with the reader's script `mine.py`, after one training."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    wb.simulate(wb.SynchronousSGD(), wb.problems.digits_softmax(), workers=2, network="ethernet-1g", steps=2, save=True)
    given = shlex.split(line)[1:]
    if given[0] == "submit":
        given.insert(1, "--dry-run")
    assert main(given) == 0, capsys.readouterr().err


def test_there_are_quick_commands_of_each_kind() -> None:
    assert {
        name for name in QUICK if not any(line.startswith(f"workbench {name}") for line in quick_commands())
    } == set()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_is_python(path: Path) -> None:
    for text in blocks(path, "python"):
        plain = "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines())
        compile(plain, str(path), "exec")


MEASURED = re.compile(r"([-+]?\d+(?:\.\d+)?) \[([-+]?\d+(?:\.\d+)?), ([-+]?\d+(?:\.\d+)?)\]")
Triple = tuple[float, float, float]


def known_values() -> Iterator[Triple]:
    """Means with their intervals: of claims, of notebooks' answers, of decisions and of the benchmarks' records."""
    sources = [ROOT / "papers" / "README.md", ROOT / "records" / "README.md", *(ROOT / "decisions").glob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    for text in texts:
        for mean, low, high in MEASURED.findall(" ".join(text.split())):
            yield float(mean), float(low), float(high)
    for path in (ROOT / "records").glob("bench-*.json"):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if {"ratio", "low", "high"} <= row.keys():
                yield row["ratio"], row["low"], row["high"]


def test_measured_numbers_are_those_of_the_records() -> None:
    """Rounded, or with the other sign ("loses 7.7 points")."""
    known = list(known_values())
    known += [(-mean, -high, -low) for mean, low, high in known]
    for path in PAGES:
        text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", path.read_text(encoding="utf-8")))
        for words in MEASURED.findall(" ".join(text.split())):
            places = max(len(word.partition(".")[2]) for word in words)
            shown = tuple(map(float, words))
            assert any(tuple(round(value, places) for value in one) == shown for one in known), (
                f"{path.relative_to(ROOT)}: {words[0]} [{words[1]}, {words[2]}] is in no record"
            )


def measured(name: str) -> Any:
    return json.loads((ROOT / "records" / f"{name}.json").read_text(encoding="utf-8"))


def test_accuracies_on_the_front_page_are_those_of_the_records() -> None:
    first, second = measured("predictions"), measured("predictions-second")
    errors = [f"{100 * one[which]:.1f} %" for one in (first, second) for which in ("error_median", "error_worst")]
    study = [row for row in measured("study")["rows"] if not row["fitted"]]
    asleep, sharing = (sorted(abs(row["error"]) for row in study if row["slept"] == slept) for slept in (True, False))
    missed = [f"{100 * each[at]:.0f} %" for each in (asleep, sharing) for at in (len(each) // 2, -1)]
    best = "layer-wise, its best bucket size", "torch DDP, its best"
    steps = [row for row in measured("bench-step")["rows"] if (row["what"], row["over"]) == best]
    ratios = [row["ratio"] for row in steps]
    assert len({tuple(row["case"].split(", ")[:2]) for row in steps}) == 3 * 2, "three models, 2 and 4 ranks"
    found = [row["caught_by"] is not None for row in measured("mutants")["mutants"].values()]
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    for words in (
        f"{len(first['rows'])} cases | median {errors[0]}, largest {errors[1]}; on another day {errors[2]} and {errors[3]} |",
        (
            f"{len(study)} cases | ranks that sleep for the compute: median {missed[0]}, largest {missed[1]}; "
            f"ranks that share cores: {missed[2]} and {missed[3]} |"
        ),
        f"| {min(ratios):.2f} to {max(ratios):.2f} on three models, 2 and 4 ranks |",
        f"| {sum(found)} of {len(found)}; the other changes no result |",
    ):
        assert words in front, f"README.md does not have what the records say: {words}"


def docs_module(name: str) -> ModuleType:
    """A script of `docs/`."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_of_how_it_works_are_those_of_their_script() -> None:
    pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
    page = (ROOT / "docs" / "concepts" / "how-it-works.md").read_text(encoding="utf-8")
    figures = docs_module("draw_concepts").FIGURES
    for name, draw in figures.items():
        path = ROOT / "docs" / "pictures" / f"{name}.svg"
        assert path.read_text(encoding="utf-8") == draw(), f"{path}: python docs/draw_concepts.py"
        assert f"](../pictures/{name}.svg)" in page
    assert len(figures) == 5


def test_the_timelines_of_the_concepts_are_those_of_their_script() -> None:
    """Needs no browser: places and colours of bars and points are compared, and the words."""
    pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
    from plotly.colors import hex_to_rgb

    figures = docs_module("draw_timelines").figures()
    for name, figure in figures.items():
        path = ROOT / "docs" / "pictures" / f"{name}.svg"
        text, wrong = path.read_text(encoding="utf-8"), f"{path}: python docs/draw_timelines.py"
        traces = sorted(figure.data, key=lambda trace: trace.yaxis or "y1")  # one panel after the other
        words = {html.unescape(re.sub("<[^>]*>", "", word)) for word in re.findall("<text.*?</text>", text)}
        assert words >= {trace.name for trace in traces}, wrong
        bars = re.findall(r'd="M([\d.]+),[\d.]+V[\d.]+H([\d.]+)V[\d.]+Z" [^>]*fill: rgb\(([\d, ]+)\)', text)
        drawn = [float(place) for *ends, _ in bars for place in ends]
        of_bars = [trace for trace in traces if trace.type == "bar"]
        places = [
            place
            for trace in of_bars
            for begin, length in zip(trace.base, trace.x, strict=True)
            for place in (begin, begin + length)
        ]
        colors = [", ".join(map(str, hex_to_rgb(trace.marker.color))) for trace in of_bars for _ in trace.x]
        assert [color for *_, color in bars] == colors, wrong
        if not bars:
            drawn = [float(place) for place in re.findall(r'class="point" transform="translate\(([\d.]+),', text)]
            places = [place for trace in traces for place in trace.x]
            assert words >= {label for trace in traces for label in trace.y}, wrong
        assert len(drawn) == len(places) > 20, wrong
        scale = (max(drawn) - min(drawn)) / (max(places) - min(places))  # pixels for each unit of the axis
        found = [(place - min(drawn)) / scale + min(places) for place in drawn]
        assert found == pytest.approx(places, abs=0.05 / scale), wrong  # a twentieth of a pixel


def test_the_reference_has_every_name_that_pages_import() -> None:
    pytest.importorskip("nbformat", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
    further = docs_module("build").FURTHER
    missing = []
    for path in PAGES:
        trees = [ast.parse(text) for text in blocks(path, "python") if not re.search(r"^[%!]", text, re.MULTILINE)]
        imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        for node in imports:
            module = node.module or ""
            if module.partition(".")[0] != "workbench":
                continue
            for name in (alias.name for alias in node.names):
                known = further.get(module if module != "workbench" else f"workbench.{name}")
                public = name in wb.__all__ or (module.count(".") == 1 and module.partition(".")[2] in wb.__all__)
                if not public and (known is None or (known and name not in known)):
                    missing.append(f"{path.relative_to(ROOT)}: from {module} import {name}")
    assert missing == [], "add them to FURTHER in docs/build.py"


def test_every_notebook_of_the_gallery_has_an_answer_and_a_described_figure() -> None:
    pytest.importorskip("nbformat", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
    build = docs_module("build")
    sections = build.gallery().split("\n### ")[1:]
    assert len(sections) == len(list((ROOT / "notebooks").glob("*.ipynb")))
    for section in sections:
        title = section.splitlines()[0]
        assert "**Answer" in section, f"{title}: its first cell has no answer"
        picture = re.search(r"^!\[(.+)\]\((\S+)\)\n\n\*(.+)\*$", section, re.MULTILINE)
        assert picture is not None, f"{title}: no figure with a caption"
        assert len(picture[1].split()) >= 3, f"{title}: the alternative text {picture[1]!r} does not say what one sees"
        place = picture[2] if picture[2].startswith("papers/") else f"docs/{picture[2]}"
        assert (ROOT / place).is_file()
