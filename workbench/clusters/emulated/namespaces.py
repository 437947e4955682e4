"""Makes the namespaces of an emulated network. They end with this process.

Run as a script, it reads the specification as one line of JSON from its standard input. It moves into new namespaces
(processes, mounts, network, host name, and users if it needs the rights). It makes a network and a host name for each
host, connects them, and answers with one line of JSON. Then it waits until its standard input is closed or its
starter (the process that started it) has ended.

No namespace has a name in a file system. This process is the first of its process namespace. When it ends, for any
reason, the kernel ends every process in the namespace, and then removes the namespaces and their interfaces.

It imports nothing of the package, so it is small and starts quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_USERS, NEW_PROCESSES, NEW_NETWORK = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
ALL_NAMESPACES = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PROCESSES | NEW_NETWORK
PRIVATE_RECURSIVE, BIND = 0x44000, 0x1000
SET_DEATH_SIGNAL = 1
TOOL_S = 60.0  # for `ip` and `tc`
INTERFACE = "eth0"  # of every host
CONGESTION = "cubic"  # Linux's default; BBR, the setting of some machines, treats a limited queue differently
PLACE = "/dev/shm/.workbench"  # in a memory file system that only these processes see
SETTINGS = (  # name, the value that forbids user namespaces, the value that allows them
    ("user.max_user_namespaces", "0", "10000"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)
LIBC = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The kernel or a tool refused a request."""


def libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library; raise OSError if it fails."""
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Call mount(2)."""
    libc("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def move_out() -> bool:
    """Move into new namespaces. Return True if this needed a user namespace, because this process is not root."""
    try:
        libc("unshare", ALL_NAMESPACES)
        return False
    except PermissionError:
        pass
    user, group = os.geteuid(), os.getegid()
    try:
        libc("unshare", ALL_NAMESPACES | NEW_USERS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise Refused(f"{why_not(user)} ({error})") from None
    return True


def why_not(user: int) -> str:
    """Return what forbids user namespaces here, as far as the kernel shows it."""
    subject = "this user is not root" if user else "this root lacks CAP_SYS_ADMIN"
    for setting, forbids, allows in SETTINGS:
        with contextlib.suppress(OSError):
            if Path("/proc/sys", setting.replace(".", "/")).read_text().strip() == forbids:
                return f"{subject}, and {setting}={forbids} forbids user namespaces: run as root, or set it to {allows}"
    if user == 0:
        return f"{subject}, as in a container: start the container with --cap-add SYS_ADMIN --cap-add NET_ADMIN"
    return f"{subject}, and may make no user namespace, as in a container: run as root, or outside of the container"


def private_mounts(hosts: list[dict[str, Any]]) -> None:
    """Mount /proc of these processes, a shared memory that ends with them, and /etc/hosts with the hosts' names."""
    mount("none", "/", flags=PRIVATE_RECURSIVE)
    try:
        mount("proc", "/proc", "proc")
    except OSError as error:
        raise Refused(
            f"/proc cannot be mounted ({error}): the container hides parts of it; run as root, or outside of the "
            "container"
        ) from None
    mount("tmpfs", "/dev/shm", "tmpfs", data="mode=1777")
    Path(PLACE).mkdir()
    names = Path(PLACE, "hosts")
    lines = []
    for host in hosts:
        # For IPv6 sockets.
        lines += [f"{host['address']} {host['name']}\n", f"::ffff:{host['address']} {host['name']}.ipv6\n"]
    names.write_text("127.0.0.1 localhost\n" + "".join(lines))
    mount(str(names), "/etc/hosts", flags=BIND)


def tool(name: str, lines: list[str]) -> None:
    """Run `ip` or `tc` with these lines as its batch."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise Refused(f"there is no `{name}`: install iproute2")
    batch = "\n".join(lines) + "\n"
    try:
        done = subprocess.run(
            [path, "-batch", "-"], input=batch, text=True, capture_output=True, check=False, timeout=TOOL_S
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"`{name}` had not ended after {TOOL_S:g} s") from None
    if done.returncode != 0:
        message = " ".join(done.stderr.split())
        number = done.stderr.rpartition(":")[2].strip()
        line = f" (`{name} {lines[int(number) - 1]}`)" if number.isdigit() and int(number) <= len(lines) else ""
        raise Refused(f"{name}: {message}{line}; the kernel must have veth, bridge and sch_tbf")


def enter(fd: int) -> None:
    """Join the namespace of this file descriptor."""
    libc("setns", fd, 0)


def quiet_network() -> None:
    """Disable IPv6 here: its announcements would be extra traffic."""
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for which in ("all", "default"):
            Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")


def limit(device: str, shape: dict[str, int]) -> list[str]:
    """Return the line for `tc` that limits the rate at which frames leave `device`."""
    return [f"qdisc add dev {device} root tbf rate {shape['rate']}bit burst {shape['burst']} limit {shape['limit']}"]


def make(spec: dict[str, Any]) -> list[dict[str, int]]:
    """Make the hosts' namespaces, interfaces and rates.

    Return the namespaces' descriptors, which this process keeps open.
    """
    hosts = spec["hosts"]
    bridged = spec["latency_s"] == 0
    switch = os.open("/proc/self/ns/net", os.O_RDONLY)
    quiet_network()
    tool("ip", ["link set lo up", *(["link add bridge type bridge", "link set bridge up"] if bridged else [])])
    found = []
    for host in hosts:
        libc("unshare", NEW_NETWORK | NEW_NAMES)
        socket.sethostname(host["name"])
        quiet_network()
        found.append({what: os.open(f"/proc/self/ns/{what}", os.O_RDONLY) for what in ("net", "uts")})
    for index, (host, fds) in enumerate(zip(hosts, found, strict=True)):
        enter(switch)
        port, chunk = f"port{index}", f"gso_max_size {host['chunk']}"
        into = f"address {host['mac']} mtu {spec['mtu']} netns /proc/1/fd/{fds['net']}"
        tool(
            "ip",
            [
                f"link add {port} mtu {spec['mtu']} type veth peer name {INTERFACE} {into}",
                f"link set {port} {chunk} " + ("master bridge up" if bridged else "up"),
            ],
        )
        tool("tc", limit(port, host["down"]))
        enter(fds["net"])
        others = [other for other in hosts if other is not host]
        tool(
            "ip",
            [
                "link set lo up",
                f"link set {INTERFACE} {chunk} up",
                f"addr add {host['address']}/{spec['subnet'].partition('/')[2]} dev {INTERFACE} noprefixroute",
                f"route add {spec['subnet']} dev {INTERFACE} src {host['address']} congctl {CONGESTION}",
                *(
                    f"neigh add {other['address']} lladdr {other['mac']} dev {INTERFACE} nud permanent"
                    for other in others
                ),
            ],
        )
        tool("tc", limit(INTERFACE, host["up"]))
    enter(switch)
    return found


def start_switch(spec: dict[str, Any]) -> int:
    """Start the switch of a network with latency. Return its process id when it is ready."""
    command = [
        sys.executable,
        "-I",
        "-S",
        spec["switch"],
        str(spec["latency_s"]),
        *(host["mac"] for host in spec["hosts"]),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if not process.stdout.readline():
        raise Refused("the switch in user space did not start")
    return process.pid


def write_agent(spec: dict[str, Any], found: list[dict[str, int]]) -> None:
    """Write the table that `enter.py` reads, and a program that mpiexec calls as ssh."""
    table = {host["name"]: fds for host, fds in zip(spec["hosts"], found, strict=True)}
    Path(PLACE, "network.json").write_text(json.dumps(table))
    slots = spec["ranks_per_host"]
    Path(PLACE, "hostfile").write_text("".join(f"{host['name']} slots={slots}\n" for host in spec["hosts"]))
    Path(PLACE, "hydra").write_text("".join(f"{host['name']}:{slots}\n" for host in spec["hosts"]))
    agent = Path(PLACE, "agent")
    agent.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S '{spec['enter']}' ssh \"$@\"\n")
    agent.chmod(0o755)


def serve(starter: int, switch: int | None) -> NoReturn:
    """Reap orphans until the starter ends or closes the standard input, or until the switch ends."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    poll = select.poll()
    for fd in (0, starter, wake):
        poll.register(fd, select.POLLIN | select.POLLHUP)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if ready & {0, starter}:
            os._exit(0)
        os.read(wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                if ended == switch:
                    os._exit(1)


def first_process(spec: dict[str, Any], starter: int, in_users: bool) -> NoReturn:
    """Run as the first process of the new process namespace."""
    LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    switch = None
    answer: dict[str, Any]
    try:
        private_mounts(spec["hosts"])
        found = make(spec)
        write_agent(spec, found)
        switch = start_switch(spec) if spec["latency_s"] else None
        answer = {"users": in_users, "switch": switch}
    except (Refused, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
    if "error" in answer:
        os._exit(1)
    os.close(1)
    serve(starter, switch)


def main() -> None:
    """Read the specification, move into new namespaces, and stay until the starter ends."""
    starter = os.pidfd_open(os.getppid())
    spec = json.loads(sys.stdin.readline())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        in_users = move_out()
    except Refused as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
    first = os.fork()
    if first == 0:
        first_process(spec, starter, in_users)
    print(json.dumps({"pid": first}), flush=True)  # its process id outside of the new process namespace
    os.close(1)
    os.waitpid(first, 0)


if __name__ == "__main__":
    main()
