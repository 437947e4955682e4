"""The notebook's end of the link to its ranks: requests that they answer while a cell runs, and what they say unasked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, final


@final
class Link:
    """Messages between a notebook and the ranks of one cluster; the ranks' end is `on_rank.RankLink`.

    Args:
        client: the cluster's ipyparallel client; engine numbers are ranks.
        on_message: called with a rank and a message that is no part of a cell's output: of the debugger, or printed by
            a widget's callback. Called on the client's own thread.
    """

    def __init__(self, client: Any, on_message: Callable[[int, dict[str, Any]], None]) -> None:
        self._client = client
        for rank in sorted(client.ids):
            hear = partial(on_message, rank)
            # Its future has no result and stays, and with it the callback.
            self._send(rank, "listen_request", {}, hook=lambda future, hear=hear: future.iopub_callbacks.append(hear))

    async def debug(self, rank: int, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return a rank's answer to a request of the debugger's protocol.

        Raises:
            TimeoutError: the rank does not answer.
        """
        future = self._send(rank, "debug_request", request)
        answer = await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        return dict(answer["content"])

    async def call(self, rank: int, function: Callable[[], Any], timeout_s: float) -> Any:
        """Return what a function returns on a rank that runs no cell.

        Raises:
            TimeoutError: the rank does not return.
        """
        return await asyncio.wait_for(asyncio.wrap_future(self.send_call(rank, function)), timeout_s)

    def send_call(self, rank: int, function: Callable[[], Any]) -> Any:
        """Call a function on a rank before its next cell. Return the result's future at once."""
        return self._client[rank].apply_async(function)

    def answer(self, rank: int, number: int, answer: dict[str, Any]) -> None:
        """Answer a question of a rank."""
        self._send(rank, "answer_request", {"number": number, **answer})

    def _send(self, rank: int, kind: str, content: dict[str, Any], hook: Any = None) -> Any:
        (identity,), _ = self._client._build_targets(rank)
        return self._client._send(
            self._client._control_stream, kind, content=content, ident=identity, message_future_hook=hook
        )
