"""A kernel for the tests of one file, replaced when a test has failed with it: no other test inherits its ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import final

import pytest

from tests.notebooks.kernel_client import Notebook, install_kernels, start_notebook

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note on a test that it has failed, for the end of its fixtures."""
    report = yield
    item.stash[FAILED] = report.failed or (item.stash.get(FAILED, False) and report.when != "setup")
    return report


@final
@dataclass(slots=True)
class SharedNotebook:
    """The notebook that the tests of a file share."""

    notebook: Notebook | None = None

    def end(self, *, failed: bool) -> None:
        """End its ranks and its kernel, which need not answer to a cell if a test has failed with it."""
        if self.notebook is None:
            return
        if not failed:
            self.notebook.cell("%stop_ranks")  # at its end the kernel would only detach those that a test has attached
        self.notebook.close()
        self.notebook = None


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedNotebook]:
    found = SharedNotebook()
    yield found
    found.end(failed=False)


@pytest.fixture
def notebook(environment: dict[str, str], shared: SharedNotebook, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    if shared.notebook is None:
        shared.notebook = start_notebook(environment)
    yield shared.notebook
    if request.node.stash.get(FAILED, False):
        shared.end(failed=True)
