"""All checks, in order."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.doctor import machine, ranks, software
from workbench.doctor.check_result import CheckResult


def run_checks(*, start: bool = True, timeout_s: float = 60.0) -> Iterator[CheckResult]:
    """Run all checks. Yield each finding at once.

    Args:
        start: also start ranks and an emulated network; this takes about ten seconds.
        timeout_s: limit for ranks to find each other, in seconds.
    """
    yield from software.packages()
    devices = None
    if start:
        found, devices = ranks.torch_ranks(timeout_s)
        yield from found
        yield from ranks.mpi_ranks(timeout_s)
    yield machine.gpu(devices)
    yield from machine.addresses()
    yield from machine.limits()
    yield machine.store()
    yield software.compiled_codecs()
    yield from software.kernels()
    yield software.browser()
    yield machine.slurm()
    yield from machine.schedulers()
    if start:
        yield machine.emulation()
