"""What pytest leaves alone: modules that cannot be imported because what they are made of is not installed."""

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("triton") else ["workbench/codecs/triton_kernels.py", "tests/unit/triton_interpreted.py"]
)
