"""Every paper that an algorithm, collective or codec cites has a card, in one form, and every card is cited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workbench import algorithms, catalogue, codecs, collectives, optimizers, topologies
from workbench.resources import shared

PACKAGE = Path(algorithms.__file__).parents[1]
KEY = re.compile(r"\b[a-z]+(?:19|20)\d\d[a-z]+\b")
KEYS = sorted(folder.name for folder in shared("papers").iterdir() if folder.is_dir())

THREE = ("chen2016revisiting", "daily2016leveraging", "li2018pipesgd")  # whose experiments are run here
REPRODUCED = ["Here", "Deviations", "Not said", "Read or recalled", "Symbols"]
GENERATED = ["Results", "Amendments"]


def cited() -> dict[str, set[str]]:
    """key -> places: the cards of algorithms, and all docstrings of the package."""
    found: dict[str, set[str]] = {}
    for name in algorithms.names():
        for key in KEY.findall(catalogue.card_of(algorithms.find(name)).paper):
            found.setdefault(key, set()).add(name)
    for path in sorted(PACKAGE.rglob("*.py")):
        for key in KEY.findall(path.read_text()):
            found.setdefault(key, set()).add(str(path.relative_to(PACKAGE)))
    return found


def test_every_key_has_its_card_and_every_card_is_cited() -> None:
    places = cited()
    assert {key: where for key, where in places.items() if key not in KEYS} == {}
    assert set(KEYS) <= set(places), "a card that nobody cites"


@pytest.mark.parametrize("name", algorithms.names())
def test_an_algorithms_card_cites_by_key(name: str) -> None:
    paper = catalogue.card_of(algorithms.find(name)).paper
    assert all(KEY.match(part.strip()) for part in paper.split(";")), f"{paper!r}: key, section or equation; key, ..."
    box = catalogue.description(algorithms.find(name))
    assert "Paper: " in box
    assert KEY.match(box.partition("Paper: ")[2]), "the docstring names its paper by key"
    if isinstance(algorithms.find(name), type):
        assert set(KEY.findall(paper)) <= set(KEY.findall(box)), "what the card cites, the docstring does"


@pytest.mark.parametrize("key", KEYS)
def test_a_card_has_the_form(key: str) -> None:
    text = (shared("papers") / key / "card.md").read_text()
    head, *parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    assert head.startswith(f"# {key}\n")
    assert re.search(r"\*[^*]+\*", head) and re.search(r"\b(19|20)\d\d\b", head), "a title and a year"
    titles = [title for title in parts[0::2] if title not in GENERATED]
    assert titles == (REPRODUCED if key in THREE else ["Here", "Read or recalled", "Symbols"])
    here, provenance, symbols = (
        parts[2 * titles.index(title) + 1] for title in ("Here", "Read or recalled", "Symbols")
    )
    assert re.search(r"\b(Read|Recalled)", provenance)
    assert len(re.findall(r"^\| .* \| .* \| .*\|$", symbols, re.MULTILINE)) >= 2, "a head and at least one symbol"
    names = {
        name
        for name in re.findall(r"^- \[?`([A-Z]\w+)|; \[?`([A-Z]\w+)|, \[?`([A-Z]\w+)", here, re.MULTILINE)
        for name in name
        if name
    }
    known = {
        *dir(algorithms),
        *dir(collectives),
        *dir(codecs),
        *dir(optimizers),
        *dir(topologies),
        "NoiseScale",
        "Settings",
    }
    assert names and names <= known, "what is implemented is named as it is called"


def test_the_list_of_papers_is_that_of_the_cards() -> None:
    listed = re.findall(
        r"^\| \[`(\w+)`\]\((\w+)/card\.md\)", (shared("papers") / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(key for key, _ in listed) == KEYS
    assert all(key == folder for key, folder in listed)


@pytest.mark.parametrize("key", THREE)
def test_a_card_leads_to_the_code(key: str) -> None:
    folder = shared("papers") / key
    text = (folder / "card.md").read_text()
    here = text.partition("## Here\n")[2].partition("\n## ")[0]
    links = re.findall(r"\[`([\w/.]+)`\]\(([^)]+)\)", here)
    assert len(links) >= 5
    for name, target in links:
        path = (folder / target).resolve()
        assert path.is_file(), target
        assert name.rpartition("/")[2] in path.name or re.search(
            rf"^(class|def) {name}\b", path.read_text(), re.MULTILINE
        ), (name, target)
