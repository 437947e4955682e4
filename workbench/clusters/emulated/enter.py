"""Runs a command on a host of an emulated network, in one of two places.

    enter.py PID HOST COMMAND...    from outside; PID is the process that keeps the network (its number outside), HOST may be `switch`
    enter.py in HOST COMMAND...     from a process of the network
    enter.py ssh [-x] HOST WORDS... the same, with WORDS for a shell: what mpiexec says to ssh

From outside, the command is in a process namespace that this process is not in; so this one stays, hands on signals, ends
as the command does, and takes the command with it when it is killed. It imports nothing of the package, to be quick.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import NoReturn

TABLE = "/dev/shm/.workbench/network.json"
BETWEEN = "switch"  # where the other ends of the hosts' interfaces are
OUTER = ("user", "mnt", "ipc", "pid")  # users first: they give the right to join the others
HANDED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
SET_DEATH_SIGNAL = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def join(fd: int) -> None:
    """setns(2)."""
    if LIBC.setns(fd, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a namespace cannot be entered: {os.strerror(number)}")


def join_processes(keeper: int) -> None:
    """The namespaces that all hosts share."""
    folder = os.getcwd()
    links = {what: f"/proc/{keeper}/ns/{what}" for what in OUTER}
    differ = [what for what, link in links.items() if os.readlink(link) != os.readlink(f"/proc/self/ns/{what}")]
    fds = [os.open(links[what], os.O_RDONLY) for what in differ]
    for fd in fds:
        join(fd)
        os.close(fd)
    os.chdir(folder)  # entering a mount namespace leads to its root


def join_host(name: str) -> None:
    """A host's network and name; the network between them."""
    with open(TABLE) as file:
        host = {what: f"fd/{number}" for what, number in json.load(file)[name].items()} if name != BETWEEN else {"net": "ns/net"}
    for where in host.values():
        fd = os.open(f"/proc/1/{where}", os.O_RDONLY)
        join(fd)
        os.close(fd)
    os.environ["WORKBENCH_HOST"] = name


def run(command: list[str]) -> NoReturn:
    """Become the command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def stay(child: int) -> NoReturn:
    """Until the command has ended; then end as it did."""
    while True:
        info = signal.sigwaitinfo(HANDED_ON | {signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            if info.si_code <= 0:  # from a process; the command has a terminal's signals already, as one of its process group
                os.kill(child, info.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def outside(keeper: int, host: str, command: list[str]) -> NoReturn:
    """From outside of the network."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would collect the command before we have its exit status
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON | {signal.SIGCHLD})
    join_processes(keeper)
    join_host(host)
    child = os.fork()
    if child == 0:
        LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        run(command)
    stay(child)


def main(where: str, *words: str) -> NoReturn:
    """See the top of this file."""
    if where == "ssh":
        rest = [word for word in words if word != "-x"]
        join_host(rest[0])
        run(["/bin/sh", "-c", " ".join(rest[1:])])
    if where == "in":
        join_host(words[0])
        run(list(words[1:]))
    try:
        outside(int(where), words[0], list(words[1:]))
    except OSError as error:
        sys.exit(f"{words[0]} cannot be entered: the network has ended, or is another user's ({error})")


if __name__ == "__main__":
    main(*sys.argv[1:])
