"""Modules that pytest does not collect: they cannot be imported, because a package that they need is not installed, or takes long."""

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("triton") else ["workbench/codecs/triton_kernels.py", "tests/unit/triton_interpreted.py"]
)
# They import other libraries, which may be missing and take seconds: tests/distributed/test_adapters.py runs them.
collect_ignore += ["workbench/adapters/huggingface.py", "workbench/adapters/lightning.py"]
