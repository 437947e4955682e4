"""A switch in user space that delays every frame: it gives an emulated network its latency.

    switch.py SECONDS MAC...     interface `portk` of this process's network namespace leads to MAC number k

Each frame is read from its port together with the kernel's time of arrival. It is sent to the port of its destination
SECONDS after that time. So a late wake-up of this process has no effect if it is late by less than SECONDS.
Frames travel whole, before they are cut to the MTU. A frame is dropped if the queue of its port is full.

It imports nothing of the package, so it is small and starts quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from typing import NoReturn

EVERY_PROTOCOL = 0x0003
PACKET, PACKET_HEADER, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_TIMESTAMPNS, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 35, 32, 33
SET_TIMER_SLACK = 29
PRIORITY = -15
HEADER_BYTES = 10  # of virtio_net, before each frame: the place of its checksum, and how to cut it
LARGEST = HEADER_BYTES + 14 + 65536
QUEUE_BYTES = 16 << 20
BATCH = 64  # frames read from one port before the other ports' turn
NEEDS_CHECKSUM = b"\0", b"\1"  # the only flag with the same meaning for received and sent frames
BROADCAST = b"\xff" * 6


def open_port(index: int) -> socket.socket:
    """Open a socket for raw frames of an interface, with their times of arrival."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    port.setsockopt(PACKET, PACKET_HEADER, 1)
    port.setsockopt(PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    for option, force in ((socket.SO_RCVBUF, SO_RCVBUFFORCE), (socket.SO_SNDBUF, SO_SNDBUFFORCE)):
        try:
            port.setsockopt(socket.SOL_SOCKET, force, QUEUE_BYTES)
        except OSError:  # only root may exceed net.core.rmem_max and wmem_max
            port.setsockopt(socket.SOL_SOCKET, option, QUEUE_BYTES)
    port.bind((f"port{index}", 0))
    port.setblocking(False)
    return port


class Switch:
    """Ports, the port of each address, and the delayed frames, in the order of their times."""

    def __init__(self, latency_s: float, addresses: list[bytes]) -> None:
        self._latency_ns = round(latency_s * 1e9)
        self._ports = [open_port(index) for index in range(len(addresses))]
        self._where = {address: [port] for address, port in zip(addresses, self._ports, strict=True)}
        self._waiting: deque[tuple[int, bytes, socket.socket]] = deque()

    def receive(self, port: socket.socket) -> None:
        """Read up to BATCH frames from a port."""
        others = [other for other in self._ports if other is not port]
        for _ in range(BATCH):
            try:
                frame, ancillary, _, _ = port.recvmsg(LARGEST, 64)
            except OSError:  # no more frames, or the port's host has ended
                return
            seconds, nanoseconds = struct.unpack("=qq", ancillary[0][2][:16])
            # Wrong if the system time was set since the arrival: hence the limits in the next line.
            waited_ns = time.time_ns() - (seconds * 1_000_000_000 + nanoseconds)
            due = time.monotonic_ns() + self._latency_ns - max(0, min(waited_ns, self._latency_ns))
            to = frame[HEADER_BYTES : HEADER_BYTES + 6]
            for destination in self._where.get(to, others if to == BROADCAST else ()):
                self._waiting.append((due, NEEDS_CHECKSUM[frame[0] & 1] + frame[1:], destination))

    def send(self) -> float | None:
        """Send the frames that are due. Return the seconds until the next one is due; None if there is none."""
        while self._waiting:
            left = self._waiting[0][0] - time.monotonic_ns()
            if left > 0:
                return left / 1e9
            _, frame, port = self._waiting.popleft()
            try:
                port.send(frame)
            except OSError:  # the port's queue is full, or its host has ended
                continue
        return None

    def run(self) -> NoReturn:
        """Forward frames until the process is killed."""
        while True:
            ready, _, _ = select.select(self._ports, [], [], self.send())
            for port in ready:
                self.receive(port)


def main(latency_s: str, *addresses: str) -> NoReturn:
    """Run the switch: see the top of this file."""
    ctypes.CDLL(None).prctl(SET_TIMER_SLACK, 1)
    with contextlib.suppress(PermissionError):  # only root may have a higher priority than the busy ranks
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    switch = Switch(float(latency_s), [bytes.fromhex(address.replace(":", "")) for address in addresses])
    os.write(1, b"ready\n")
    switch.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
