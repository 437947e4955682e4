"""A rank that pushes what was not agreed on, on gloo and MPI: the server says whose message is wrong and how, and nobody hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.train import make_job, on_real_runtimes
from workbench.algorithms import AsyncSGD
from workbench.errors import PeerFailed, RankMismatch
from workbench.program import Algorithm
from workbench.runtimes.rank.main import Job, run_rank
from workbench.runtimes.transport.base import Handle
from workbench.runtimes.transport.framing import header
from workbench.runtimes.transport.mailbox import Mailbox, with_header
from workbench.settings import Settings
from workbench.trace.run import Run

HOW = Settings(steps=8, batch_size=2, timeout_s=30)
CULPRIT = 1


def misbehave(job: Job, how: str, number: int) -> dict[str, Any]:
    """On a rank: train, and let that push go out otherwise."""
    plain, count = Mailbox.send, 0

    def send(self: Mailbox, to: int, flat: Tensor, tag: int, stamp: int) -> Handle:
        nonlocal count
        count += 1
        if count != number:
            return plain(self, to, flat, tag, stamp)
        transport = self._transport
        match how:
            case "longer":
                return plain(self, to, torch.cat([flat, flat]), tag, stamp)
            case "shorter":
                return plain(self, to, flat[:-1], tag, stamp)
            case "of integers":
                return plain(self, to, flat.view(torch.int64), tag, stamp)
            case "of a version to come":
                return plain(self, to, flat, tag, stamp + 4000)
            case "damaged":
                return transport.start_send(to, with_header(flat, 0x0123456789ABCDEF), tag)
            case "of more than announced":
                message = with_header(flat, header(stamp))
                return transport.start_send(to, torch.cat([message, message]), tag)
            case "cut short":
                return transport.start_send(to, with_header(flat, header(stamp))[:-16].clone(), tag)
            case _:
                raise ValueError(how)

    Mailbox.send = send  # type: ignore[method-assign]
    try:
        return run_rank(job)
    finally:
        Mailbox.send = plain  # type: ignore[method-assign]


def outcomes(runtime: str, algorithm: Algorithm, how: str, number: int) -> tuple[list[Any], Job]:
    job = make_job(runtime, 3, algorithm, tiny.problem(), HOW)
    calls = [(misbehave, (job, how, number)) if rank == CULPRIT else (run_rank, (job,)) for rank in range(3)]
    return shared_pool(runtime, 3).outcomes(calls), job  # type: ignore[arg-type]


MPI_TELLS = [
    ("of more than announced", "rank 1 sent with tag 0 more than it had announced"),
    ("cut short", r"from rank 1 to rank 0 .*: \d+ bytes came, \d+ were announced"),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("how", "words"), MPI_TELLS)
def test_mpi_tells_how_long_a_message_was(how: str, words: str) -> None:
    """Behind a good header, from code that goes around the announcement; gloo would end the process, or not tell."""
    found, _ = outcomes("mpi", AsyncSGD(), how, 4)
    with pytest.raises(RankMismatch, match=words):
        raise found[0].error or AssertionError("nothing was said")


@on_real_runtimes
@pytest.mark.parametrize(
    ("how", "number", "words"),
    [
        (
            "longer",
            1,
            r"messages from rank 1 to rank 0 with tag 0: it announces \d+ bytes of torch.float64, and \d+ of",
        ),
        ("longer", 4, "messages from rank 1 to rank 0 with tag 0: it announces"),
        ("shorter", 4, "messages from rank 1 to rank 0 with tag 0: it announces"),
        ("of integers", 4, "of torch.int64, and .* of torch.float64 are expected"),
        ("damaged", 4, r"messages from rank 1 to rank 0 with tag 0: 0x0123456789abcdef is no header"),
        ("of a version to come", 4, "rank 1 pushed a gradient of shard 0 computed at version 10"),
    ],
)
def test_the_server_names_who_sent_what_was_not_agreed_on(runtime: str, how: str, number: int, words: str) -> None:
    begin = time.monotonic()
    found, job = outcomes(runtime, AsyncSGD(), how, number)
    assert time.monotonic() - begin < HOW.timeout_s / 2, "found when it came, and not by a deadline"
    with pytest.raises(RankMismatch, match=words):
        raise found[0].error or AssertionError("nothing was said")
    for rank in (1, 2):
        assert isinstance(found[rank].error, PeerFailed) and "rank 0 failed" in str(found[rank].error)
    run = Run.load(job.folder)
    assert run.info["status"] == "failed" and "rank 1" in run.info["error"]
