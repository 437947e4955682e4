"""`EmulatedNetwork`: hosts on this machine, connected by a network of a known rate."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from workbench.clusters.emulated.enter import SWITCH_NAMESPACE
from workbench.clusters.emulated.placement import ENTER, Placement
from workbench.clusters.emulated.rates import parse_rate, parse_seconds, rate_text
from workbench.clusters.emulated.spec import BURST_S, Host, described, shape
from workbench.errors import ConfigError, LaunchError

MAX_HOSTS = 64
START_S = 30.0
MAKER = str(Path(__file__).with_name("namespaces.py"))  # the program that makes the network and keeps it alive
INTERFACE = "eth0"
PLACE = "/dev/shm/.workbench"


@final
class EmulatedNetwork:
    """Linux network namespaces with real TCP between them. `tc tbf` limits the rate of each interface.

    Each host has its own network and host name. The hosts share this machine's cores, memory and files. The
    network ends with `close()`, with the `with` block, when the object is garbage collected, and when this
    process ends or is killed. The kernel then ends all processes on the hosts and removes the interfaces.

    The rate is an upper limit. This machine's cores carry the bytes, so the real rate is lower if they are busy
    or if the limit is high. `workbench emulate --check` measures it.

    With latency, one process delays every frame. It uses one core and forwards about 1 Gbit/s. A TCP connection also
    takes longer to reach the rate.

    Args:
        hosts: number of hosts.
        rate: of every interface, in both directions: "1gbit", "100mbit", or bits per second. It counts whole Ethernet
            frames; TCP's payload is 95.6 % of it.
        ranks_per_host: number of ranks that the launchers place on a host before they use the next one.
        latency_s: seconds ("5ms") that every frame takes from host to host, in addition to its time on the wire.
        slow: host number -> its rate, instead of `rate`.
        up, down: rates from a host and to a host, instead of `rate`, if they differ.
        burst_s: bytes that may leave at once after a pause, in seconds of the rate ("1ms"). If a timer is late by
            more, as on virtual machines, the wire is idle. A larger value avoids this. But a message that is shorter
            than the burst is not slowed down.

    Raises:
        ConfigError: a rate, time or number is not valid.
        LaunchError: the kernel or the machine does not allow it; the message says what is missing.

    Example:
        with EmulatedNetwork(4, rate="1gbit") as network:
            network.run(0, ["ping", "-c", "1", "host1"]).wait()
    """

    def __init__(
        self,
        hosts: int,
        *,
        rate: str | float = "1gbit",
        ranks_per_host: int = 1,
        latency_s: str | float = 0.0,
        slow: Mapping[int, str | float] | None = None,
        up: str | float | None = None,
        down: str | float | None = None,
        burst_s: str | float = BURST_S,
    ) -> None:
        for name, number, most in (("hosts", hosts, MAX_HOSTS), ("ranks_per_host", ranks_per_host, 1024)):
            if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
                raise ConfigError(f"{name}={number!r}: give a whole number from 1 to {most}")
        for host in slow or {}:
            if host not in range(hosts):
                raise ConfigError(f"slow host {host!r}: hosts are numbered from 0 to {hosts - 1}")
        if Placement.here() is not None:
            raise ConfigError(
                "this process runs on an emulated network, which cannot contain another one: use that one"
            )
        from_host, to_host = (parse_rate(rate if its is None else its) for its in (up, down))
        slower = {host: parse_rate(its) for host, its in (slow or {}).items()}
        rates = [(slower.get(host, from_host), slower.get(host, to_host)) for host in range(hosts)]
        both = rate_text(from_host) if from_host == to_host else f"{rate_text(from_host)} up, {rate_text(to_host)} down"
        self._rates = ", ".join([both, *(f"host{host} at {rate_text(its)}" for host, its in sorted(slower.items()))])
        self.latency_s, self.burst_s = parse_seconds(latency_s), parse_seconds(burst_s)
        self.ranks_per_host = ranks_per_host
        self.hosts = tuple(
            Host(name=f"host{index}", address=f"10.87.0.{index + 1}", up=up, down=down)
            for index, (up, down) in enumerate(rates)
        )
        self._maker = self._start()
        self._finalizer = weakref.finalize(self, _end, self._maker, os.getpid())
        try:
            self._first = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> str:
        """One line, for a run's record."""
        latency = f", {self.latency_s * 1e3:.4g} ms of latency" if self.latency_s else ""
        burst = f", bursts of {self.burst_s * 1e3:.4g} ms" if self.burst_s != BURST_S else ""
        ranks = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"emulated network: {len(self.hosts)} hosts{ranks} at {self._rates}{latency}{burst}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which launchers and libraries find the hosts: this package, Open MPI, MPICH, gloo and NCCL."""
        agent = f"{PLACE}/agent"
        interfaces = (
            *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
            *("OMPI_MCA_btl_tcp_if_include", "UCX_NET_DEVICES", "FI_TCP_IFACE"),
        )
        return {
            **self.placement.environment,
            "WORKBENCH_NETWORK": self.description,
            "WORKBENCH_MACHINE": platform.node(),
            **dict.fromkeys(interfaces, INTERFACE),
            # UCX and libfabric see by the boot id that all hosts are one machine, and would use its memory instead of
            # the network.
            "OMPI_MCA_pml": "ob1",
            "UCX_TLS": "tcp,self",
            "FI_PROVIDER": "tcp",
            "PRTE_MCA_plm_ssh_agent": agent,
            "PRTE_MCA_prte_default_hostfile": f"{PLACE}/hostfile",
            "PRTE_MCA_prte_tmpdir_base": PLACE,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",  # every user is root on the hosts
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_plm_rsh_agent": agent,
            "OMPI_MCA_orte_default_hostfile": f"{PLACE}/hostfile",
            "OMPI_MCA_orte_tmpdir_base": PLACE,
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": agent,
            "HYDRA_HOST_FILE": f"{PLACE}/hydra",
        }

    def command(self, host: int | str, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on a host, for this process or a child of it."""
        if not self._finalizer.alive:
            raise LaunchError("this network was closed: make a new EmulatedNetwork")
        return [*ENTER, str(self._first), self._name(host), *argv]

    def run(
        self, host: int | str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start `argv` on a host.

        Args:
            host: its number or name.
            argv: the command line.
            env: variables to add to this process's environment and the network's.
            options: of `subprocess.Popen`.

        Returns:
            A process that forwards signals to the command and ends with its exit status. If it is killed, the
            command is killed too.

        Raises:
            ConfigError: there is no such host.
            LaunchError: the network was closed.
        """
        return subprocess.Popen(
            self.command(host, argv), env={**os.environ, **self.environment, **(env or {})}, **options
        )

    def cut(self, host: int | str) -> None:
        """Cut a host's cable: no frame leaves or reaches it until `reconnect`.

        Its processes continue. TCP retries for minutes.

        Raises:
            ConfigError: there is no such host.
            LaunchError: the network was closed.
        """
        self._at_switch("ip", "link", "set", self._port(host), "down")

    def reconnect(self, host: int | str) -> None:
        """Reconnect a host after `cut`.

        TCP sends at its next retry: within a second after a short cut, later after a long one.

        Raises:
            ConfigError: there is no such host.
            LaunchError: the network was closed.
        """
        self._at_switch("ip", "link", "set", self._port(host), "up")

    def set_rate(self, host: int | str, rate: str | float) -> None:
        """Change the rate of a host in both directions. `description` keeps the first rate.

        Raises:
            ConfigError: there is no such host, or the rate is not valid.
            LaunchError: the network was closed.
        """
        queue = shape(parse_rate(rate), self.burst_s)
        options = ["tbf", "rate", f"{queue['rate']}bit", "burst", str(queue["burst"]), "limit", str(queue["limit"])]
        self._at_switch("tc", "qdisc", "change", "dev", self._port(host), "root", *options)
        self._run_tool(self._name(host), ["tc", "qdisc", "change", "dev", INTERFACE, "root", *options])

    def _port(self, host: int | str) -> str:
        return f"port{[each.name for each in self.hosts].index(self._name(host))}"

    def _at_switch(self, *command: str) -> None:
        self._run_tool(SWITCH_NAMESPACE, list(command))

    def _run_tool(self, where: str, argv: list[str]) -> None:
        """Run `ip` or `tc` on a host, or between the hosts."""
        if not self._finalizer.alive:
            raise LaunchError("this network was closed: make a new EmulatedNetwork")
        tools = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
        done = subprocess.run(
            [*ENTER, str(self._first), where, *argv], env=tools, capture_output=True, text=True, timeout=START_S
        )
        if done.returncode != 0:
            raise LaunchError(f"{' '.join(argv)} on {where}: {done.stderr.strip()}")

    @property
    def placement(self) -> Placement:
        """The host of each rank."""
        return Placement(hosts=tuple(host.name for host in self.hosts), ranks_per_host=self.ranks_per_host)

    def pid_here(self, pid: int) -> int | None:
        """Return the process id that a process of the hosts has outside of the network; None if it has ended."""
        space = os.readlink(f"/proc/{self._first}/ns/pid")
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):  # the process ended meanwhile
                numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
                if numbers[-1] == str(pid) and os.readlink(status.with_name("ns") / "pid") == space:
                    return int(status.parent.name)
        return None

    @property
    def alive(self) -> bool:
        """Return True if the network exists."""
        return self._finalizer.alive and self._maker.poll() is None

    def close(self) -> None:
        """End all processes on the hosts and remove the network. Further calls do nothing."""
        self._finalizer()

    def _name(self, host: int | str) -> str:
        names = [each.name for each in self.hosts]
        if isinstance(host, int) and not isinstance(host, bool) and 0 <= host < len(names):
            return names[host]
        if host not in names:
            raise ConfigError(f"no host {host!r}: there are {', '.join(names)}, or their numbers from 0")
        return str(host)

    def _start(self) -> subprocess.Popen[bytes]:
        if sys.platform != "linux":
            raise LaunchError(
                f"an emulated network is made of Linux network namespaces, and this machine runs {platform.system()}"
            )
        command = [sys.executable, "-I", "-S", MAKER]
        pipe = subprocess.PIPE
        maker = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, bufsize=0)
        assert maker.stdin is not None
        spec = described(self.hosts, self.ranks_per_host, self.latency_s, self.burst_s)
        maker.stdin.write(json.dumps(spec).encode() + b"\n")  # stays open: the maker ends when it is closed
        return maker

    def _answer(self) -> int:
        """Wait until the network exists. Return the process id of the first process of its process namespace."""
        answer: dict[str, Any] = {}
        assert self._maker.stdout is not None
        while "pid" not in answer or "users" not in answer:
            ready, _, _ = select.select([self._maker.stdout], [], [], START_S)
            line = self._maker.stdout.readline() if ready else b""
            if not line:
                reason = "the process that makes it ended" if ready else f"it was not made in {START_S:.0f} s"
                raise LaunchError(f"no emulated network: {reason}")
            answer |= json.loads(line)
            if "error" in answer:
                raise LaunchError(f"no emulated network: {answer['error']}")
        return int(answer["pid"])

    def __enter__(self) -> EmulatedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.description}{'' if self.alive else ', closed'}>"


def _end(maker: subprocess.Popen[bytes], owner: int) -> None:
    """End the maker, and with it all processes on the hosts. A fork of the owner must not do this."""
    if os.getpid() != owner:
        return
    for pipe in (maker.stdin, maker.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    try:
        maker.wait(5.0)
    except subprocess.TimeoutExpired:
        maker.kill()
        maker.wait()
