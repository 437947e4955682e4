"""Step times limited by the wire: an emulated network, where communication takes 0.5 to 4 times the compute.

The lower limit of an algorithm's step is the larger of two times: the wire's time for the bytes sent, and the
processors' time for compute, codec and sockets of all ranks together. If a synchronous algorithm hides sums
behind backward only, forward is added to the wire's time. For an algorithm that hides nothing, the limit is the
sum of both times.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, final

import numpy as np

from workbench.bench import BenchOptions, time_to_loss
from workbench.bench.operating_point import batch_of
from workbench.bench.paired import Step, alternate
from workbench.bench.ranks import bind, ranks, world
from workbench.bench.rows import Row, compare
from workbench.bench.wire_cases import (
    BATCHES_OF_SUMS,
    BITS,
    BUCKETS_MIB,
    CHOSEN,
    CHOSEN_OF_DDP,
    CHOSEN_OF_SWEEP,
    CONCURRENT,
    DDP,
    ENCODED_OF_LIMIT,
    FASTER,
    HOOKS,
    HOSTS,
    LAYERWISE,
    LAYERWISE_OF_LIMIT,
    LEAD,
    LIBRARY,
    LIMIT_TARGETS,
    MAX_ROUNDS,
    MEGABYTES,
    NETWORK,
    NO_SLOWER,
    OUR_BUCKETS_MIB,
    PIECES,
    PIPE,
    POWER_RANK,
    RATE,
    RATIOS,
    STEPS,
    SUMS,
    WARM,
    encoded,
    title,
)
from workbench.clusters.emulated.check import PAYLOAD
from workbench.clusters.emulated.rates import parse_rate
from workbench.collectives import native_bytes
from workbench.runtimes.rank.main import RuntimeName
from workbench.units import MIB

if TYPE_CHECKING:
    from workbench.runtimes.user_loop.trainer import Trainer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case on all its ranks.

    Attributes:
        times: way -> the slowest rank's seconds of a step in each round; also "compute", "forward" and the work of the
            codecs.
        socket_s: the machine's seconds to send, transport and receive the bytes of one sum, with all of its cores.
        gradient_bytes: size of the model's gradient.
        sent_bytes: way with a codec -> mean bytes that a rank sends in a step. They do not depend on the number of
            pieces.
    """

    times: dict[str, list[float]]
    socket_s: float
    gradient_bytes: int
    sent_bytes: dict[str, float]


def run(how: BenchOptions) -> Iterator[Row]:
    """Measure both runtimes on 2 and 4 hosts; then time to a loss, and parameter servers."""
    socket_s: dict[int, float] = {}
    for runtime in LIBRARY:
        for number in how.ranks or HOSTS:
            cases = {ratio: title(number, runtime, ratio) for ratio in RATIOS}
            wanted = {ratio: name for ratio, name in cases.items() if how.wanted(name)}
            if not wanted:
                continue
            if number not in socket_s:
                with ranks(number, "torch", NETWORK) as there:
                    socket_s[number] = there.call(work_of_sockets)[0]
            with ranks(number, runtime, NETWORK) as there:
                for ratio, name in wanted.items():
                    how.report(f"{name} ...")
                    facts = there.call(on_rank, batch_of(there, ratio), min(how.rounds, MAX_ROUNDS))[0]
                    yield from rows_of(name, Measured(**facts, socket_s=socket_s[number]), runtime, number, ratio)
    yield from time_to_loss.run(how)


# -- on each rank --------------------------------------------------------------------------------------------


