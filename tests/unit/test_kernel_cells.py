"""Commands of a cell for ranks, and the merged output of ranks; with real ranks: tests/notebooks/test_kernels.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.cli.main import main
from workbench.errors import ConfigError
from workbench.kernel.cells import Cell, format_ranks, hide_commands, parse_cell, parse_ranks
from workbench.kernel.outputs import HOLD_S, Merger, label
from workbench.resources import kernels


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("x = 1", Cell(body="x = 1")),
        ("%%rank 0,2\nx = 1\n", Cell(body="x = 1\n", ranks="0,2")),
        ("%%rank[0, 2]\nx", Cell(body="x", ranks="0, 2")),
        ("%%rank 0-2 --tabs\nx", Cell(body="x", ranks="0-2", tabs=True)),
        ("%%rank --tabs\nx", Cell(body="x", tabs=True)),
        ("%%ranks all --tabs\nx", Cell(body="x", ranks="all", tabs=True)),
        ("%%local\nx = 1", Cell(body="x = 1", local=True)),
        ("%%local steps, seed\nx", Cell(body="x", local=True, names=("steps", "seed"))),
        ("%ranks 3", Cell(commands=(("ranks", "3"),))),
        ("# so many\nx", Cell(body="# so many\nx")),
        (
            "%launcher emulated:1gbit,latency=5ms\n%ranks 2\n\n%%rank 1\ny",
            Cell((("launcher", "emulated:1gbit,latency=5ms"), ("ranks", "2")), "y", ranks="1"),
        ),
        ("%pip install x", Cell((("pip", "install x"),))),
        ("%pip install \\\n  x y\nimport x", Cell((("pip", "install x y"),), "import x")),
        ("%load_ext autoreload", Cell(body="%load_ext autoreload", local=True)),
        ("%load_ext autoreload\n%autoreload 2\nx", Cell(body="%load_ext autoreload\n%autoreload 2\nx")),
        ("%timeit f()", Cell(body="%timeit f()")),
        ("%ranks?", Cell(body="%ranks?")),
        ("%%time\nf()", Cell(body="%%time\nf()")),
        ("x = 'a\n%ranks 2'", Cell(body="x = 'a\n%ranks 2'")),
    ],
)
def test_a_cell_is_taken_apart(text: str, cell: Cell) -> None:
    assert parse_cell(text) == cell


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("%%rank\nx", "%%rank 0,2"),
        ("%%loacl\nx", "did you mean %%local"),
        ("%%rnak 0\nx", "did you mean %%rank"),
        ("%%local x.y\nx", "no variable name"),
    ],
)
def test_a_slip_is_told(text: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        parse_cell(text)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [(None, [0, 1, 2, 3]), ("all", [0, 1, 2, 3]), ("3,1", [1, 3]), ("1-3", [1, 2, 3]), ("0 2:3", [0, 2, 3])],
)
def test_ranks_are_numbers_and_ranges(words: str | None, ranks: list[int]) -> None:
    assert parse_ranks(words, 4) == ranks


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("4", "0 to 3"),
        ("x", "no rank; write 0"),
        ("3-1", "write 1-3"),
        ("-1", "no rank"),
        ("1-9", "no rank 9"),
        (", ", "names no rank"),
    ],
)
def test_other_ranks_are_refused(words: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        parse_ranks(words, 4)


def test_a_wrong_rank_is_refused_in_the_words_of_its_command() -> None:
    with pytest.raises(ConfigError, match=r"^%debug_rank 9: there is no rank 9"):
        parse_ranks("9", 4, "%debug_rank")


@pytest.mark.parametrize(
    ("cell", "on_ranks"),
    [
        ("x = 1\n", "x = 1\n"),
        ("%ranks 2\n\n%%rank 0\nx\ny\n", "\n\n\nx\ny\n"),
        ("%%rank 0\n%%time\nx\n", "%%time\nx\n"),
        ("%%loacl\nx\n", "%%loacl\nx\n"),
    ],
)
def test_on_the_ranks_a_cells_lines_keep_their_numbers(cell: str, on_ranks: str) -> None:
    assert "".join(hide_commands(cell.splitlines(keepends=True))) == on_ranks


def test_ranks_are_spoken_briefly() -> None:
    assert [format_ranks(ranks) for ranks in ([0], [0, 1], [3, 0, 1, 2], [0, 2, 4, 5], [9, 10, 11])] == [
        "0",
        "0-1",
        "0-3",
        "0,2,4-5",
        "9-11",
    ]
    assert [label([0, 1], 2), label([0], 1)] == ["[0-1] ", ""]


class Screen:
    """A merger with its own clock, and what it has shown."""

    def __init__(self, *ranks: int) -> None:
        self.now, self.shown = 0.0, []  # type: ignore[var-annotated]
        self.merger = Merger(
            ranks, lambda group, kind, content: self.shown.append((group, kind, content)), clock=lambda: self.now
        )

    def flush(self, **how: Any) -> list[Any]:
        self.merger.flush(**how)
        shown, self.shown = self.shown, []
        return shown


def test_the_same_line_of_all_is_shown_once_and_at_once() -> None:
    screen = Screen(0, 1)
    screen.merger.text(1, "stdout", "begun\nrank 1\n")
    assert screen.flush() == []
    screen.merger.text(0, "stdout", "begun\nrank 0\n")
    assert screen.flush() == [([0, 1], "stdout", "begun"), ([0], "stdout", "rank 0"), ([1], "stdout", "rank 1")]


def test_a_line_waits_for_the_others_but_not_for_long() -> None:
    screen = Screen(0, 1, 2)
    screen.merger.text(2, "stderr", "late?\n")
    screen.now = HOLD_S / 2
    screen.merger.text(0, "stderr", "late?\n")
    assert screen.flush() == []
    screen.now = HOLD_S
    assert screen.flush() == [([0, 2], "stderr", "late?")]


def test_a_line_is_shown_whole_and_a_progress_bar_as_it_ended() -> None:
    screen = Screen(0)
    screen.merger.text(0, "stdout", "1 of 3\r2 of 3")
    assert screen.flush() == [] and screen.merger.incomplete() == {0: "2 of 3"}
    screen.merger.text(0, "stdout", "\r3 of 3\r")
    assert screen.merger.incomplete() == {0: "3 of 3"}
    assert len(screen.merger._pending[0].incomplete["stdout"]) < 10, "a bar of a long loop writes megabytes"
    screen.merger.text(0, "stdout", "\nrest")
    assert screen.flush() == [([0], "stdout", "3 of 3")]
    screen.merger.ended(0)
    assert screen.flush() == [([0], "stdout", "rest")]


def test_a_rank_that_ended_is_not_waited_for() -> None:
    screen = Screen(0, 1)
    screen.merger.ended(1)
    screen.merger.text(0, "stdout", "alone\n")
    assert screen.flush() == [([0], "stdout", "alone")]


def test_objects_that_differ_in_their_address_alone_are_the_same() -> None:
    screen = Screen(0, 1)
    for rank in (0, 1):
        screen.merger.display(rank, "result", {"data": {"text/plain": f"<A at 0x7f00000000{rank}0>"}, "metadata": {}})
    (shown,) = screen.flush()
    assert shown[0] == [0, 1]


def test_nothing_is_lost_and_each_ranks_order_is_kept() -> None:
    screen = Screen(0, 1)
    said: dict[int, list[str]] = {0: [], 1: []}
    for number in range(200):
        rank = number % 2 if number % 7 else 0
        said[rank].append(f"{rank if number % 3 else 'both'} {number // 2}")
        screen.merger.text(rank, "stdout", said[rank][-1] + "\n")
        screen.now += 0.01
        screen.merger.flush()
    screen.merger.flush(final=True)
    for rank, lines in said.items():
        assert [content for group, _, content in screen.shown if rank in group] == lines


# ---------------------------------------------------------------- kernelspecs


def test_specs_name_the_kernel_and_bring_their_logos() -> None:
    titles = {}
    for folder in kernels():
        spec = json.loads((folder / "kernel.json").read_text())
        titles[folder.name] = spec["display_name"]
        assert spec["argv"][0] == "python", "Jupyter puts its own interpreter there"
        assert {"logo-64x64.png", "logo-svg.svg"} <= {file.name for file in folder.iterdir()}
        assert not (folder / "__init__.py").exists()
    assert titles == {"workbench": "Workbench", "workbench-mpi": "Workbench MPI", "workbench-slurm": "Workbench Slurm"}


def test_kernels_are_installed_with_this_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "install", "--prefix", str(tmp_path), "workbench-mpi"]) == 0
    (spec,) = tmp_path.glob("share/jupyter/kernels/*/kernel.json")
    assert spec.parent.name == "workbench-mpi"
    assert json.loads(spec.read_text())["argv"][:3] == [sys.executable, "-m", "workbench.kernel"]
    assert str(spec.parent) in capsys.readouterr().out


def test_an_unknown_kernel_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "install", "workbench-mip"]) == 2
    assert "did you mean workbench-mpi" in capsys.readouterr().err


def test_a_list_says_how_to_install_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    main(["kernels", "install", "--prefix", str(tmp_path / "there")])
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "there" / "share" / "jupyter"))
    capsys.readouterr()
    assert main(["kernels", "list", "--json"]) == 0
    assert {row["name"]: row["installed"] for row in json.loads(capsys.readouterr().out)} == {
        folder.name: str(tmp_path / "there" / "share" / "jupyter" / "kernels" / folder.name) for folder in kernels()
    }
