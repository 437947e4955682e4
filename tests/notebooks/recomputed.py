"""The numbers that each notebook must show, computed again from its runs' rows, by formulas here in NumPy and SciPy.

Nothing of `workbench.analysis` or `workbench.theory` is used, nor any function or result of the notebook. Of its names
only parameters, the problem, and runs are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import ndtri

from tests.notebooks import recomputed_backups, recomputed_delays, recomputed_pipes
from tests.notebooks.formulas import (
    Array,
    Names,
    carried_s,
    coded_ring_s,
    ends_of,
    fresh_s,
    halving_s,
    hidden_share,
    num_values,
    ring_s,
    server_s,
    updates_of,
    usual_step_s,
)
from tests.notebooks.shown import Again, Kept

# -- studies -------------------------------------------------------------------------------------------------------------


def scaling(names: Names, kept: list[Kept]) -> Again:
    workers, batch, steps, width = names["workers"], names["batch_size"], names["steps"], names["width"]
    links, num_bytes, most = names["links"], 4 * num_values(names["task"]), names["workers"][-1]
    alone_s = names["compute_ms"] / 1e3 or 2 * num_bytes / links[0].bandwidth_bytes_per_s

    def name_of(item: Kept) -> str:
        kind = type(item.algorithm).__name__
        if kind in ("SynchronousSGD", "PipeSGD"):
            sums = "halving-doubling" if "HalvingDoubling" in str(item.algorithm.collective) else "ring"
            return f"{'synchronous' if kind == 'SynchronousSGD' else 'Pipe-SGD'}, {sums}"
        return {"LayerwiseSGD": "layer-wise", "BackupSGD": "parameter server", "NoCommunication": "no communication"}[
            kind
        ]

    rates: dict[Any, dict[int, float]] = {}
    usual: dict[Any, float] = {}
    for item in kept:
        p, late = item.how["workers"], bool(item.how["compute"].stragglers)
        place = name_of(item), item.how["network"].name, p
        if late and item.how.get("trace_steps") == 0:
            rates.setdefault((*place, item.how["batch_size"]), {})[item.how["seed"]] = (
                p * item.how["batch_size"] * steps / item.run.info["result"]["seconds"]
            )
        elif not late:
            usual[place] = usual_step_s(item.run)
    mean = {key: sum(found.values()) for key, found in rates.items()}
    several = [p for p in workers if p > 1]
    again = Again(labels=[*(link.name for link in links), names["task"].name])
    again.text("of gradients", num_bytes, batch, alone_s / 3, 2 * alone_s / 3, 0, names["jitter"])
    for link in links:
        again.text(f"Strong scaling on {link.name}", names["global_batch"])
    again.text("Time of a step with", most)
    rows = []
    for link in links:
        for p in several:
            slowest_s = alone_s * fresh_s(lambda u: np.exp(names["jitter"] * ndtri(u) - names["jitter"] ** 2 / 2), p, p)
            rows.append([p, alone_s, slowest_s, ring_s(num_bytes, p, link)])
            if not hasattr(link, "between"):
                rows[-1] += [2 * (p - 1) * link.latency_s, halving_s(num_bytes, p, link), server_s(num_bytes, p, link)]
    again.text("Closed forms", rows)
    off = []
    for link in links:
        for p in several:
            sum_s = ring_s(num_bytes, p, link)
            off.append(abs(usual["synchronous, ring", link.name, p] / (alone_s + sum_s) - 1))
            pipe_s = alone_s + sum_s if width == 1 else max(alone_s, sum_s)
            off.append(abs(usual["Pipe-SGD, ring", link.name, p] / pipe_s - 1))
    places = [(link.name, p) for link in links for p in several]
    gain = [usual["synchronous, ring", *place] / usual["Pipe-SGD, ring", *place] for place in places]
    layers = [usual["layer-wise", *place] / usual["Pipe-SGD, ring", *place] for place in places]
    pairs = [
        after / before
        for link in links
        for before, after in zip(
            rates["synchronous, ring", link.name, most, batch].values(),
            rates["Pipe-SGD, ring", link.name, most, batch].values(),
            strict=True,
        )
    ]
    fastest: dict[tuple[str, str], int] = {}
    lines: list[Any] = []
    for link in links:
        first = max(found for key, found in mean.items() if key[1:] == (link.name, workers[0], batch)) / workers[0]
        for name in ("synchronous, ring", "Pipe-SGD, ring"):
            lines.append(mean[name, link.name, most, batch] / most / first)
        for name in ("synchronous, ring", "synchronous, halving-doubling"):
            shared = {
                p: mean.get((name, link.name, p, names["global_batch"] // p), 0.0)
                for p in workers
                if p <= names["global_batch"]
            }
            fastest[name, link.name] = max(shared, key=lambda p: shared[p])
        lines.append(fastest["synchronous, ring", link.name])
    answer = [max(gain), min(gain + layers), most, most, np.mean(min(pairs)), most, names["global_batch"], lines]
    again.text("efficiency", answer)
    key = "daily2016leveraging/"
    again.claim(f"{key}delay-fastest-at-any-number", min(gain + layers))
    bare = [usual["layer-wise", *place] / usual["no communication", *place] for place in places]
    again.claim(f"{key}layer-wise-within-its-bounds", min(bare))
    if width == 2:
        again.claim("li2018pipesgd/doubles-at-most-at-any-number", max(gain))
    again.claim("li2018pipesgd/model-holds-for-thousands", max(off))
    again.claim("li2018pipesgd/scales-better-than-d-sync", min(pairs))
    equal = [link.name for link in links if not hasattr(link, "between")]
    later = [fastest["synchronous, halving-doubling", name] / fastest["synchronous, ring", name] for name in equal]
    if equal:
        again.claim(f"{key}rings-end-strong-scaling-first", min(later))
    return again


def interconnect(names: Names, kept: list[Kept]) -> Again:
    p, every, width = names["workers"], names["every"], names["width"]
    links, num_bytes = names["links"] + names["hosts"], 4 * num_values(names["task"])
    slow = {link.name: link for link in links}[names["links"][0].name]
    alone_s = names["compute_ms"] / 1e3 or 2 * num_bytes / _named(names["reference"]).bandwidth_bytes_per_s
    smaller = {"truncate16": 2.0}[names["codec"]]
    coded = next(item.how["network"] for item in kept if item.how["network"].name == slow.name)
    encode_s, decode_s = coded.encode_s_per_byte, coded.decode_s_per_byte

    def last_s(run: Any) -> float:
        ends = ends_of(run)
        return float((ends[-1] - ends[-1 - every]) / every)

    kinds = [
        "synchronous",
        "its codec",
        "layer-wise",
        "Pipe-SGD",
        "Pipe-SGD, its codec",
        "server",
        "asynchronous",
        "local",
    ]
    many, count = len(kinds), len(links)
    jittered = [item.run for item in kept[: many * count]]
    took = {
        (link.name, kind): last_s(jittered[many * i + j])
        for i, link in enumerate(links)
        for j, kind in enumerate(kinds)
    }
    share = {
        (link.name, kind): hidden_share(jittered[many * i + j], 1)
        for i, link in enumerate(links)
        for j, kind in enumerate(kinds)
    }
    still = [last_s(item.run) for item in kept[many * count :]]
    late, waiting, layered = (still[i * count : (i + 1) * count] for i in range(3))
    ratio = [ring_s(num_bytes, p, link) / alone_s for link in links]
    again = Again(labels=[*(link.name for link in links), names["task"].name, names["codec"]])
    text = [num_bytes, alone_s / 3, 2 * alone_s / 3, 0, names["jitter"]]
    again.text("of gradients", text, smaller, 1e-9 / encode_s, 1e-9 / decode_s)
    again.text("Time of a step with", p)
    again.text(
        "Mean time of a step",
        [[*([every] if kind == "local" else []), *(took[link.name, kind] for link in links)] for kind in kinds],
    )
    again.text(
        "relative to synchronous",
        [[took[link.name, "synchronous"] / took[link.name, kind] for link in links] for kind in kinds],
    )
    again.text("is hidden", [[share[link.name, kind] for link in links] for kind in kinds])
    gain = [slow_s / quick_s for slow_s, quick_s in zip(waiting, late, strict=True)]
    rows = [[each, gain[i], waiting[i] / layered[i]] for i, each in enumerate(ratio)]
    again.text("Speed-ups, ", p, rows)
    even = 2 * (p - 1) * (1 - 1 / smaller) / (p * (encode_s + decode_s))
    if even * smaller * decode_s > 1:  # decoding is longer than an encoded block on the wire
        even = (p - 1) * (2 - 1 / smaller) / (p * encode_s + (2 * p - 1) * decode_s)
    even /= 125e6
    again.text("Break-even of", p, even)
    simulated = iter(still[3 * count :])
    off, wrong = [], 0
    for item in kept[(many + 3) * count :: 4]:
        link = item.how["network"]
        plain_s, coded_s = ring_s(num_bytes, p, link), coded_ring_s(num_bytes, p, link, smaller)
        found = [next(simulated) for _ in range(4)]
        told = [alone_s + plain_s, alone_s + coded_s]
        told += told if width == 1 else [max(alone_s, plain_s), max(alone_s, coded_s)]
        off += [abs(one / other - 1) for one, other in zip(found, told, strict=True)]
        wrong += (found[1] < found[0]) != (told[1] < told[0])
    answer: list[Any] = [max(gain), min(min(a, b) / c for a, b, c in zip(waiting, layered, late, strict=True)), even]
    for link in links:
        fast = {kind: took[link.name, "synchronous"] / took[link.name, kind] for kind in kinds}
        answer += [fast["Pipe-SGD"], fast["its codec"], fast["local"]]
    again.text("AGD gains most on", answer)
    key = "daily2016leveraging/"
    far = [abs(math.log(each)) for each in ratio]
    again.claim(f"{key}gains-most-on-the-balanced-network", far[int(np.argmax(gain))] - min(far))
    again.claim(
        f"{key}delay-never-slower-on-any-network",
        min(min(a, b) / c for a, b, c in zip(waiting, layered, late, strict=True)),
    )
    again.claim("li2018pipesgd/doubles-at-most-on-any-network", max(gain))
    by_name = dict(zip((link.name for link in links), gain, strict=True))
    if {"10 Gbit/s Ethernet", "InfiniBand HDR"} <= set(by_name):
        again.claim(f"{key}infiniband-leaves-less-to-hide", by_name["10 Gbit/s Ethernet"] / by_name["InfiniBand HDR"])
    again.claim("li2018pipesgd/codec-helps-where-formula-says", wrong)
    again.claim("li2018pipesgd/codec-steps-are-closed-forms", max(off))
    return again


def _named(name: str) -> Any:
    from workbench import costs

    return costs.get(name)


def stragglers(names: Names, kept: list[Kept]) -> Again:
    total, steps, drawn, shown = (names[key] for key in ("total", "steps", "drawn", "shown"))
    often, spreads, overhead = names["often"], names["spreads"], names["overhead"]
    slope = (names["few_updates"] - names["many_updates"]) / (1 / names["few_workers"] - 1 / names["many_workers"])
    limit = names["few_updates"] - slope / names["few_workers"]

    def quantile(distribution: str, spread: float) -> Callable[[Array], Array]:
        """Of mean 1."""
        if distribution == "lognormal":
            sigma = math.sqrt(math.log(1 + spread**2))
            return lambda u: np.exp(sigma * ndtri(u) - sigma**2 / 2)
        if distribution == "shifted exponential":
            return lambda u: 1 - spread - spread * np.log1p(-u)  # standard deviation = mean of the exponential part
        if distribution == "Pareto":
            shape = 1 + math.sqrt(1 + spread**-2)
            return lambda u: (1 - 1 / shape) * (1 - u) ** (-1 / shape)
        usual = 1 - spread * math.sqrt(often / (1 - often))  # two values of mean 1 and variance spread^2
        return lambda u: np.where(u < 1 - often, usual, 1 + spread * math.sqrt((1 - often) / often))

    from workbench.rng import generator

    def draws(of: int) -> Array:
        return generator(0, "arrivals").random((drawn, of))

    def best(waits: Array) -> tuple[int, float, Array]:
        """Backups, how many times as fast as none, and the time to the goal of each number."""
        times = np.array([(limit + slope / (total - b)) * (wait + overhead) for b, wait in enumerate(waits)])
        return int(times.argmin()), float(times[0] / times.min()), times

    distributions = ("lognormal", "shifted exponential", "Pareto", "bimodal")
    carried = {
        distribution: carried_s(quantile(distribution, shown)(draws(total)), range(total, 0, -1))
        for distribution in distributions
    }
    late = {distribution: best(carried[distribution].mean(1)) for distribution in distributions}
    fresh = {
        distribution: [fresh_s(quantile(distribution, shown), total - b, total) for b in range(total)]
        for distribution in distributions
    }
    region = {
        (distribution, s): best(carried_s(quantile(distribution, s)(draws(total)), range(total, 0, -1)).mean(1))
        for distribution in distributions
        for s in spreads
    }
    again = Again(labels=["I(N)"])
    again.text("I(N) =", limit, 1, slope / limit)
    again.text("Mean time until", total, shown)
    simulated = [updates_of(item.run)[-1]["seconds"] / steps for item in kept]
    rows = []
    for b, found in zip(names["checked"], simulated, strict=False):
        parts = [part.mean() for part in np.array_split(carried["lognormal"][b], 10)]
        error = np.std(parts, ddof=1) / math.sqrt(10) * math.sqrt(drawn / steps)
        rows.append([b, found, carried["lognormal"][b].mean(), error, fresh["lognormal"][b]])
    again.text("Time of a step, lognormal", shown, steps, rows)
    again.text("Time to the goal", total, shown)
    again.text(
        "machines, spread",
        total,
        shown,
        [[*best(np.array(fresh[distribution]))[:2], *late[distribution][:2]] for distribution in distributions],
    )
    again.text("Best b of", total, [[region[distribution, s][0] for s in spreads] for distribution in distributions])
    again.text(
        "Times as fast as without", [[region[distribution, s][1] for s in spreads] for distribution in distributions]
    )
    paid = {}
    for distribution in distributions:
        costs = []
        for b in range(min(total, 41)):
            costs.append((total + b) * carried_s(quantile(distribution, shown)(draws(total + b)), [total]).mean())
        paid[distribution] = int(np.argmin(costs)), min(costs) / costs[0]
    again.text("Machine-seconds with b", total, shown)
    num_slow = max(1, round(names["slow_share"] * total))
    again.text("gradients take", num_slow, total, names["slow_factor"])
    idle = {}
    for distribution in distributions:
        b, waits = late[distribution][0], carried[distribution].mean(1)
        idle[distribution] = 1 - 1 / waits[0], b, 1 - (total - b) / (total * waits[b])
    again.text("share of their time", total, shown, list(idle.values()))

    tried = len({0, num_slow - 1, num_slow, 2 * num_slow} & set(range(min(total - 1, 3 * num_slow + 2))))
    checked = len(names["checked"])
    persistent = {
        item.algorithm.backups: seconds
        for item, seconds in zip(kept[checked : checked + tried], simulated[checked:], strict=False)
    }
    steady = best(np.array([fresh_s(quantile("lognormal", 0.02), total - b, total) for b in range(total)]))[0]
    numbers, gains = (
        [late[distribution][0] for distribution in distributions],
        [late[distribution][1] for distribution in distributions],
    )
    cheapest = [paid[distribution][1] for distribution in distributions]
    waiting, _, unused = max(idle.values())
    again.text(
        "the best number of backups of",
        *(shown, total, min(numbers), max(numbers), min(gains), max(gains), 0.02, steady, num_slow),
        *(persistent[num_slow], persistent[num_slow - 1] / names["slow_factor"]),
        *(min(cheapest), max(cheapest), waiting, unused),
    )
    again.claim("chen2016revisiting/steady-machines-need-none", steady)
    again.claim(
        "chen2016revisiting/helps-under-every-distribution", [late[distribution][1] for distribution in distributions]
    )
    again.claim("chen2016revisiting/hardware-is-repaid", [paid[distribution][1] for distribution in distributions])
    again.claim("chen2016revisiting/persistent-needs-as-many", persistent[num_slow])
    again.claim("chen2016revisiting/one-backup-too-few", persistent[num_slow - 1] / names["slow_factor"])
    return again


NOTEBOOKS: dict[str, Callable[[Names, list[Kept]], Again]] = {
    "10-scaling": scaling,
    "11-interconnect": interconnect,
    "12-stragglers": stragglers,
    **recomputed_delays.NOTEBOOKS,
    **recomputed_backups.NOTEBOOKS,
    **recomputed_pipes.NOTEBOOKS,
}
