"""Builds the documentation: `python docs/build.py [html | singlehtml] [FOLDER]`, into `docs/_build` or the folder.

Sphinx reads one tree. It is made of these pages, and of the notebooks, papers, decisions and records of the repository.
Links to files that are not in the tree become the names of these files.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from urllib.parse import quote

import nbformat

DOCS = Path(__file__).parent
ROOT = DOCS.parent
TAKEN = (  # files of the repository that are pages or pictures of the site, in the same places
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "STYLE.md",
    "decisions/*.md",
    "kernels/README.md",
    "notebooks/*.ipynb",
    "papers/README.md",
    "papers/*/card.md",
    "papers/*/figures/*",
    "records/README.md",
    "records/combinations.md",
    "records/*.svg",
)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
GROUPS = {  # notebooks by their number: first of each group -> heading
    0: "Begin here",
    10: "Clusters of other sizes and networks",
    20: "Asynchronous gradient descent (daily2016leveraging)",
    40: "Backup workers (chen2016revisiting)",
    60: "Pipe-SGD (li2018pipesgd)",
    70: "Gossip",
}
PICTURES = {  # of notebooks without a paper: name -> a picture, what one sees, its caption
    "00-tour": (
        "timelines.svg",
        "Two timelines on one axis: synchronous SGD waits for each sum, Pipe-SGD computes meanwhile",
        "Steps of the tour's two algorithms: two of four ranks, on an emulated network of 1 Gbit/s.",
    ),
    "01-cockpit": (
        "live.png",
        "Curves of loss and accuracy, a row for each rank, and a timeline of the newest steps, with buttons above",
        "The live view of a training. The cockpit compares several such trainings.",
    ),
    "02-mpi-kernel": (
        "mpi-kernel.png",
        "A notebook whose cells print the sums and the times of all ranks",
        "Cells of the MPI kernel run on all ranks. Output that is equal on all ranks is shown once.",
    ),
    "03-how-much-would-it-help": (
        "study-check.svg",
        "A row for each of twelve algorithms and two models: a predicted step time, its interval, and the measured time",
        "Predicted step times of two models on 2 hosts, and those of real ranks with slept compute on an emulated network.",
    ),
}
MOCKED = ["accelerate", "lightning", "transformers"]  # libraries of the adapters: the reference is built without them
FURTHER: dict[str, tuple[str, ...]] = {  # modules that pages import from -> names; (): all names of its `__all__`
    "workbench.clusters": ("Slurm", "BatchJob"),
    "workbench.clusters.emulated": ("EmulatedNetwork",),
    "workbench.calibration": (),
    "workbench.theory": (),
    "workbench.program": ("Replicas", "Restart", "Update"),
    "workbench.runtimes.reference": ("ReferenceRuntime",),
    "workbench.rng": ("generator",),
    "workbench.errors": ("WorkbenchError", "ConfigError", "RunNotFound", "LaunchError"),
    "workbench.adapters.huggingface": ("AlgorithmTrainer", "add_hook"),
    "workbench.adapters.lightning": ("AlgorithmStrategy", "HookStrategy"),
    "workbench.adapters.accelerate": ("register_hook",),
    "workbench.papers.verdicts": ("estimate",),
}


def main(builder: str = "html", folder: str = str(DOCS / "_build")) -> int:
    """Build the site. Returns Sphinx's exit status."""
    from sphinx.cmd.build import main as sphinx

    source, output = Path(folder) / "source", Path(folder) / builder
    assemble(source)
    status = sphinx(["-b", builder, "-q", "-W", "--keep-going", str(source), str(output)])
    if status == 0:
        print(output / "index.html")
    return int(status)


def assemble(source: Path) -> None:
    """Write the tree that Sphinx reads."""
    shutil.rmtree(source, ignore_errors=True)
    taken = {path.relative_to(ROOT): path.relative_to(ROOT) for pattern in TAKEN for path in ROOT.glob(pattern)}
    own = [path for path in DOCS.rglob("*") if path.is_file() and "_build" not in path.parts]
    pages = taken | {path.relative_to(ROOT): path.relative_to(DOCS) for path in own if path.suffix != ".py"}
    pages |= {Path("docs/conf.py"): Path("conf.py")}
    known = {
        **pages,
        **{Path(f"docs/{name}"): Path(name) for name in ("reference.md", "notebooks.md", "papers/cards.md")},
    }
    for origin, place in pages.items():
        to = source / place
        to.parent.mkdir(parents=True, exist_ok=True)
        if origin.suffix == ".md":
            to.write_text(linked((ROOT / origin).read_text(encoding="utf-8"), origin, known), encoding="utf-8")
        elif origin.suffix == ".ipynb":
            write_notebook(origin, to, known)
        else:
            shutil.copyfile(ROOT / origin, to)
    (source / "reference.md").write_text(reference(), encoding="utf-8")
    (source / "notebooks.md").write_text(gallery(), encoding="utf-8")
    (source / "papers" / "cards.md").write_text(cards(), encoding="utf-8")
    (source / "_static").mkdir(exist_ok=True)
    with (source / "decisions" / "README.md").open("a", encoding="utf-8") as page:
        page.write("\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n")


