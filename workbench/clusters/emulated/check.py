"""Measures the real rate and round trip time of an emulated network, between plain sockets.

Run as a script, this file is one end of a connection. The script imports nothing of the package.

    check.py serve ADDRESS                  prints its port, receives bytes and answers
    check.py ask ADDRESS PORT FIRST BYTES   sends FIRST bytes, then BYTES bytes; prints the seconds of the latter and of a round trip
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from workbench.clusters.emulated.network import EmulatedNetwork

ROUND_TRIPS = 30
MEASURE_S = 0.5  # time of one measurement's bytes at the nominal rate
START_S, START_TRIPS = 0.1, 12  # warm-up: TCP begins with ten frames a round trip and doubles them each time
PAYLOAD = 1448 / 1514  # share of TCP's payload in a full frame
TIMEOUT_S = 60.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One direction between two hosts.

    Attributes:
        source, destination: names of hosts.
        asked, found: bits per second of frames: the nominal rate of the slower of the two interfaces, and the
            measured rate.
        least_round_trip_s: twice the latency.
        round_trip_s: median time of a message of one byte and its answer.
    """

    source: str
    destination: str
    asked: float
    found: float
    least_round_trip_s: float
    round_trip_s: float


def measure(network: EmulatedNetwork, source: int, destination: int) -> Measured:
    """Measure from one host to another, on one TCP connection.

    Raises:
        LaunchError: the hosts do not reach each other.
    """
    from workbench.errors import LaunchError

    a, b = network.hosts[source], network.hosts[destination]
    asked = min(a.up, b.down)
    first_bytes = round((START_S + START_TRIPS * 2 * network.latency_s) * asked / 8)
    num_bytes = round((MEASURE_S + 2 * network.latency_s) * asked / 8)
    script = [sys.executable, "-I", "-S", __file__]
    with network.run(destination, [*script, "serve", b.address], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        command = [*script, "ask", b.address, port, str(first_bytes), str(num_bytes)]
        with network.run(source, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            try:
                output, errors = client.communicate(timeout=TIMEOUT_S + 100 * network.latency_s)
            except subprocess.TimeoutExpired:
                output, errors = "", f"it had not ended after {TIMEOUT_S:.0f} s"
            finally:
                client.kill()
                server.kill()
    if not output:
        reason = (errors.strip().splitlines() or ["it ended without an error message"])[-1]
        raise LaunchError(f"{a.name} does not reach {b.name}: {reason}")
    seconds, round_trip_s = json.loads(output)
    return Measured(
        source=a.name,
        destination=b.name,
        asked=asked,
        found=num_bytes * 8 / (seconds - round_trip_s) / PAYLOAD,
        least_round_trip_s=2 * network.latency_s,
        round_trip_s=round_trip_s,
    )


def measure_all(network: EmulatedNetwork) -> list[Measured]:
    """Measure from each host to the next, and from the last to the first: every interface in both directions."""
    count = len(network.hosts)
    pairs = [(host, (host + 1) % count) for host in range(count)] if count > 1 else []
    return [measure(network, *pair) for pair in pairs]


def serve(address: str) -> None:
    """Accept a connection. Receive and confirm the announced numbers of bytes, then return single bytes."""
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        buffer = bytearray(1 << 20)
        for announced in connection.recv(64).split(b","):
            left = int(announced)
            connection.sendall(b"!")
            while left and (got := connection.recv_into(buffer, min(left, len(buffer)))):
                left -= got
            connection.sendall(b"!")
        while byte := connection.recv(1):
            connection.sendall(byte)


def ask(address: str, port: str, first: str, num_bytes: str) -> None:
    """Connect, send, and print the measured seconds: see the top of this file."""
    with socket.create_connection((address, int(port)), timeout=TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{first},{num_bytes}".encode())
        seconds = 0.0
        for size in (int(first), int(num_bytes)):
            connection.recv(1)
            payload = bytes(size)
            sum(payload[::4096])  # touches every page, so that no page fault occurs during the measurement
            begin = time.perf_counter()
            connection.sendall(payload)
            connection.recv(1)
            seconds = time.perf_counter() - begin
        trips = []
        for _ in range(ROUND_TRIPS):
            begin = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            trips.append(time.perf_counter() - begin)
    print(json.dumps([seconds, statistics.median(trips)]))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        ask(*sys.argv[2:])
