"""A small language model on real English that comes with Python: the texts of `help("keywords")`.

They are read as bytes, so the vocabulary is 256 and there is no tokeniser. The text differs a little between Python
versions (466 kB in Python 3.11). A fixed `num_bytes` is used, so the number of samples does not differ.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from workbench.errors import ConfigError, DataMissing
from workbench.problems.base import Problem
from workbench.problems.models import check_dtype, positive_ints

VOCABULARY = 256  # a token is a byte
TEST_SHARE = 10  # the last tenth of the text is the test set


def text_transformer(
    *,
    context: int = 64,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    num_bytes: int = 400_000,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Decoder-only transformer that predicts the next byte; input and output embeddings are one shared parameter.

    Args:
        context: bytes of a sample, and context length of the model.
        width: size of the residual stream; a multiple of `heads`.
        layers, heads: number of transformer blocks, and of attention heads in each.
        num_bytes: how much of the text is used: the first 9/10 for training, the rest for tests.
        dtype: dtype of the parameters.

    Accuracy is the share of correctly predicted bytes. 437,760 parameters by default.
    """
    positive_ints("context, width, layers, heads and num_bytes", [context, width, layers, heads, num_bytes])
    check_dtype(dtype)
    if width % heads:
        raise ConfigError(f"width={width} does not divide by heads={heads}: choose width={width - width % heads or heads}")
    if num_bytes // TEST_SHARE <= context:
        least = TEST_SHARE * (context + 1)
        raise ConfigError(f"num_bytes={num_bytes}: the test tenth does not hold {context} bytes and the next: use {least} or more")
    load_text(num_bytes)
    return Problem(
        name="text-transformer",
        model=partial(TextTransformer, context, width, layers, heads, dtype),
        loss=cross_entropy,
        train=partial(load_windows, True, context, num_bytes),
        test=partial(load_windows, False, context, num_bytes),
        batch_size=8,
        optimizer=partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.01),
    )


@final
class Block(nn.Module):
    """Attention to the past, then a two-layer network.

    Each normalises its input and is added to it. (B, T, D) -> same.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.inner_norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        num_samples, length, width = x_BTD.shape
        mixed = self.queries_keys_values(self.attention_norm(x_BTD))
        q, k, v = mixed.view(num_samples, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended_BHTd = scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.attended(attended_BHTd.transpose(1, 2).reshape(num_samples, length, width))
        x_BTD = x_BTD + self.inner(self.inner_norm(x_BTD))
        return x_BTD


@final
class TextTransformer(nn.Module):
    """Bytes (B, T) int64 -> scores of the next byte (B, 256, T): the class dimension where `cross_entropy` has it."""

    def __init__(
        self, context: int, width: int, layers: int, heads: int, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)
        self.to(dtype)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT) + self.position[: tokens_BT.shape[1]]
        scores_BTV: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return scores_BTV.transpose(1, 2)


@lru_cache(maxsize=4)
def load_windows(train: bool, context: int, num_bytes: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both (N, context) int64: adjacent windows; targets are the inputs, one byte later."""
    text = load_text(num_bytes)
    cut = num_bytes - num_bytes // TEST_SHARE
    tokens = torch.frombuffer(bytearray(text[:cut] if train else text[cut:]), dtype=torch.uint8).long()
    num_windows = (len(tokens) - 1) // context
    inputs = tokens[: num_windows * context].view(num_windows, context)
    targets = tokens[1 : num_windows * context + 1].view(num_windows, context)
    return inputs, targets


def load_text(num_bytes: int) -> bytes:
    """Return the first `num_bytes` of Python's help on its syntax, by topic (466 kB in Python 3.11)."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataMissing("this Python lacks pydoc_data/topics.py, the text to learn from: install the full standard library") from None
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    if len(text) < num_bytes:
        raise ConfigError(f"num_bytes={num_bytes}: this Python's text has {len(text)} bytes")
    return text[:num_bytes]
