"""The notebooks that test claims, as they are committed: checks that do not run them."""

from __future__ import annotations

import json
import re
from functools import cache

import nbformat
import pytest

from workbench import resources
from workbench.experiments.notebook_catalogue import parameters_of
from workbench.papers import claims
from workbench.papers.check import cell_tags, check_papers
from workbench.papers.claims import SIZES
from workbench.papers.plan import claimed_notebooks, keys_with_claims, plan
from workbench.papers.sizes import values_at

pytestmark = pytest.mark.notebooks

read_claims = cache(claims.read_claims)  # each notebook's test asks
ROWS = {"daily2016leveraging": ("P1", 4), "chen2016revisiting": ("P2", 9), "li2018pipesgd": ("P3", 5)}


def test_claims_notebooks_records_and_pages_are_in_order() -> None:
    assert check_papers().problems == []


@pytest.mark.parametrize("name", claimed_notebooks())
def test_a_notebook_with_claims_has_the_form(name: str) -> None:
    path = resources.notebook(name)
    parameters = parameters_of(path)
    assert parameters[0].name == "size" and parameters[0].default.strip("'\"") == "smoke"
    assert all(parameter.type and parameter.comment for parameter in parameters), "each is typed and says what it is"
    for size in SIZES:
        assert values_at(path, size)["size"] == size
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.partition("\n")[0].endswith("?"), (
        "its question comes first"
    )
    records = re.findall(r"\]\((\.\./papers/\S+/records/\S+\.json)\)", cells[0].source)
    if any(any((resources.shared("papers") / key / "records").glob(f"{name}.*")) for key in claimed_notebooks()[name]):
        assert "**Answer** (size `ci`," in cells[0].source and records, "then the answer of its record"
        assert all((path.parent / record).is_file() for record in records)
    else:
        assert "**Answer**: not measured yet." in cells[0].source
    assert "answer" in cells[-1].metadata.get("tags", []), "its answer last"
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code"), (
        "without outputs"
    )
    asked = {
        question.cell
        for key in claimed_notebooks()[name]
        for question in read_claims(key).questions
        if question.notebook == name
    }
    assert asked <= cell_tags(path)


def test_a_notebook_with_a_virtual_clock_measures_nothing_on_a_real_one() -> None:
    """So it may run beside others."""
    virtual = [name for name in claimed_notebooks() if plan(name, "ci")[0].is_virtual]
    assert virtual
    for name in virtual:
        for key in claimed_notebooks()[name]:
            for path in (resources.shared("papers") / key / "records").glob(f"{name}.*.json"):
                where = {found["where"] for found in json.loads(path.read_text())["findings"].values()}
                assert where <= {"simulated cluster", "formula", "one process"}, path


def test_every_experiment_of_the_three_papers_has_its_notebook() -> None:
    wanted = {f"{paper}-E{number}" for paper, count in ROWS.values() for number in range(1, count + 1)}
    there = {item.id for key in ROWS if key in keys_with_claims() for item in read_claims(key).experiments}
    assert sorted(wanted - there) == []
