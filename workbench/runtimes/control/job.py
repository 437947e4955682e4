"""The batch job of `workbench submit` that this process runs in: what its ranks and its program tell each other.

Both use files in the job's folder. The program (`clusters.slurm.batch_job`) and rank 0 run on the job's first node, so
rank 0 sees a change at once, also on a network file system.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from workbench.trace.files.atomic import write_atomic

JOB_VARIABLE = "WORKBENCH_JOB"  # the job's folder
RECORD_NAME, STOP_NAME = "cluster.json", "stop"


def in_job() -> bool:
    """Return True if this process runs in such a job."""
    return JOB_VARIABLE in os.environ


def record_run(folder: Path) -> None:
    """Tell the job which run it trains, so that it can stop the run before the time limit. Outside of a job: nothing."""
    if in_job():
        write_atomic(Path(os.environ[JOB_VARIABLE], RECORD_NAME), json.dumps({"run": str(folder.resolve())}))


def job_stops() -> bool:
    """Return True if the job's time limit is near: its `stop` file has content. False outside of a job."""
    with suppress(OSError, KeyError):
        return bool(Path(os.environ[JOB_VARIABLE], STOP_NAME).read_bytes())
    return False
