"""Compiled kernels give the bits of torch's operations, and a machine without them still encodes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.kernel_cases import CODECS, KINDS, check, values_of
from workbench.codecs import Codec, Linear8, TopK, Truncate16, compiled, compiler, kernels
from workbench.doctor.software import compiled_codecs
from workbench.errors import ConfigError

CPU = torch.device("cpu")
NEEDS_LIBRARY = pytest.mark.skipif(
    compiler.library().functions is None, reason=f"no compiled codecs: {compiler.library().message}"
)
LENGTHS = st.one_of(st.integers(0, 300), st.sampled_from([4095, 4096, 4097, 65535, 65537, 131_100]))


def by_torch() -> mock._patch[mock.Mock]:
    return mock.patch.object(kernels, "of", return_value=None)


@NEEDS_LIBRARY
@settings(max_examples=150, deadline=None)
@given(
    codec=st.sampled_from([*CODECS, Linear8(group=4096), Linear8(group=5000), Linear8(group=70_000)]),
    kind=st.sampled_from(KINDS),
    numel=LENGTHS,
    offset=st.integers(0, 5),
)
@example(codec=Linear8(), kind="plain", numel=131_100, offset=1)  # chunks of a large group, backwards
@example(codec=Linear8(group=1000), kind="ties", numel=4097, offset=3)
@example(codec=Truncate16(rounding="nearest"), kind="nan", numel=100, offset=1)  # one would carry into the sign
def test_the_bits_are_those_of_torch(codec: Codec, kind: str, numel: int, offset: int) -> None:
    with by_torch():
        check(codec, kind, numel, CPU, offset, mock.patch.object(kernels, "of", return_value=compiled))


@NEEDS_LIBRARY
@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from([*KINDS, "few", "zeros"]),
    numel=st.one_of(st.integers(1, 400), st.sampled_from([4000, 70_000])),
    fraction=st.sampled_from([1e-4, 0.01, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 99),
)
def test_the_largest_values_are_those_of_torch(kind: str, numel: int, fraction: float, seed: int) -> None:
    """Equal ones too: among a few different values, the first are sent."""
    values = values_of(kind, numel, seed)
    values = {"few": values.round(), "zeros": values.clamp_min(1.5) - 1.5}.get(kind, values)
    codec = TopK(fraction=fraction)
    found = codec.encode(values)
    with mock.patch.object(kernels, "on_cpu", return_value=False):
        assert torch.equal(found, codec.encode(values))


@NEEDS_LIBRARY
def test_a_sample_decides_where_it_does_not_mislead() -> None:
    values, out = values_of("plain", 100_000, 0), torch.empty(8000, dtype=torch.uint8)
    assert compiled.select(values, 1000, out)
    values[::2] = 0
    assert not compiled.select(values.zero_(), 1000, out), "all are equal, so all are candidates"


@NEEDS_LIBRARY
def test_a_message_of_another_length_is_refused() -> None:
    values, short = torch.ones(8), torch.zeros(11, dtype=torch.uint8)
    for codec in (Linear8(), Truncate16()):
        for method in (codec.decode_into, codec.add):
            with mock.patch.object(kernels, "of", return_value=compiled), pytest.raises(ValueError, match="11 bytes"):
                method(short, values)


@pytest.mark.parametrize(
    ("threads", "dtype", "stride", "is_compiled"),
    [
        (1, torch.float32, 1, True),
        (kernels.MOST_THREADS + 1, torch.float32, 1, False),
        (1, torch.float64, 1, False),
        (1, torch.float32, 2, False),
    ],
)
@NEEDS_LIBRARY
def test_compiled_kernels_are_for_float32_and_few_threads(
    threads: int, dtype: torch.dtype, stride: int, is_compiled: bool
) -> None:
    with mock.patch.object(torch, "get_num_threads", return_value=threads):
        assert (kernels.of(torch.ones(8, dtype=dtype)[::stride]) is compiled) == is_compiled


# -- compiling -------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def encoded(values: Tensor) -> Tensor:
    """Without a library there must be an answer too."""
    fresh = compiler.library.__wrapped__()
    with mock.patch.object(compiler, "library", return_value=fresh):
        return Linear8(group=4).encode(values)


def test_without_a_compiler_torch_encodes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of("plain", 30, 0)
    expected = Linear8(group=4).encode(values)
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    found = compiler.library.__wrapped__()
    assert (found.functions, found.message, found.fix) == (None, "no C compiler", "apt install gcc")
    assert torch.equal(encoded(values), expected) and not cache.exists()


def test_the_setting_turns_them_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_COMPILED_CODECS", "off")
    assert compiler.library.__wrapped__().functions is None and not cache.exists()
    monkeypatch.setenv("WORKBENCH_COMPILED_CODECS", "no")
    with pytest.raises(ConfigError, match=r"compiled_codecs = 'no'.*give on or off"):
        compiler.library.__wrapped__()


@NEEDS_LIBRARY
@pytest.mark.parametrize("fault", ["a file in the folder's place", "no such option", "not a library"])
def test_what_cannot_be_compiled_or_loaded_is_no_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "a file in the folder's place":  # root may write into a folder that is read-only
        cache.write_text("")
    elif fault == "no such option":
        monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-no-such-option"))
    else:
        cache.mkdir()
        monkeypatch.setattr(compiler, "folder", lambda: cache)
        monkeypatch.setattr(compiler, "_compile", lambda command, path: path.write_text("not a library"))
    with caplog.at_level("DEBUG", logger="workbench"):
        found = compiler.library.__wrapped__()
    assert found.functions is None and found.fix
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    values = values_of("plain", 30, 0)
    with by_torch():
        expected = Linear8(group=4).encode(values)
    assert torch.equal(encoded(values), expected)


@NEEDS_LIBRARY
def test_ranks_that_start_at_once_compile_once(cache: Path) -> None:
    found: list[compiler.Library] = []
    run = mock.Mock(side_effect=subprocess.run)
    with mock.patch.object(compiler.subprocess, "run", run):
        ranks = [threading.Thread(target=lambda: found.append(compiler.library.__wrapped__())) for _ in range(8)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert run.call_count == 1
    assert len(found) == 8 and len({one.message for one in found}) == 1 and all(one.functions for one in found)
    assert sorted(path.suffix for path in (cache / "workbench" / "compiled").iterdir()) == [".lock", ".so"]


@NEEDS_LIBRARY
def test_another_compiler_source_or_processor_is_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        compiler._digest([sys.executable]),
        compiler._digest([sys.executable, "-O0"]),
        compiler._digest(["/bin/sh"]),
    }
    with mock.patch.object(compiler.platform, "platform", return_value="another machine"):
        names.add(compiler._digest([sys.executable]))
    other = cache.parent / "other.c"
    other.write_text("int other;")
    monkeypatch.setattr(compiler, "SOURCE", other)
    names.add(compiler._digest([sys.executable]))
    assert len(names) == 5


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (compiler.Library(functions=None, message="no C compiler", fix="apt install gcc"), "missing"),
        (compiler.Library(functions=None, message="turned off by the setting compiled_codecs"), "ok"),
        (compiler.Library(functions=mock.Mock(), message="/cache/codecs.so"), "ok"),
    ],
)
def test_the_doctor_reports_them(found: compiler.Library, state: str) -> None:
    with mock.patch.object(compiler, "library", return_value=found):
        result = compiled_codecs()
    assert (result.state, result.fix) == (state, found.fix) and found.message in result.found
