"""Forwards connections from emulated hosts to ports of this machine's loopback, so that engines reach the controller.

The hosts have no route out of their network. So a process on each host listens on the host's loopback at the same
ports and passes the listening sockets to this process. Each connection is then joined to a connection to the real
port. This traffic does not pass the emulated interfaces, so it does not use their rate.

Run as a script, this file is the process on a host: relay.py DESCRIPTOR PORT...
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from workbench.clusters.emulated.network import EmulatedNetwork

LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 1 << 18


@final
class Relay:
    """Makes ports of this machine's loopback reachable on every host's loopback. It works in one event loop."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, network: EmulatedNetwork, ports: Iterable[int]) -> None:
        """Listen on all hosts.

        Raises:
            LaunchError: a host cannot listen.
        """
        wanted = sorted(set(ports))
        for host in network.hosts:
            for port, listener in zip(
                wanted, await asyncio.to_thread(_listeners, network, host.name, wanted), strict=True
            ):
                self._servers.append(await asyncio.start_server(self._joined(port), sock=listener))

    async def close(self) -> None:
        """Close listeners and connections."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets aborted connections close their sockets

    def _joined(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            ends = [writer]
            try:
                there, here = await asyncio.open_connection(LOOPBACK, port)
                ends.append(here)
                await asyncio.gather(_copy(reader, here), _copy(there, writer))
            except (OSError, asyncio.CancelledError):  # one end has closed, or the relay closes
                pass
            finally:
                for end in ends:
                    end.transport.abort()

        return join


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _listeners(network: EmulatedNetwork, host: str, ports: list[int]) -> list[socket.socket]:
    """Sockets that listen on these ports of a host's loopback."""
    from workbench.errors import LaunchError

    here, there = socket.socketpair()
    with here, there:
        command = [sys.executable, "-I", "-S", __file__, str(there.fileno()), *map(str, ports)]
        with network.run(host, command, pass_fds=[there.fileno()]) as process:
            there.close()
            _, fds, _, _ = socket.recv_fds(here, 1, len(ports))
        if process.returncode != 0 or len(fds) != len(ports):
            raise LaunchError(f"{host} cannot listen at ports {ports} of its loopback")
    return [socket.socket(fileno=fd) for fd in fds]


def listen(descriptor: str, *ports: str) -> None:
    """On a host: make the sockets and pass them to the relay."""
    listeners = [socket.create_server((LOOPBACK, int(port))) for port in ports]
    with socket.socket(fileno=int(descriptor)) as to:
        socket.send_fds(to, [b"!"], [listener.fileno() for listener in listeners])


if __name__ == "__main__":
    listen(*sys.argv[1:])
