"""Code given to an engine, whose words are heard from the first on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipyparallel import AsyncResult


def execute_heard(client: Any, rank: int, code: str, hear: Callable[[dict[str, Any]], None]) -> Any:
    """What `client[rank].execute(code, silent=False, block=False)` returns.

    Args:
        hear: given each message of the engine's IOPub channel that belongs to it, once and in order, on the client's own thread. A view's
            `execute` gives an answer to which one can listen, but by then the engine may have said all, and nobody hears that any more.
    """
    identities, targets = client._build_targets(rank)
    how: dict[str, Any] = {
        "silent": False,
        "ident": identities[0],
        "metadata": {"label": None},
        "message_future_hook": lambda future: future.iopub_callbacks.append(hear),  # before it is sent
    }
    future = client.send_execute_request(client[rank]._socket, code, **how)
    return AsyncResult(client, future, fname="execute", targets=targets, owner=True)
