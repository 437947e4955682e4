"""An emulated network: its rates and latency are true, ranks train over it, and nothing of it stays."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import workbench
from tests.waiting import within
from workbench.algorithms import SynchronousSGD
from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.emulated.check import measure, measure_all
from workbench.clusters.supervision.reaper import marked
from workbench.collectives import Hierarchical, Ring
from workbench.errors import ConfigError, LaunchError
from workbench.problems import digits_mlp
from workbench.trace.run import Run

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("no_process_left", "runs")]

WORKBENCH = [sys.executable, "-m", "workbench"]
QUICK = [sys.executable, "-I", "-S", "-c"]
ALL = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; true"  # of all processes of the network
TRAIN = "train synchronous-sgd --workers 2 --steps 12 --set collective=ring --option dtype=float64 --seed 3 --evaluate-every 0 --json"


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedNetwork]:
    """Three hosts, the last of them slow, with different rates up and down."""
    with EmulatedNetwork(3, up="200mbit", down="50mbit", slow={2: "10mbit"}) as network:
        yield network


def told(network: EmulatedNetwork, host: int, script: str) -> str:
    """What a shell on a host prints."""
    with network.run(host, ["sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return str(said).strip()


def spaces(of: list[psutil.Process] | None = None) -> set[str]:
    """The network namespaces that processes are in."""
    pids = (
        [str(process.pid) for process in of]
        if of is not None
        else [name for name in os.listdir("/proc") if name.isdigit()]
    )
    found = set()
    for pid in pids:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:  # ended meanwhile
            continue
    return found


# ---------------------------------------------------------------- the network


def test_a_network_says_what_it_is(network: EmulatedNetwork) -> None:
    assert network.description == "emulated network: 3 hosts at 200 Mbit/s up, 50 Mbit/s down, host2 at 10 Mbit/s"
    assert [(host.name, host.address, host.up, host.down) for host in network.hosts[1:]] == [
        ("host1", "10.87.0.2", 200e6, 50e6),
        ("host2", "10.87.0.3", 10e6, 10e6),
    ]


def test_rates_are_those_of_the_slower_end(network: EmulatedNetwork) -> None:
    """A busy machine can be late with what may leave, so the band is wide below; above it is not."""
    found = measure_all(network)
    assert [(each.source, each.destination, each.asked) for each in found] == [
        ("host0", "host1", 50e6),
        ("host1", "host2", 10e6),
        ("host2", "host0", 10e6),
    ]
    for each in found:
        assert 0.7 * each.asked < each.found < 1.05 * each.asked, each


def test_a_rate_up_limits_where_it_is_the_lower() -> None:
    with EmulatedNetwork(2, up="20mbit", down="100mbit") as network:
        found = measure(network, 0, 1)
    assert 0.7 * 20e6 < found.found < 1.05 * 20e6


def test_short_messages_are_limited_too(network: EmulatedNetwork) -> None:
    """64 kB after a pause: at 10 Mbit/s all but the first 6 kB take their time on the wire, 46 ms."""
    listen = (
        "import socket; s = socket.create_server(('{}', 7000)); print(1, flush=True); c, _ = s.accept(); n = 65536\n"
    )
    serve = listen.format(network.hosts[1].address) + "while n: n -= len(c.recv(n))\nc.sendall(b'!')"
    ask = (
        f"import socket, time; c = socket.create_connection(('{network.hosts[1].address}', 7000)); t = time.perf_counter()\n"
        "c.sendall(bytes(65536)); c.recv(1); print(time.perf_counter() - t)"
    )
    with network.run(1, [*QUICK, serve], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        with network.run(2, [*QUICK, ask], stdout=subprocess.PIPE, text=True) as client:
            seconds = float(client.communicate(timeout=30)[0])
    assert seconds > (65536 - 6056) * 8 / 10e6


def test_latency_is_added_and_the_rate_is_kept(network: EmulatedNetwork) -> None:
    assert measure(network, 0, 1).round_trip_s < 5e-3
    with EmulatedNetwork(2, rate="50mbit", latency_s="10ms") as far:
        found = measure(far, 1, 0)
    assert 20e-3 <= found.round_trip_s < 35e-3
    assert 0.6 * 50e6 < found.found < 1.05 * 50e6


def test_hosts_know_each_other_and_nobody_else(network: EmulatedNetwork) -> None:
    said = told(
        network,
        1,
        "hostname; getent hosts host2; cat /proc/sys/net/ipv4/ip_forward; cut -d: -f1 /proc/net/dev | tail -n +3; pwd",
    )
    host, other, forward, *interfaces, folder = said.splitlines()
    assert (host, other.split(), forward) == ("host1", ["10.87.0.3", "host2"], "0")
    assert {name.strip() for name in interfaces} == {"lo", "eth0"}
    assert folder == os.getcwd()
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pass  # it listens, here
        attempt = (
            "import socket\ntry: socket.create_connection(('{}', {}), 5)\nexcept OSError as error: print(error.errno)"
        )
        answers = [
            told(network, 0, f'{" ".join(QUICK)} "{attempt.format(to, port)}"') for to in ("127.0.0.1", "192.0.2.1")
        ]
    assert answers == [str(errno.ECONNREFUSED), str(errno.ENETUNREACH)]


def test_a_process_there_ends_as_its_command_does_and_the_other_way_round(network: EmulatedNetwork) -> None:
    assert network.run(0, ["sh", "-c", "exit 7"]).wait(20) == 7
    assert network.run("host1", ["sh", "-c", "kill -KILL $$"]).wait(20) == -signal.SIGKILL
    assert network.run(0, ["no-such-command"], stderr=subprocess.DEVNULL).wait(20) == 127
    caught = network.run(
        2, ["sh", "-c", "trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done"], stdout=subprocess.PIPE
    )
    with caught:
        assert caught.stdout is not None
        assert caught.stdout.readline() == b"up\n"
        caught.terminate()
        assert caught.wait(20) == 5
    killed = network.run(2, ["sleep", "987"])
    assert within(10, lambda: "sleep 987" in told(network, 0, ALL))
    killed.kill()
    killed.wait(20)
    assert within(10, lambda: "sleep 987" not in told(network, 0, ALL))


def test_misuse_is_told(network: EmulatedNetwork) -> None:
    with pytest.raises(ConfigError, match="no host 3: there are host0, host1, host2"):
        network.run(3, ["true"])
    closed = EmulatedNetwork(2)
    assert closed.alive
    closed.close()
    closed.close()
    assert "closed" in repr(closed)
    with pytest.raises(LaunchError, match="was closed"):
        closed.run(0, ["true"])


def as_somebody(code: str, *shell: str) -> subprocess.CompletedProcess[str]:
    """Python code as somebody who is root in a namespace of users at most; `shell` is what to run it by there."""
    return subprocess.run([*shell, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


MAKE = "from workbench.clusters.emulated import EmulatedNetwork as E\nwith E(2) as n: n.run(1, ['hostname']).wait()"


@pytest.mark.skipif(
    subprocess.run(["unshare", "-U", "true"], capture_output=True).returncode != 0, reason="no user namespaces here"
)
def test_without_root_where_users_have_namespaces_and_a_reason_where_not() -> None:
    allowed = as_somebody(MAKE, "unshare", "-U", "--map-user=1000", "--map-group=1000")
    assert (allowed.returncode, allowed.stdout) == (0, "host1\n"), allowed.stderr
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set -all --inh-caps -all "$@"'
    refused = as_somebody(MAKE, "unshare", "-Ur", "sh", "-c", forbid, "sh")
    assert refused.returncode != 0
    assert "lacks CAP_SYS_ADMIN, and user.max_user_namespaces=0 forbids user namespaces: run as root" in refused.stderr


# ---------------------------------------------------------------- from a shell


def emulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WORKBENCH, "emulate", *arguments], capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def expected() -> float:
    """The loss of the same training on simulated workers."""
    problem = digits_mlp(dtype=torch.float64)
    run = workbench.simulate(SynchronousSGD(collective=Ring()), problem, workers=2, steps=12, seed=3, evaluate_every=0)
    return float(workbench.summary(run)["loss"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("runtime", ["torch", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_ranks_on_hosts_train_as_anywhere_else(runtime: str, expected: float) -> None:
    """What leaves a host is what its rank sends: no rank goes round the network."""
    counted = f"{' '.join(WORKBENCH)} {TRAIN} --runtime {runtime} && grep eth0 /proc/net/dev >&2"
    done = emulate("--rate", "200mbit", "--", "sh", "-c", counted)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loss"] == pytest.approx(expected, rel=1e-12)
    run = Run.load(found["folder"])
    assert [run.headers[rank]["host"] for rank in range(2)] == ["host0", "host1"]
    assert "emulated network: 2 hosts at 200 Mbit/s" in run.info["notes"]
    sent = int(done.stderr.split("eth0:")[1].split()[8])
    by_rank = found["bytes_sent"] / 2
    assert by_rank < sent < 1.3 * by_rank + 300_000


def test_each_place_has_a_command_as_torchrun_would_have_it() -> None:
    script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $WORKBENCH_HOST $MASTER_ADDR"
    done = emulate("--hosts", "2", "--ranks-per-host", "2", "--each", "--", "sh", "-c", script)
    assert sorted(done.stdout.splitlines()) == [
        "0/4 0/2 host0 10.87.0.1",
        "1/4 1/2 host0 10.87.0.1",
        "2/4 0/2 host1 10.87.0.1",
        "3/4 1/2 host1 10.87.0.1",
    ]


def test_the_exit_status_is_that_of_the_command_that_failed_and_the_others_end() -> None:
    begin = time.monotonic()
    assert emulate("--hosts", "2", "--each", "--", "sh", "-c", "[ $RANK = 0 ] || exit 9; sleep 600").returncode == 9
    assert time.monotonic() - begin < 60
    assert emulate("--", "sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM


def test_an_interrupt_reaches_the_command_which_decides_when_to_end() -> None:
    command = [
        *WORKBENCH,
        "emulate",
        "--",
        "sh",
        "-c",
        "trap 'echo told; exit 3' INT; echo up; while :; do sleep 0.05; done",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:  # without a terminal
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 3
        assert process.stdout.read() == "told\n"


def test_check_prints_what_there_is_beside_what_was_asked() -> None:
    lines = emulate("--hosts", "2", "--rate", "20mbit", "--latency", "2ms", "--check").stdout.splitlines()
    assert len(lines) == 3
    for line, ends in zip(lines[1:], (["host0", "host1"], ["host1", "host0"]), strict=True):
        words = line.split()
        assert words[:4] == [*ends, "20", "Mbit/s"]
        assert float(words[6].rstrip("%")) == pytest.approx(100 * float(words[4]) / 20, abs=0.2)
        assert words[7] == "4.000"
        assert float(words[9]) >= 4


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_when_the_starter_is_killed(sign: signal.Signals) -> None:
    """Also no daemon that went into a session of its own, and none that ignores what it is told."""
    before = set(os.listdir("/sys/class/net"))
    stubborn = "trap '' TERM HUP; setsid sh -c 'trap \"\" TERM; echo daemon; sleep 600' & echo up; sleep 600; sleep 600"
    command = [*WORKBENCH, "emulate", "--hosts", "3", "--latency", "1ms", "--", "sh", "-c", stubborn]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert {process.stdout.readline().strip() for _ in range(2)} == {"up", "daemon"}
        inside = psutil.Process(process.pid).children(recursive=True)
        theirs = spaces(inside) - spaces([psutil.Process()])
        assert len(theirs) >= 2, "the switch's and the first host's"
        process.send_signal(sign)
        process.wait(10)
        assert within(
            10, lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in inside)
        )
    assert not theirs & spaces()
    assert set(os.listdir("/sys/class/net")) == before


# ---------------------------------------------------------------- a cluster


@pytest.mark.mpi
@pytest.mark.notebooks
@pytest.mark.timeout(240)
def test_a_cluster_trains_on_emulated_hosts_and_leaves_nothing() -> None:
    from workbench.clusters import Cluster

    def sent(host: int) -> int:
        return int(told(network, host, "cat /proc/net/dev").split("eth0:")[1].split()[8])

    with EmulatedNetwork(2, rate="200mbit", ranks_per_host=2) as network:
        with Cluster(4, launcher=network, quiet=True) as cluster:
            assert [rank["host"] for rank in cluster.ranks] == ["host0", "host0", "host1", "host1"]
            assert (
                len(spaces([psutil.Process(rank["pid"]) for rank in cluster.ranks]) - spaces([psutil.Process()])) == 2
            )
            counts = []
            for collective in (Ring(), Hierarchical(group=2)):
                begin = sent(0)
                run = cluster.train(
                    SynchronousSGD(collective=collective), digits_mlp(), steps=20, evaluate_every=0
                ).wait(60)
                counts.append(sent(0) - begin)
                assert len(run.run.spans) > 0
            mark = cluster.mark
        assert network.alive, "it is the caller's"
        assert marked(mark) == []
    message_bytes = run.run.info["model"]["message_bytes"]
    assert counts[0] > 20 * 1.5 * message_bytes, "a ring of four: each rank sends one and a half gradients a step"
    assert 20 * message_bytes < counts[1] < 0.9 * counts[0], (
        "at two levels the leaders alone cross the wire, as a ring of two"
    )


@pytest.mark.mpi
@pytest.mark.notebooks
@pytest.mark.timeout(240)
def test_a_rank_that_is_done_leaves_none_waiting() -> None:
    """It makes no call of MPI's any more, with which the word could go that the last message came: of two ranks one waited for ever."""
    from workbench.clusters import Cluster

    with Cluster(2, launcher="emulated:1gbit", quiet=True) as cluster:
        for _ in range(2):
            run = cluster.train(SynchronousSGD(), digits_mlp(), steps=3, evaluate_every=0, timeout_s=8)
            run.wait(60)
            assert run.status == "finished"


def test_a_cluster_whose_owner_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import time, workbench as wb\n"
        "cluster = wb.Cluster(2, launcher='emulated:100mbit,latency=1ms', runtime='torch', quiet=True)\n"
        "print(*(rank['pid'] for rank in cluster.ranks), flush=True)\n"
        "run = cluster.train(wb.SynchronousSGD(), wb.problems.digits_mlp(), steps=3).wait(60)\n"
        "print(run.run.info['notes'][-1], flush=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert process.stdout.readline().strip() == "emulated network: 2 hosts at 100 Mbit/s, 1 ms of latency"
        theirs = spaces(ranks)
        assert len(theirs) == 2
        assert not theirs & spaces([psutil.Process()])
        process.kill()
        process.wait(10)
        assert within(
            15, lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
        )
        assert within(15, lambda: not theirs & spaces())
