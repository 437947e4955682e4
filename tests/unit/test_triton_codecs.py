"""GPU kernels of codecs, without a GPU: their bits in Triton's interpreter, their compiled form, and the calls that use them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from workbench import bench, codecs
from workbench.bench import codecs as measured
from workbench.codecs import Linear8, Truncate16, gpu, kernels

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="no Triton, which comes with torch's builds for CUDA: pip install triton"
)


@NEEDS_TRITON
@pytest.mark.timeout(300)  # six seconds where nothing else runs: 300 kernels
def test_in_the_interpreter_kernels_give_the_bits_of_a_processor() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/triton_interpreted.py"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout


TYPES = {
    "values": "*fp32",
    "out": "*fp32",
    "scales": "*fp32",
    "levels": "*i8",
    "wire": "*i8",
    "halves": "*i16",
    "added": "*i16",
}
NUMBERS = ("numel", "group", "groups", "chunks")


def translated(name: str, **constants: Any) -> str:
    """A kernel as PTX for compute capability 9.0, its other arguments multiples of 16; the assembler that comes with Triton took it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from workbench.codecs import triton_kernels

    kernel = getattr(triton_kernels, name)
    kinds = {**TYPES, **dict.fromkeys(NUMBERS, "i32"), **dict.fromkeys(constants, "constexpr")}
    signature = {argument: kinds[argument] for argument in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind != "constexpr"
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(triton_kernels.LAUNCH_OPTIONS))
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


@NEEDS_TRITON
def test_what_kernels_are_translated_to_fuses_no_multiply_add_and_keeps_subnormals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The interpreter could not tell. A message's one group; 3 seconds, since each is compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    whole = translated("_quantise_whole", SUM=True, ROWS=4, COLUMNS=1024, chunks=1)
    parts = translated("_quantise_parts", SUM=True, ROWS=1, COLUMNS=4096, groups=1)
    added = translated("_restore", ADD=True, ROWS=4, COLUMNS=1024, chunks=1)
    halves = translated("_halve", NEAREST=True, SUM=True, BLOCK=4096)
    for ptx in (whole, parts, added, halves):
        assert "add.rn.f32" in ptx and "fma" not in ptx and "ftz" not in ptx
        assert "ld.global.v4.b32" in ptx, "16 bytes a thread at a time"
    assert all("div.rn.f32" in ptx and "div.full" not in ptx for ptx in (whole, parts))


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "contiguous", "given"),
    [
        (True, torch.float32, True, True),
        (True, torch.float64, True, False),
        (True, torch.float32, False, False),
    ],
)
def test_kernels_are_for_float32_side_by_side_on_a_gpu(
    is_cuda: bool, dtype: torch.dtype, contiguous: bool, given: bool
) -> None:
    values: Any = SimpleNamespace(
        is_cuda=is_cuda, dtype=dtype, is_contiguous=lambda: contiguous, device=torch.device("cuda", 3)
    )
    with mock.patch.object(gpu, "tried") as tried:
        found = kernels.of(values)
    assert (found is tried.return_value) == given and tried.call_count == given


def made_up(first: float) -> ModuleType:
    """Kernels of which one was tried: it writes this number, or fails."""

    def halve(values: torch.Tensor, out: torch.Tensor, **_: object) -> None:
        if first < 0:
            raise RuntimeError("no C compiler")
        out.view(torch.bfloat16)[0] = first

    module = ModuleType("triton_kernels")
    module.halve = halve  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("first", "installed", "told"),
    [(1, True, ""), (1, False, ""), (-1, True, "no C compiler"), (2, True, "1 was encoded as 2")],
)
def test_kernels_that_do_not_work_are_told_of_and_not_given(
    first: float, installed: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: installed or None)
    module = made_up(first)
    monkeypatch.setattr(codecs, "triton_kernels", module, raising=False)
    monkeypatch.setitem(sys.modules, "workbench.codecs.triton_kernels", module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gpu.tried.__wrapped__(torch.device("cpu"))
    assert found is (module if installed and not told else None)
    assert len(caught) == bool(told) and all(
        told in str(each.message) and "C compiler" in str(each.message) for each in caught
    )


def test_on_a_gpu_a_codecs_work_goes_to_its_kernels() -> None:
    """Stochastic levels are torch's, for their noise is."""
    values, found = torch.ones(8), mock.Mock()
    with mock.patch.object(kernels, "of", return_value=found):
        for codec in (Truncate16(), Linear8(group=4), Linear8(rounding="stochastic")):
            wire = torch.zeros(codec.wire_bytes(8), dtype=torch.uint8)
            codec.encode_into(values, wire)
            codec.decode_into(wire, values)
            codec.add(wire, values)
            codec.encode_sum(wire, values, wire.clone())
    asked = [call[0] for call in found.mock_calls]
    assert asked == [
        "halve",
        "widen",
        "widen",
        "halve",
        "quantise",
        "restore",
        "restore",
        "quantise",
        "restore",
        "restore",
        "restore",
    ]


def test_the_benchmark_measures_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "synchronize", waited)
    monkeypatch.setattr(measured, "GPU", torch.device("cpu"))
    monkeypatch.setattr(measured, "GPU_SIZES_MB", {0.01: 3, 0.02: 2})
    monkeypatch.setattr(measured, "GPU_ASKED_MB", 0.02)
    rows = list(bench.run("codecs", bench.BenchOptions(rounds=2, only=("a card",))))
    assert len(rows) == 2 * 4 * 4 and {row.case.partition(", GPU: ")[2] for row in rows} == {"a card"}
    assert {(row.case.split()[0], row.above) for row in rows if row.what != "decode and sum"} == {
        ("0.01", None),
        ("0.02", 0.8),
    }
    assert {row.above for row in rows if row.what == "decode and sum"} == {None}
    assert waited.call_count == 2 * 4 * 5 * 4, "once a way and round, two rounds of them warm: not once a step"
