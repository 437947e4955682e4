"""Settings of Sphinx. `python docs/build.py` makes the site."""

from functools import cache
from importlib.metadata import version as version_of
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.addnodes import toctree

project = "workbench"
author = "The workbench authors"
version = release = version_of("sgd-workbench")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks carry their answers and figures as text; `workbench notebook run` executes them
html_theme = "furo"
html_title = "workbench"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"
html_static_path = ["_static"]

autodoc_member_order = "bysource"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # as in build.py
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "literal"  # docstrings write `name` as in Markdown


def setup(app: Any) -> None:
    """Let formulas be MathML, which browsers draw without a script and without a network."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("autodoc-process-docstring", _escape)
    app.connect("html-page-context", _use_titles, priority=400)  # before the theme, which draws the tree of all pages


def _use_titles(app: Any, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Let the tree of all pages, which shows titles only, be made of titles: Sphinx copies all headings for each page."""
    drawn = context.get("toctree")
    if drawn is None:
        return

    def draw(**options: Any) -> Any:
        if not options.get("titles_only"):
            return drawn(**options)
        all_headings, app.env.tocs = app.env.tocs, _titles_of(app.env)
        try:
            return drawn(**options)
        finally:
            app.env.tocs = all_headings

    context["toctree"] = draw


@cache
def _titles_of(env: Any) -> dict[str, nodes.bullet_list]:
    """The table of contents of each page, without its headings. Trees of further pages stay."""
    titles = {page: contents.deepcopy() for page, contents in env.tocs.items()}
    for contents in titles.values():
        for item in contents.children:
            if len(item.children) > 1:
                trees = list(item.findall(toctree))
                if trees:
                    item[1][:] = trees
                else:
                    item.pop(1)
    return titles


def _escape(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Let |x| be an absolute value, and no substitution."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = line.replace("|", r"\|")


def _inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Element) -> None:
    writer.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode
