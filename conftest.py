"""Modules that pytest does not collect: they cannot be imported, because a package that they need is not installed."""

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("triton") else ["workbench/codecs/triton_kernels.py", "tests/unit/triton_interpreted.py"]
)
