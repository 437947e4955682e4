"""Messages of unexpected length or content: the error names their sender, and a server stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.unit.hostile import FEW, OFTEN, calm
from workbench import ops
from workbench.algorithms import AsyncSGD, BackupSGD, DelayCompensatedSGD, SoftsyncSGD, StaleSynchronousSGD
from workbench.algorithms.parameter_server import NO_GRADIENT, ServerAlgorithm, stamp_of
from workbench.errors import RankMismatch
from workbench.gradients import Gradient, build_layout
from workbench.program import Context
from workbench.runtimes.transport.base import Deadline, Handle
from workbench.runtimes.transport.framing import HEADER_BYTES, STAMP, Channel
from workbench.runtimes.transport.mailbox import AnySourceRecv, Mailbox, StampedHandle

TAG, SENDER, RECEIVER = 3, 1, 0
NUMEL = 5
BYTES = HEADER_BYTES + 8 * NUMEL


@final
class Posted(Handle):
    """A receive that was posted."""

    def __init__(self, source: int, flat: Tensor) -> None:
        self.started_s, self.source, self.flat = 0.0, source, flat

    def poll(self) -> bool:
        return self.finished_s is not None

    def wait(self, deadline: Deadline) -> None:
        assert self.poll(), "nothing else happens while it waits"


@final
class Wire:
    """A rank's end of a library, in one process: `sent` has its messages, and `arrive` delivers any message of a peer."""

    num_workers, members, device = 3, None, torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: list[Tensor] = []
        self.posted: list[Posted] = []
        self.most_bytes = 0

    def start_send(self, to: int, flat: Tensor, tag: int) -> Handle:
        assert (to, tag) == (RECEIVER, TAG)
        self.sent.append(flat.clone())
        handle = Posted(to, flat)
        handle.finished_s = 0.0
        return handle

    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        assert tag == TAG
        self.posted.append(Posted(source, flat))
        self.most_bytes = max(self.most_bytes, sum(one.flat.nbytes for one in self.posted))
        return self.posted[-1]

    def arrive(self, message: Tensor) -> None:
        """As gloo: into the oldest receive; the end of the process where it is longer."""
        posted = self.posted.pop(0)
        assert message.nbytes <= posted.flat.nbytes, "gloo would abort"
        posted.flat[: message.nbytes].copy_(message)
        posted.source, posted.finished_s = SENDER, 0.0


