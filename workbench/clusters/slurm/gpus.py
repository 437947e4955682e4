"""Whether a job that asks for no GPU seems to need some."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from workbench.clusters.slurm.queue import run_slurm
from workbench.clusters.slurm.request import Slurm
from workbench.config import value_of
from workbench.errors import LaunchError

ASKS = re.compile(r"-G|--gpus|--(gres|tres-per-\w+)=.*gpu")  # options of sbatch
NAMES_GPU = re.compile(r"(?<![a-z])(cuda|nccl)(?![a-z])", re.IGNORECASE)


def gpu_warning(slurm: Slurm, option: str, command: Sequence[str] = ()) -> str | None:
    """Return a warning if the job asks for no GPU but seems to need some; None if not, or with `gpus_per_rank=0`.

    Args:
        slurm: the job's resources.
        option: the option to use instead, without its value, such as "--gpus-per-rank ".
        command: what the job runs.
    """
    if slurm.gpus_per_rank is not None or any(map(ASKS.match, slurm.extra)):
        return None
    reason = _reason(slurm, command)
    if reason is None:
        return None
    return (
        f"the job asks for no GPU, so its ranks compute on CPUs, but {reason}. For one GPU a rank: {option}1. "
        f"For CPUs, without this warning: {option}0"
    )


def _reason(slurm: Slurm, command: Sequence[str]) -> str | None:
    for word in command:
        if NAMES_GPU.search(word):
            return f"its command names {word!r}"
    name = slurm.partition or value_of("slurm.partition")
    with suppress(LaunchError):  # no Slurm here, as with --dry-run
        rows = run_slurm("sinfo", "-h", "-o", "%P|%G", *(["-p", name] if name else [])).split()
        for partition, _, resources in (row.partition("|") for row in rows):
            if "gpu" in resources and (name or partition.endswith("*")):
                return f"nodes of partition {partition.rstrip('*')} have GPUs ({resources})"
    import torch

    return "PyTorch here is a build for CUDA" if torch.version.cuda else None
