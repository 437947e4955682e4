"""Whether a loop with a `Trainer` should stop, because its batch job is near the time limit."""

from __future__ import annotations

from workbench.runtimes.control.job import in_job, job_stops
from workbench.runtimes.user_loop.peers import translated_errors
from workbench.runtimes.user_loop.trainer import Trainer


def stop_requested(trainer: Trainer) -> bool:
    """Return True on all ranks if the job's time limit is near: then call `trainer.save`, and leave the loop.

    `workbench submit` asks for it `--warn` seconds before the limit. With `--requeue` the job starts again if the
    script then ends without an error. Outside of such a job the answer is False, and costs nothing.

    Every rank must call it, after the same step. It costs two small messages between ranks, so ask every few steps if
    steps are short. With servers, a rank may call it alone.

    Args:
        trainer: this rank's.

    Raises:
        PeerFailed: another rank failed.
        RankMismatch: another rank makes another call.

    Example:
        >>> from torch import nn, optim
        >>> from workbench.algorithms import PipeSGD
        >>> model = nn.Linear(3, 1)
        >>> with Trainer(model, optim.SGD(model.parameters()), PipeSGD()) as trainer:
        ...     for step in range(100):
        ...         if step % 10 == 9 and stop_requested(trainer):
        ...             trainer.save("checkpoints")
        ...             break
    """
    trainer._check_usable()
    if trainer._served or not in_job():
        return job_stops()
    with translated_errors(trainer._fail):
        trainer._wait_for_all("stop_requested")
        deadline = trainer._deadline("all ranks to ask whether to stop")
        return trainer._transport.gather_texts(str(job_stops()), deadline)[0] == str(True)
