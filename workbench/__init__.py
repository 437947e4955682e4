"""A Jupyter-centric research workbench for distributed SGD.

`__init__.pyi` lists the public names in reading order. Each is imported at first use, so `import workbench` is cheap.

To read the code, begin with `ops` (the requests), `program` (the contract of an algorithm), `algorithms/synchronous` (an
algorithm) and `runtimes/reference` (the smallest runtime). CONTRIBUTING.md continues from there, and lists the layers. The
docstring of a folder's `__init__` says what its modules are, what they may import, and where to begin.
"""

from __future__ import annotations

import os
from importlib import import_module

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_FILES = frozenset(
    """
    __pycache__ _share __init__.py __init__.pyi __main__.py adapters algorithms analysis arguments.py bench calibration callbacks
    catalogue.py cli clusters codecs collectives config.py content.py costs dashboard doctor errors.py experiments gradients.py
    installation.py kernel
    lab laws logs.py machine.py naming.py ops.py optimizers.py papers plots problems program.py progress.py py.typed replica resources.py
    rng.py run_spec.py runtimes schedules.py settings.py streams.py theory topologies.py trace units.py user_file.py what_if
    """.split()  # noqa: SIM905 - a list of strings would take a line each
)


def _warn_of_foreign_files() -> None:
    """Warn if another distribution with the same import name has written files into this folder."""
    try:
        found = os.listdir(os.path.dirname(__file__))
    except OSError:  # imported from an archive
        return
    if not _FILES.issuperset(found):
        import_module("workbench.installation").warn_if_mixed()


import_module("workbench.logs")  # the logger has a handler from the beginning
_warn_of_foreign_files()
