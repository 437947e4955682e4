"""Language models on texts that come with Python: the help on its syntax, and the source files of its library.

Texts are read as bytes, so the vocabulary is 256 and there is no tokeniser. The texts differ a little between Python
versions. The number of samples does not, because a fixed `num_bytes` is used. The note of a problem on source files
gives the Python version and the digest of the text. Ranks compare their data before they train, so all ranks have the
same text.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from workbench.errors import ConfigError, DataMissing
from workbench.problems.base import Problem
from workbench.problems.models import check_dtype, positive_ints

VOCABULARY = 256  # a token is a byte
TEST_SHARE = 10  # the last tenth of the text is the test set
LIBRARY_TEST_BYTES = 32_768  # an evaluation then takes as long as a few steps
# Files that differ between installations, are not program text, or are missing in later Python versions.
LEFT_OUT = frozenset(
    {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"}
)

ReadText = Callable[[int], bytes]  # number of bytes -> that many first bytes of a text


def text_transformer(
    *,
    context: int = 64,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    num_bytes: int = 400_000,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Decoder-only transformer that predicts the next byte of Python's help on its syntax. 437,760 parameters by default.

    Input and output embeddings are one shared parameter. Accuracy is the share of correctly predicted bytes.

    Args:
        context: bytes of a sample, and context length of the model.
        width: size of the residual stream; a multiple of `heads`.
        layers, heads: number of transformer blocks, and of attention heads in each.
        num_bytes: bytes of text: the first 9/10 for training, the rest for tests.
        dtype: dtype of the parameters.
    """
    positive_ints("num_bytes", num_bytes)
    make = _network(context, width, layers, heads, dtype)
    return _transformer("text-transformer", make, load_text, context, num_bytes, num_bytes // TEST_SHARE)


def library_transformer(
    *,
    context: int = 128,
    width: int = 160,
    layers: int = 4,
    heads: int = 4,
    num_bytes: int = 4_000_000,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """The same transformer on source files of Python's library. 1,298,880 parameters by default.

    Args:
        context, width, layers, heads, dtype: see `text_transformer`.
        num_bytes: bytes of text; the last 32,768 are the test set. Files are in a mixed order.
    """
    positive_ints("num_bytes", num_bytes)
    make = _network(context, width, layers, heads, dtype)
    digest = hashlib.sha256(load_library(num_bytes)).hexdigest()
    note = f"text: source files of Python {platform.python_version()}, {num_bytes} bytes, SHA-256 {digest[:16]}"
    return _transformer("library-transformer", make, load_library, context, num_bytes, LIBRARY_TEST_BYTES, note)


def _network(context: int, width: int, layers: int, heads: int, dtype: torch.dtype) -> partial[TextTransformer]:
    positive_ints("context, width, layers and heads", [context, width, layers, heads])
    check_dtype(dtype)
    if width % heads:
        raise ConfigError(
            f"width={width} is not a multiple of heads={heads}: choose width={width - width % heads or heads}"
        )
    return partial(TextTransformer, context, width, layers, heads, dtype)


def _transformer(
    name: str,
    make: partial[TextTransformer],
    read: ReadText,
    context: int,
    num_bytes: int,
    test_bytes: int,
    note: str = "",
) -> Problem:
    if min(test_bytes, num_bytes - test_bytes) <= context:
        least = TEST_SHARE * (context + 1) if read is load_text else LIBRARY_TEST_BYTES + context + 1
        part = "test tenth" if read is load_text else "training part"
        raise ConfigError(
            f"num_bytes={num_bytes}: the {part} does not hold {context} bytes and one more: use {least} or more"
        )
    read(num_bytes)
    return Problem(
        name=name,
        model=make,
        loss=cross_entropy,
        train=partial(load_windows, True, context, num_bytes, test_bytes, read),
        test=partial(load_windows, False, context, num_bytes, test_bytes, read),
        batch_size=8,
        optimizer=partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.01),
        note=note,
    )


@final
class Block(nn.Module):
    """Attention to the past, then a two-layer network.

    Each of the two normalises its input, and its output is added to the input. (B, T, D) -> same.
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
    """Bytes (B, T) int64 -> scores of the next byte (B, 256, T), in the order of dimensions of `cross_entropy`."""

    def __init__(
        self,
        context: int,
        width: int,
        layers: int,
        heads: int,
        dtype: torch.dtype = torch.float32,
        vocabulary: int = VOCABULARY,
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
def load_windows(train: bool, context: int, num_bytes: int, test_bytes: int, read: ReadText) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both (N, context) int64: adjacent windows; targets are the inputs, one byte later."""
    text = read(num_bytes)
    cut = num_bytes - test_bytes
    tokens = torch.frombuffer(bytearray(text[:cut] if train else text[cut:]), dtype=torch.uint8).long()
    num_windows = (len(tokens) - 1) // context
    inputs = tokens[: num_windows * context].view(num_windows, context)
    targets = tokens[1 : num_windows * context + 1].view(num_windows, context)
    return inputs, targets


def load_text(num_bytes: int) -> bytes:
    """Return the first `num_bytes` of Python's help on its syntax, topics in alphabetical order (466 kB in Python 3.11)."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataMissing(
            "this Python lacks pydoc_data/topics.py, the text to learn from: install the full standard library"
        ) from None
    return _first("\n\n".join(topics[name] for name in sorted(topics)).encode(), num_bytes)


def load_library(num_bytes: int) -> bytes:
    """Return the first `num_bytes` of the source files of Python's library, in the order of the SHA-256 of their names."""
    return _first(_library(), num_bytes)


def _first(text: bytes, num_bytes: int) -> bytes:
    if len(text) < num_bytes:
        raise ConfigError(f"num_bytes={num_bytes}: this Python's text has {len(text)} bytes: give at most that many")
    return text[:num_bytes]


@lru_cache(maxsize=1)
def _library() -> bytes:
    """Return the joined source files of modules that every installation has, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = sorted(sys.stdlib_module_names - LEFT_OUT)
    files = [path for name in modules for path in (root / f"{name}.py", *(root / name).rglob("*.py")) if path.is_file()]
    names = [
        path.relative_to(root).as_posix()
        for path in files
        if not {"test", "tests"} & set(path.parts[len(root.parts) :])
    ]
    if not names:
        raise DataMissing(
            f"this Python has no source files in {root}, the text to learn from: install the full standard library"
        )
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return b"\n".join((root / name).read_bytes() for name in names)
