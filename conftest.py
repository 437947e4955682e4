"""Modules that pytest does not collect: they cannot be imported, because a package that they need is not installed."""

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("triton") else ["workbench/codecs/triton_kernels.py", "tests/unit/triton_interpreted.py"]
)
collect_ignore += [
    f"workbench/adapters/{name}.py"
    for name, package in (("huggingface", "transformers"), ("lightning", "lightning"))
    if not find_spec(package)
]
