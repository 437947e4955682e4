"""GPT-2's shapes, by their published numbers of parameters."""

import pytest
import torch

from workbench.costs import count_compute
from workbench.errors import ConfigError
from workbench.problems.gpt2 import gpt2_synthetic


@pytest.mark.parametrize(("size", "numel"), [("small", 124_439_808), ("medium", 354_823_168)])
def test_as_many_parameters_as_published(size: str, numel: int) -> None:
    with torch.device("meta"):
        model = gpt2_synthetic(size).model()
    assert sum(weight.numel() for weight in model.parameters()) == numel


def test_forward_takes_two_operations_a_weight_and_token() -> None:
    """And attention's on top, which grows with the square of the context."""
    short, long = (
        count_compute(gpt2_synthetic(context=context), 1, flops_per_s=1.0).forward_s / context for context in (16, 1024)
    )
    weights = 124_439_808 - 1024 * 768  # positions are added
    assert short == pytest.approx(2 * weights, rel=0.01)
    assert long - short == pytest.approx(12 * 4 * 768 * (1024 - 16), rel=0.01)


def test_what_gpt2_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean medium"):
        gpt2_synthetic("medum")
    with pytest.raises(ConfigError, match="1 to 1024 tokens"):
        gpt2_synthetic(context=2048)