def sent(lengths: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Messages, and their announcements, as a rank puts them on the wire; of message i the stamp is 10 i and the values are i."""
    wire = Wire(SENDER)
    post = Mailbox(wire)  # type: ignore[arg-type]  # all of a transport that it needs
    for number, length in enumerate(lengths):
        assert post.send(RECEIVER, torch.full((length,), number, dtype=dtype), TAG, 10 * number).poll()
    return wire.sent


def heard(
    messages: Sequence[Tensor], source: int = ops.ANY, found: list[tuple[int, list[float]]] | None = None
) -> tuple[list[tuple[int, list[float]]], Wire]:
    """(stamp, values) of what a server that expects `NUMEL` numbers takes of them, also in `found`, and the receiving end."""
    wire = Wire(RECEIVER)
    post, left = Mailbox(wire), list(messages)  # type: ignore[arg-type]  # as above
    found = [] if found is None else found
    while True:
        flat = torch.zeros(BYTES, dtype=torch.uint8)
        handle: Any = (
            AnySourceRecv(post, RECEIVER, flat, TAG, others=True, dtype=torch.float64)
            if source == ops.ANY
            else StampedHandle(post, source, flat, TAG, torch.float64)
        )
        while not handle.poll():
            if not left:
                return found, wire
            wire.arrive(left.pop(0))
        found.append((handle.stamp, handle.flat[HEADER_BYTES:].view(torch.float64).tolist()))


def told(count: int) -> list[tuple[int, list[float]]]:
    return [(10 * number, [float(number)] * NUMEL) for number in range(count)]


@pytest.mark.parametrize("source", [ops.ANY, SENDER])
def test_what_was_agreed_on_comes_with_one_announcement(source: int) -> None:
    messages = sent([NUMEL] * 600)
    assert [message.nbytes for message in messages] == [HEADER_BYTES, *[BYTES] * 600]
    assert heard(messages, source)[0] == told(600)


@pytest.mark.parametrize("source", [ops.ANY, SENDER])
@pytest.mark.parametrize(
    ("length", "num_bytes"), [(10**6, 8 * 10**6 + 8), (NUMEL + 1, BYTES + 8), (NUMEL - 1, BYTES - 8), (0, 8)]
)
def test_another_length_is_refused_by_its_announcement(source: int, length: int, num_bytes: int) -> None:
    """Before a byte of it comes: the longer one would abort the process."""
    for before in (0, 3):
        messages = sent([NUMEL] * before + [length])
        with pytest.raises(
            RankMismatch, match=f"from rank 1 to rank 0 with tag 3: it announces {num_bytes} bytes.* and {BYTES} of"
        ):
            heard(messages, source)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(RankMismatch, match=r"48 bytes of torch.int64, and 48 of torch.float64"):
        heard(sent([NUMEL], torch.int64))


def test_a_message_without_announcement_is_refused() -> None:
    with pytest.raises(RankMismatch, match="that was not announced"):
        heard(sent([NUMEL] * 2)[1:])


def test_zeros_are_no_message() -> None:
    """What memory holds when a peer that has left sent nothing."""
    channel = Channel(SENDER, RECEIVER, TAG)
    with pytest.raises(RankMismatch, match="no header"):
        channel.accept(0, BYTES, torch.float64)


@OFTEN
@given(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.sampled_from([None, HEADER_BYTES, BYTES, 17]))
def test_a_header_of_noise(noise: int, announced: bool, received_bytes: int | None) -> None:
    channel = Channel(SENDER, RECEIVER, TAG)
    if announced:
        channel.announcement(BYTES, torch.float64)
    with calm("headers"):
        stamp = channel.accept(noise, BYTES, torch.float64, received_bytes)
        assert stamp is None or (announced and stamp == noise & STAMP and received_bytes in (None, BYTES))


# ---------------------------------------------------------------- a server and what is pushed to it

ALGORITHMS = [
    AsyncSGD(),
    AsyncSGD(cutoff=2),
    StaleSynchronousSGD(bound=1),
    SoftsyncSGD(splits=2),
    DelayCompensatedSGD(),
    BackupSGD(backups=1),
]
WORKERS, STEPS = 3, 4
LAYOUT = build_layout(nn.ParameterList([nn.Parameter(torch.zeros(4))]).named_parameters(), None, 1)


@final
class Served:
    """A server's program, given pushes one after the other; `version` is how many updates it made, `replies` what it sent."""

    def __init__(self, algorithm: ServerAlgorithm) -> None:
        self.version, self.replies = 0, list[tuple[int, int]]()
        ctx = Context(0, WORKERS, num_steps=STEPS, layout=LAYOUT)
        self._program, self._waiting = algorithm.serve(ctx, 0), True
        self._now, self._any = 0.0, False
        self._go(None)

    def _go(self, answer: Any) -> None:
        """On to the next push that it waits for, or to its end."""
        while True:
            try:
                request = self._program.send(answer)
            except StopIteration:
                self._waiting = False
                return
            match request:
                case ops.Recv():
                    self._any = False
                    return
                case ops.WaitAny():
                    self._any = True
                    return
                case ops.PackParameters():
                    answer = Gradient(torch.ones(LAYOUT.numel), LAYOUT, -1, self.version, 0)
                case ops.Apply(gradient):
                    assert 0 <= gradient.version <= self.version
                    self.version, answer = self.version + 1, None
                case ops.Start(ops.Send(to, _, _, stamp)):
                    self.replies.append((to, stamp))
                    answer = ops.Ticket.completed(None)
                case ops.Start(ops.Recv()):
                    answer = ops.Ticket(0, ops.Barrier())
                case ops.Local(action=action):
                    answer = action()
                case ops.Now():
                    self._now += 1.0
                    answer = self._now
                case ops.Wait(ticket):
                    answer = ticket.value
                case _:
                    raise TypeError(request)

    def push(self, source: int, stamp: int) -> bool:
        """Whether it still receives."""
        if self._waiting:
            message = ops.Message(source, torch.ones(LAYOUT.numel), stamp)
            self._go((0, message) if self._any else message)
        return self._waiting


@pytest.mark.parametrize(
    ("source", "stamp", "words"),
    [
        (1, 4 * 7, "rank 1 pushed a gradient of shard 0 computed at version 7, but the newest is 0"),
        (2, 2**40 - 1, "rank 2 .* version 274877906943"),
        (7, 2, "rank 7 .* has no worker"),
        (7, 0, "rank 7 .* has no worker"),
        (-1, 0, "rank -1 .* has no worker"),
    ],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_a_push_that_no_worker_can_have_sent_is_refused(
    algorithm: ServerAlgorithm, source: int, stamp: int, words: str
) -> None:
    server = Served(algorithm)
    with pytest.raises(RankMismatch, match=words):
        server.push(source, stamp)
    assert (server.version, server.replies) == (0, [])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_a_pull_is_answered_with_the_present_version_and_changes_nothing(algorithm: ServerAlgorithm) -> None:
    server, plain = Served(algorithm), Served(algorithm)
    for stamp in (0, 0):
        for source in range(WORKERS):
            server.push(source, stamp)
            plain.push(source, stamp)
        before = len(server.replies)
        server.push(1, NO_GRADIENT)
        assert server.replies[before:] == [(1, stamp_of(server.version))]
        del server.replies[before]
    assert (server.version, server.replies) == (plain.version, plain.replies)


@pytest.mark.parametrize("algorithm", ALGORITHMS[:4], ids=lambda algorithm: type(algorithm).__name__)
def test_a_push_behind_the_last_is_refused(algorithm: ServerAlgorithm) -> None:
    server = Served(algorithm)
    server.push(1, 1)
    with pytest.raises(RankMismatch, match="rank 1 pushed a gradient of shard 0 after its last one"):
        server.push(1, 1)


PUSHES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, WORKERS - 1), st.integers(0, 8)),  # nearly what a worker sends
        st.tuples(st.integers(-2, 500), st.one_of(st.integers(0, 40), st.integers(0, 2**40 - 1))),
    ),
    max_size=20,
)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
@FEW
@given(PUSHES)
def test_pushes(algorithm: ServerAlgorithm, pushes: list[tuple[int, int]]) -> None:
    """A server takes them or refuses them, and answers workers alone, each at most once a push."""
    with calm("pushes"):
        server = Served(algorithm)
        for count, (source, stamp) in enumerate(pushes, 1):
            if not server.push(source, stamp):
                break
            assert server.version <= count
            assert all(0 <= to < WORKERS for to, _ in server.replies) and len(server.replies) <= count
