"""Runs code on an engine and forwards all its messages, from the first one on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipyparallel import AsyncResult


def execute_with_output(client: Any, rank: int, code: str, on_message: Callable[[dict[str, Any]], None]) -> Any:
    """Run code on an engine. Return what `client[rank].execute(code, silent=False, block=False)` returns.

    That method allows callbacks only after it has sent the code, so early messages could be lost.

    Args:
        client: the ipyparallel client.
        rank: number of the engine.
        code: the code.
        on_message: called with each IOPub message of this code, once and in order, on the client's own thread.
    """
    identities, targets = client._build_targets(rank)
    options: dict[str, Any] = {
        "silent": False,
        "ident": identities[0],
        "metadata": {"label": None},
        # Called before the code is sent.
        "message_future_hook": lambda future: future.iopub_callbacks.append(on_message),
    }
    future = client.send_execute_request(client[rank]._socket, code, **options)
    return AsyncResult(client, future, fname="execute", targets=targets, owner=True)
