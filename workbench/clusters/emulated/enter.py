"""Runs a command on a host of an emulated network, in one of two places.

    enter.py PID HOST COMMAND...    from outside; PID is the network's first process (its number outside); HOST may be `switch`
    enter.py in HOST COMMAND...     from a process of the network
    enter.py ssh [-x] HOST WORDS... the same, with WORDS for a shell: mpiexec calls this as ssh

From outside, the command is a child of this process, in another process namespace. This process forwards signals to it
and ends with its exit status. If this process is killed, the command is killed too.
It imports nothing of the package, so it starts quickly.
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
SWITCH_NAMESPACE = "switch"  # name of the namespace with the other ends of the hosts' interfaces
OUTER = ("user", "mnt", "ipc", "pid")  # the user namespace first: it gives the right to join the others
FORWARDED = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
}
SET_DEATH_SIGNAL = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def join(fd: int) -> None:
    """Call setns(2)."""
    if LIBC.setns(fd, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a namespace cannot be entered: {os.strerror(number)}")


def join_processes(keeper: int) -> None:
    """Join the namespaces that all hosts share."""
    folder = os.getcwd()
    links = {what: f"/proc/{keeper}/ns/{what}" for what in OUTER}
    differ = [what for what, link in links.items() if os.readlink(link) != os.readlink(f"/proc/self/ns/{what}")]
    fds = [os.open(links[what], os.O_RDONLY) for what in differ]
    for fd in fds:
        join(fd)
        os.close(fd)
    os.chdir(folder)  # setns of a mount namespace changes to its root


def join_host(name: str) -> None:
    """Join a host's network and host name, or the network between the hosts."""
    host = {"net": "ns/net"}
    if name != SWITCH_NAMESPACE:
        with open(TABLE) as file:
            host = {what: f"fd/{number}" for what, number in json.load(file)[name].items()}
    for where in host.values():
        fd = os.open(f"/proc/1/{where}", os.O_RDONLY)
        join(fd)
        os.close(fd)
    os.environ["WORKBENCH_HOST"] = name


def run(command: list[str]) -> NoReturn:
    """Replace this process by the command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def stay(child: int) -> NoReturn:
    """Forward signals until the command has ended. Then end with its exit status."""
    while True:
        info = signal.sigwaitinfo(FORWARDED | {signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            if info.si_code <= 0:  # sent by a process; a terminal sends its signals to the command too
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
    """Run the command from outside of the network."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # SIG_IGN would discard the command's exit status
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
    join_processes(keeper)
    join_host(host)
    child = os.fork()
    if child == 0:
        LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        run(command)
    stay(child)


def main(where: str, *arguments: str) -> NoReturn:
    """Run the command: see the top of this file."""
    if where == "ssh":
        rest = [argument for argument in arguments if argument != "-x"]
        join_host(rest[0])
        run(["/bin/sh", "-c", " ".join(rest[1:])])
    if where == "in":
        join_host(arguments[0])
        run(list(arguments[1:]))
    try:
        outside(int(where), arguments[0], list(arguments[1:]))
    except OSError as error:
        sys.exit(f"{arguments[0]} cannot be entered: the network has ended, or it belongs to another user ({error})")


if __name__ == "__main__":
    main(*sys.argv[1:])
