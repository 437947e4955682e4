"""What must be true after each run in this process, with any algorithm: nothing is left over.

`validated` checks a simulation, a simulation of one program for all, and a run of the reference runtime when it
returns, as dask.distributed validates the state of its scheduler after each test. `tests/conftest.py` uses it for all
tests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from workbench.gradients import Gradient
from workbench.ops import State, Ticket
from workbench.program import leaves
from workbench.replica.replica import Replica
from workbench.runtimes.reference import ReferenceRuntime
from workbench.runtimes.simulator.fabric import Fabric, items_of
from workbench.runtimes.simulator.lockstep.lockstep import Lockstep
from workbench.runtimes.simulator.simulation import Simulation
from workbench.runtimes.simulator.worker import SimWorker
from workbench.runtimes.transport.mailbox import STAMP_BYTES


def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate each run of this process from here on."""
    for runtime, validate in ((Simulation, simulation), (Lockstep, lockstep), (ReferenceRuntime, reference)):
        monkeypatch.setattr(runtime, "run", _then(runtime.run, validate))


def _then(run: Callable[..., Any], validate: Callable[[Any], list[str]]) -> Callable[..., Any]:
    def run_and_validate(self: Any, *args: Any, **options: Any) -> Any:
        found = run(self, *args, **options)
        left = validate(self)
        assert not left, "the run has ended, and left over:\n" + "\n".join(left)
        return found

    return run_and_validate


def simulation(run: Simulation) -> list[str]:
    """What a simulation left, a line each. Background work of a run that was stopped may be abandoned."""
    cluster, stopped = run.cluster, run._stopped
    left = [f"event at {event[0]} s" for event in run.clock.events]
    left += [f"an error that nobody has raised: {error!r}" for error in cluster.errors]
    left += [
        f"rank {process.worker.rank} waits for {process.pending}"
        for process in cluster.processes
        if not (stopped and process.free)
    ]
    left += fabric(run.fabric, stopped=stopped)
    for worker in run.workers:
        left += times(worker, run.clock.now_s)
        if isinstance(worker.replica, Replica) and worker.rank not in run.fabric.gone:
            left += buffers(worker.rank, worker.replica, worker.last_end.state if stopped else None)
    if all(worker.recorder._traced == math.inf for worker in run.workers) and not stopped:
        left += messages(run.workers, set(run.fabric.gone))
    return left


def fabric(network: Fabric, *, stopped: bool) -> list[str]:
    """Messages and collectives that have not ended."""
    left = [f"ranks {[arrival[0] for _, arrival in meeting]} in {key}" for key, meeting in network._meetings.items()]
    left += [f"a message with priority {item[0]} that has not left" for item in network._urgent]
    if network._fair is not None:
        left += [f"a message of ranks {pair} on its way" for pair in network._fair._left]
        left += [
            f"a message of ranks {pair} that has not left"
            for pair, waiting in network._fair._waiting.items()
            if waiting
        ]
    if stopped:
        return left
    messages = [message for entry in network._messages.values() for message in items_of(entry)]
    messages += [message for queue in network._any_source.values() for message in queue.messages]
    left += [f"a message of rank {message[0]}, {message[1]} bytes, that nobody has received" for message in messages]
    left += [
        f"a receive of rank {envelope[3]} from rank {envelope[2]}, tag {envelope[1]}"
        for envelope, entry in network._receives.items()
        for _ in items_of(entry)
    ]
    left += [
        f"a receive of rank {target[2]}, tag {target[1]}"
        for target, queue in network._any_source.items()
        for _ in queue.receives
    ]
    return left


def times(worker: SimWorker, now_s: float) -> Iterator[str]:
    """Spans and rows outside of the run, or that end before they begin, or in another order than their times."""
    for kind, _, start_s, end_s, *_ in worker.recorder.spans:
        if not 0.0 <= start_s <= end_s <= now_s:
            yield f"rank {worker.rank}: {kind} from {start_s} to {end_s} s in a run of {now_s} s"
    seconds = [row["seconds"] for row in worker.recorder.rows if "evaluation" not in row]
    if seconds != sorted(seconds):
        yield f"rank {worker.rank}: steps end at {seconds}"


def buffers(rank: int, replica: Replica, state: State | None) -> list[str]:
    """Gradients that were neither applied nor discarded, and are not in the state of the last step."""
    kept = {id(owner_of(value).flat) for value in map(value_of, leaves(state)) if isinstance(value, Gradient)}
    left = len(replica.pool._out - kept)
    return [f"rank {rank}: {left} gradients that were neither applied nor discarded"] if left else []


def value_of(item: Any) -> Any:
    """The value of a ticket, or what else a state holds."""
    if isinstance(item, Ticket):
        return item.value if item.done else getattr(item.request, "value", None)
    return item


def owner_of(gradient: Gradient) -> Gradient:
    """The whole gradient of a bucket."""
    return gradient if gradient.owner is None else gradient.owner


def messages(workers: Iterable[SimWorker], gone: set[int]) -> Iterator[str]:
    """Messages and bytes that were sent and not received, or received and not sent.

    What is sent to a rank that has left is lost.
    """
    sent, received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    bytes_sent, bytes_received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for worker in workers:
        for kind, _, _, _, _, _, num_bytes, peer in worker.recorder.spans:
            if kind == "send":
                sent[worker.rank, peer] += 1
                bytes_sent[worker.rank, peer] += num_bytes
            elif kind == "recv":
                received[peer, worker.rank] += 1
                bytes_received[peer, worker.rank] += num_bytes
    for pair in sent | received:
        stamps, odd = divmod(bytes_sent[pair] - bytes_received[pair], STAMP_BYTES)
        equal = sent[pair] == received[pair] and not odd and 0 <= stamps <= sent[pair]
        if not equal and not gone & set(pair):
            yield (
                f"rank {pair[0]} sent {sent[pair]} messages, {bytes_sent[pair]} bytes, to rank {pair[1]}, "
                f"which received {received[pair]}, {bytes_received[pair]} bytes"
            )


def lockstep(run: Lockstep) -> list[str]:
    """What a simulation of one program for all left."""
    stopped, replica = run._stopped, run.group.replica
    left = [f"a collective at {meeting[0]} s" for meeting in run._meetings]
    if stopped is None:
        left += [f"work on lane {number}" for number, lane in run._lanes.items() if lane.busy or lane.line]
    state = None if stopped is None else stopped.state
    return left + (buffers(0, replica, state) if isinstance(replica, Replica) else [])


def reference(run: ReferenceRuntime) -> list[str]:
    """What a run on the reference runtime left."""
    if run.stop_after is not None:
        return []
    left = [f"a message of rank {sent[2]} to rank {sent[3]}" for sent in run.sends]
    left += [f"a receive of rank {wanted[3]} from rank {wanted[2]}" for wanted in run.receives]
    left += [f"ranks {sorted(arrived)} in {key}" for key, arrived in run.joins.items()]
    left += [f"work on lane {lane} of rank {rank}" for (rank, lane), line in run.lanes.items() if line]
    left += [
        f"rank {rank}: {len(here.out)} gradients that were neither applied nor discarded"
        for rank, here in enumerate(run.ranks)
        if here.out
    ]
    return left