def on_rank(runtime: RuntimeName, folder: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """Return the values of `Measured`, without the work of sockets."""
    import torch

    from workbench import problems
    from workbench.algorithms import LayerwiseSGD, NoCommunication, PipeSGD, SynchronousSGD
    from workbench.algorithms.bucket_plans import TRIAL_STEPS
    from workbench.bench import peers
    from workbench.collectives import Auto, Native
    from workbench.problems.loading import fetch
    from workbench.runtimes.user_loop.trainer import Trainer

    transport = world(runtime, folder)
    number = transport.num_workers
    torch.set_num_threads(bind(transport.rank, number))
    problem = problems.get("wide-mlp", megabytes=MEGABYTES)
    batch = fetch(problem.train_data(), list(range(batch_size)))
    meet, slowest = peers.slowest_here(runtime)
    trainers: list[Trainer] = []
    sent: dict[str, float] = {}

    def loss(model: Any) -> torch.Tensor:
        return problem.batch_loss(model, batch)

    def fresh() -> Any:
        torch.manual_seed(0)
        return problem.model()

    def ours(name: str, algorithm: Any) -> Step:
        model = fresh()
        trainers.append(Trainer(model, torch.optim.SGD(model.parameters(), lr=peers.LR), algorithm))
        if name.startswith(f"{PIPE}, "):  # ways without a codec send the gradient's bytes
            each = [algorithm.bytes_per_step(rank, number, trainers[-1].replica.layout) for rank in range(number)]
            sent.setdefault(name.rpartition(", ")[0], sum(each) / number)
        return partial(trainers[-1].step, partial(loss, model))

    model = fresh()
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    own, auto = Native(), Auto()  # `Auto`: the ring if much faster, as on Open MPI's TCP
    algorithms: dict[str, Any] = {"compute": NoCommunication(), "synchronous": SynchronousSGD(collective=auto)}
    side = CONCURRENT | {"collective": own if runtime == "torch" else auto}
    algorithms |= {f"layer-wise, {mib} MiB": LayerwiseSGD(bucket_bytes=mib * MIB, **side) for mib in OUR_BUCKETS_MIB}
    algorithms[CHOSEN] = LayerwiseSGD(bucket_bytes="auto", collective=side["collective"])
    algorithms[PIPE] = PipeSGD(collective=auto)
    for bits, name in BITS.items():
        algorithms |= {
            f"{PIPE}, {bits}, {pieces} to a block": PipeSGD(collective=encoded(name, pieces)) for pieces in PIECES
        }
    steps = {name: ours(name, algorithm) for name, algorithm in algorithms.items()}
    for _ in range(TRIAL_STEPS):
        steps[CHOSEN]()
    steps["forward"] = partial(loss, model)
    steps |= {f"codec, {bits}": codec_work(name, flat, number) for bits, name in BITS.items()}
    if runtime == "torch":
        steps |= {f"torch DDP, {mib} MiB": peers.ddp_step(fresh(), loss, mib) for mib in BUCKETS_MIB}
        steps |= {
            f"torch DDP, fp16 hook, {mib} MiB": peers.ddp_step(fresh(), loss, mib, peers.fp16_hook())
            for mib in BUCKETS_MIB[:2]
        }
        steps["torch DDP, PowerSGD hook"] = peers.ddp_step(
            fresh(), loss, BUCKETS_MIB[-1], peers.power_sgd_hook(POWER_RANK)
        )

    settle = partial(_settle, trainers)
    times = alternate(steps, rounds, block=STEPS, warm=WARM, lead=LEAD, meet=meet, settle=settle, slowest=slowest)
    for trainer in trainers:
        trainer.finish()
    transport.close()
    return {"times": times, "gradient_bytes": flat.nbytes, "sent_bytes": sent}


def _settle(trainers: Iterable[Trainer]) -> None:
    for trainer in trainers:
        trainer.settle()


def codec_work(name: str, flat: Any, number: int) -> Step:
    """Return the work of a rank in one sum of `Direct`: encoding, decoding and adding.

    The rank encodes the p - 1 blocks of the others, adds p - 1 messages to its own block, encodes its sum, and decodes
    p sums.
    """
    import torch

    from workbench import codecs

    codec = codecs.get(name)
    block = flat[: flat.numel() // number].clone()
    wire = torch.empty(codec.wire_bytes(block.numel()), dtype=torch.uint8)

    def work() -> None:
        for _ in range(number - 1):
            codec.encode_into(block, wire)
            codec.add(wire, block)
        codec.encode_into(block, wire)
        for _ in range(number):
            codec.decode_into(wire, block)

    return work


def work_of_sockets(runtime: RuntimeName, folder: str) -> float:
    """Return busy seconds of this machine in one gloo all-reduce of a gradient, divided by the number of cores.

    All ranks call it. The whole machine is measured, because it runs all hosts of the emulated network, and its kernel
    handles sockets in any process. gloo sleeps while it waits, so only work is counted, including the work of other
    programs.
    """
    import torch

    from workbench.bench import peers

    transport = world(runtime, folder)
    meet, _ = peers.slowest_here(runtime)
    flat = torch.zeros(int(MEGABYTES * 1e6 / 4))
    spent = []
    for _ in range(1 + BATCHES_OF_SUMS):  # in the first batch, TCP adapts to the rate
        meet()
        before = _busy_s()
        for _ in range(SUMS):
            peers.gloo_sum(flat)
        meet()
        spent.append((_busy_s() - before) / SUMS / (os.cpu_count() or 1))
    transport.close()
    return min(spent[1:])


def _busy_s() -> float:
    import psutil

    spent = psutil.cpu_times()
    return float(
        sum(spent) - spent.idle - sum(getattr(spent, name, 0.0) for name in ("iowait", "steal", "guest", "guest_nice"))
    )


# -- rows ----------------------------------------------------------------------------------------------------


def rows_of(case: str, found: Measured, runtime: RuntimeName, number: int, ratio: float) -> Iterator[Row]:
    """Yield the ratios of all ways to compute alone (for the chart), to their limits, and to their peers."""
    times = {name: np.array(taken) for name, taken in found.times.items()}
    limits = limits_of(times, found, number)
    ways = {
        name: taken
        for name, taken in times.items()
        if name not in ("compute", "forward") and not name.startswith("codec")
    }
    ways |= _fastest_variants(ways)
    row = partial(compare, case=case)
    for name, limit in limits.items():
        yield row(limit, times["compute"], what=name, over="compute alone", kind="limit")
    for name, taken in ways.items():
        yield row(taken, times["compute"], what=name, over="compute alone")
    asked = {PIPE: LIMIT_TARGETS[runtime], LAYERWISE: LAYERWISE_OF_LIMIT}
    for name in (PIPE, *(f"{PIPE}, {bits}" for bits in BITS), LAYERWISE):
        below = asked.get(name, ENCODED_OF_LIMIT)
        yield row(ways[name], limits[f"the limit of {name}"], what=name, over="its limit", kind="limit", below=below)
        if name not in asked:
            yield row(
                ways[name], limits[f"the limit of {PIPE}"], what=name, over="the limit without a codec", kind="limit"
            )
    peers = [name for name in ("synchronous", DDP, *HOOKS) if name in ways]
    for name in (PIPE, *(f"{PIPE}, {bits}" for bits in BITS)):
        for peer in peers:
            times_faster = FASTER.get((ratio, name, peer))
            yield row(
                ways[name], ways[peer], what=name, over=peer, below=None if times_faster is None else 1 / times_faster
            )
    if DDP in ways:
        yield row(ways[LAYERWISE], ways[DDP], what=LAYERWISE, over=DDP, below=NO_SLOWER)
        yield row(ways[CHOSEN], ways[DDP], what=CHOSEN, over=DDP, below=CHOSEN_OF_DDP)
    yield row(ways[CHOSEN], ways[LAYERWISE], what=CHOSEN, over=LAYERWISE, below=CHOSEN_OF_SWEEP)


def limits_of(times: Mapping[str, Any], found: Measured, number: int) -> dict[str, Any]:
    """Return lower limits of a step in seconds, shape (rounds,), and the limits by wire or sockets alone."""
    compute, raw_bytes = times["compute"], native_bytes(number, found.gradient_bytes)
    wire_s = raw_bytes / (parse_rate(RATE) / 8 * PAYLOAD)
    work, forward = compute + found.socket_s, times["forward"]
    limits = {
        "the wire": np.full_like(compute, wire_s),
        "sockets, all cores": np.full_like(compute, found.socket_s),
        f"the limit of {PIPE}": np.maximum(work, wire_s),
        f"the limit of {LAYERWISE}": forward + np.maximum(work - forward, wire_s),
    }
    for bits in BITS:
        name = f"{PIPE}, {bits}"
        share = found.sent_bytes[name] / raw_bytes
        codec_s = times[f"codec, {bits}"]
        limits[f"the limit of {name}"] = np.maximum(compute + codec_s + share * found.socket_s, share * wire_s)
    return limits


def _fastest_variants(ways: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for ways with several bucket sizes or numbers of pieces, the one with the smallest median."""
    kinds = {LAYERWISE: "layer-wise, ", DDP: "torch DDP, ", HOOKS[0]: "torch DDP, fp16 hook, "}
    kinds |= {name: f"{name}, " for name in (f"{PIPE}, {bits}" for bits in BITS)}
    found: dict[str, Any] = {}
    for best, word in kinds.items():
        sizes = [name for name in ways if name.startswith(word) and name.removeprefix(word).split()[0].isdigit()]
        if sizes:
            found[best] = ways[min(sizes, key=lambda name: median(ways[name]))]
    return found