def linked(text: str, origin: Path, known: dict[Path, Path]) -> str:
    """Return Markdown with links that hold in the tree."""

    def replaced(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not path:
            return match[0]
        found = Path(os.path.normpath(origin.parent / path))
        place = known.get(found) or known.get(found / "README.md")
        if place is None:
            name = found.as_posix()
            return words if words.strip("`") in name else f"{words} (`{name}`)"
        here = known.get(origin, origin).parent
        return f"{image}[{words}]({os.path.relpath(place, here)}{'#' * bool(anchor)}{anchor})"

    return LINK.sub(replaced, text)


def write_notebook(origin: Path, to: Path, known: dict[Path, Path]) -> None:
    """Write a notebook with the figures of its record below its answer."""
    content = nbformat.read(ROOT / origin, as_version=4)
    for cell in content.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, origin, known)
    content.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    if binder := os.environ.get("WORKBENCH_BINDER"):  # such as https://mybinder.org/v2/gh/OWNER/NAME/HEAD
        content.cells[0].source += f"\n\n[Run this notebook on Binder]({binder}?labpath={quote(str(origin))})"
    content.cells[0].source = "\n\n".join([content.cells[0].source, *figures_of(origin.stem)])
    nbformat.write(content, to)


def figures_of(notebook: str, up: str = "../") -> list[str]:
    """Return the figures of a notebook in Markdown: each picture with its text, then its caption.

    Args:
        up: the way from the page to the root of the tree.
    """
    if notebook in PICTURES:
        name, seen, caption = PICTURES[notebook]
        return [f"![{seen}]({up}pictures/{name})", f"*{caption}*"]
    found = {path.name: path for path in sorted(ROOT.glob(f"papers/*/figures/{notebook}-*"))}  # in several papers: once
    lines = []
    for path in found.values():
        seen, caption = described(path.parents[1].name)[path.stem]
        lines += [f"![{seen}]({up}{path.relative_to(ROOT)})", f"*{caption}*"]
    return lines


@cache
def described(paper: str) -> dict[str, tuple[str, str]]:
    """Return the figures that a paper's claims describe: name of the file -> what one sees, its caption."""
    from workbench.papers.claims import read_claims

    figures = read_claims(paper).figures
    return {f"{one.notebook}-{one.id}": (" ".join(one.alt.split()), " ".join(one.caption.split())) for one in figures}


def gallery() -> str:
    """Return the page that lists the notebooks: question, answer, a figure."""
    lines = ["# Notebooks", "", "Each notebook asks one question, and its first paragraph has the answer.", ""]
    first_of = sorted(GROUPS)
    group = -1
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        number = int(path.stem[:2])
        begins = max(first for first in first_of if first <= number)
        if begins != group:
            group = begins
            lines += [f"## {GROUPS[group]}", ""]
        first = nbformat.read(path, as_version=4).cells[0].source
        title = first.splitlines()[0].lstrip("# ")
        answer = re.search(r"\*\*Answer\.?\*\*.*?(?=\n\n|\Z)", first, re.DOTALL)
        lines += [f"### [{title}](notebooks/{path.stem}.ipynb)", ""]
        if answer:
            lines += [linked(answer[0], Path("notebooks/x.ipynb"), {}), ""]
        for line in figures_of(path.stem, "")[:2]:
            lines += [line, ""]
    names = [f"notebooks/{path.stem}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", *names, "```", ""])


def cards() -> str:
    """Return the page of the papers' cards."""
    names = sorted(path.parent.name for path in (ROOT / "papers").glob("*/card.md"))
    lines = [
        "# The papers' cards",
        "",
        "What is implemented of each paper, what was read, its symbols, and its experiments.",
    ]
    return "\n".join([*lines, "", "```{toctree}", "", *(f"{name}/card" for name in names), "```", ""])


def reference() -> str:
    """Return the page of all public names, in the order of `workbench/__init__.pyi`."""
    from sphinx.ext.autodoc.mock import mock

    lines = ["# Reference", "", "All public names of the package `workbench`, in reading order.", ""]
    for heading, names in public_names():
        lines += [f"## {heading}", "", *entries("workbench", names)]
    lines += ["## Further modules", "", "Names that the guides import from modules of the package.", ""]
    for module, names in FURTHER.items():
        with mock(MOCKED):
            lines += entries(module, names or import_module(module).__all__)
    return "\n".join(lines)


def entries(module: str, names: Iterable[str]) -> list[str]:
    """Return the part of the reference about names of a module."""
    lines = []
    for name in names:
        heading = name if module == "workbench" else f"{module}.{name}"
        lines += [f"### {heading}", "", "```{eval-rst}", *directive(module, name), "```", ""]
    return lines


def directive(module: str, name: str) -> Iterator[str]:
    """Yield the lines that document a name."""
    value = getattr(import_module(module), name)
    if inspect.ismodule(value):
        yield f".. automodule:: {value.__name__}"
        yield "   :members:"
        if hasattr(value, "__all__"):
            yield "   :imported-members:"
    elif inspect.isclass(value):
        yield f".. autoclass:: {module}.{name}"
        yield "   :members:"
        if module == "workbench":
            yield "   :inherited-members: object"
    else:
        yield f".. autofunction:: {module}.{name}"
    yield "   :noindex:" if inspect.ismodule(value) else ""


def public_names() -> Iterator[tuple[str, list[str]]]:
    """Yield each heading of the stub file with its names."""
    text = (ROOT / "workbench" / "__init__.pyi").read_text(encoding="utf-8")
    headings = {number: line[2:] for number, line in enumerate(text.splitlines(), 1) if line.startswith("# ")}
    names: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            heading = headings[max(number for number in headings if number < node.lineno)]
            names.setdefault(heading.capitalize(), []).extend(alias.name for alias in node.names)
    yield from names.items()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
