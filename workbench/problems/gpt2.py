"""A network with the shapes of GPT-2, on synthetic tokens: to measure the cost of a step, not to learn."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import cross_entropy

from workbench.errors import ConfigError
from workbench.naming import unknown
from workbench.problems.base import Problem
from workbench.problems.text import TextTransformer

VOCABULARY, CONTEXT = 50257, 1024
# width, layers, heads
SHAPES = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}


def gpt2_synthetic(model_size: str = "small", *, context: int = CONTEXT, samples: int = 8) -> Problem:
    """A decoder-only transformer with the parameter shapes of GPT-2 in this size, on tokens that are all equal.

    Input and output embeddings are one shared parameter. Its gradients have the number and shapes of GPT-2's. Nothing
    can be learnt from the tokens: use it for timing, by counting (`workbench.costs.count_compute`) or simulation.

    Args:
        model_size: small, medium, large or xl.
        context: tokens of a sample, and context length of the model, up to 1024.
        samples: number of samples.

    Raises:
        ConfigError: unknown size, or more context than GPT-2 has.
    """
    if model_size not in SHAPES:
        raise unknown("size of GPT-2", model_size, SHAPES)
    if not 1 <= context <= CONTEXT or samples < 1:
        raise ConfigError(f"context={context}, samples={samples}: give 1 to {CONTEXT} tokens, and 1 sample or more")
    width, layers, heads = SHAPES[model_size]
    tokens = torch.zeros(samples, context, dtype=torch.int64)
    return Problem(
        name=f"gpt2-{model_size}-synthetic",
        model=partial(TextTransformer, CONTEXT, width, layers, heads, torch.float32, VOCABULARY),
        loss=cross_entropy,
        train=(tokens, tokens),
        test=None,
        batch_size=8,
        optimizer=partial(torch.optim.AdamW, lr=6e-4, weight_decay=0.1),
    )
