"""What each notebook on Pipe-SGD (62 to 68) must show, computed again as in `recomputed`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import optimize

from tests.notebooks.formulas import (
    COMMUNICATES,
    Array,
    Names,
    covered,
    ends_of,
    evaluations_of,
    first_at,
    num_values,
    parts_of,
    ring_s,
    times_of,
    usual_step_s,
    with_ends,
)
from tests.notebooks.shown import Again, Kept

KEY = "li2018pipesgd/"
RULES = ("1 / (1 + tau)", "1 / (2 tau + 1)", "1 + tau")

# -- times of steps ------------------------------------------------------------------------------------------------------


def long_run_s(run: Any, first: int) -> float:
    """Mean step after that one."""
    return float(np.diff(ends_of(run)[first:]).mean())


def operations(name: str) -> float:
    """Of forward and backward of one sample: three times those of forward, but for the first layer, whose input has no gradient."""
    import torch

    from workbench import problems
    from workbench.problems.loading import fetch

    problem = problems.get(name, synthetic=True)
    with torch.device("meta"):
        model = problem.model()
    counts: list[float] = []

    def count(module: Any, _: Any, output: Any) -> None:
        # An output is a sum of as many products as a filter has weights
        counts.append(2 * output[0].numel() * module.weight[0].numel())

    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.register_forward_hook(count)
    model(fetch(problem.train_data(), [0, 1])[0].to("meta"))
    return 3 * sum(counts) - counts[0]


def coded_s(num_bytes: float, p: int, link: Any, codec: Any = None) -> float:
    """Seconds of a ring with encoded hops; a message has whole values, and the header of its codec."""
    values = max(1, round(num_bytes / p / 4))
    block = num_bytes / p * (codec.wire_bytes(values) / (4 * values) if codec else 1.0)
    wire_s = link.latency_s + block / link.bandwidth_bytes_per_s
    encode_s, decode_s = (
        num_bytes / p * (each if codec else 0.0) for each in (link.encode_s_per_byte, link.decode_s_per_byte)
    )
    work_s = p * (encode_s + decode_s) + (p - 1) * (max(0.0, decode_s - wire_s) + num_bytes / p * link.sum_s_per_byte)
    return float(2 * (p - 1) * wire_s + work_s)


def _warm(run: Any) -> int:
    """The first step after a tenth of those in the trace."""
    steps = sorted(set(run.spans.table["step"][run.spans.table["step"] >= 0].tolist()))
    return int(steps[min(max(1, len(steps) // 10), 10)])


# -- sums with a codec ------------------------------------------------------------------------------------------------------


def over(codec: Any, values: Any) -> Any:
    """What is decoded of an encoding."""
    return codec.decode(codec.encode(values, None), values)


def ring_sum(rows: Sequence[Any], codec: Any) -> Any:
    """Of one tensor a rank: block b begins at rank b + 1, is encoded in every hop, and once more when it is whole at rank b."""
    p, size = len(rows), len(rows[0])
    # A bucket ends in three numbers that are not encoded: its weight, a word, a count
    small, extra = divmod(size + 3, p)
    cuts = [min(size, block * small + min(block, extra)) for block in range(p + 1)]
    blocks = []
    for block, (begin, end) in enumerate(pairwise(cuts)):
        partial = rows[(block + 1) % p][begin:end]
        for hop in range(2, p + 1):
            partial = rows[(block + hop) % p][begin:end] + over(codec, partial)
        blocks.append(over(codec, partial))
    return np.concatenate(blocks)


def once_sum(rows: Sequence[Any], codec: Any) -> Any:
    """Each rank's block is encoded once, and so is the sum of each block."""
    blocks = []
    for pieces in zip(*(row.tensor_split(len(rows)) for row in rows), strict=True):
        blocks.append(over(codec, sum(over(codec, piece) for piece in pieces)))
    return np.concatenate(blocks)


def group_sum(rows: Sequence[Any], codec: Any = None) -> Any:
    """A tree at the first of a group: half of the ranks send what they have to the other half, and so on."""
    through = (lambda values: over(codec, values)) if codec else lambda values: values
    found = list(rows)
    while len(found) > 1:
        found = [found[i] + through(found[i + 1]) if i + 1 < len(found) else found[i] for i in range(0, len(found), 2)]
    return found[0]


def error_of(found: Any, values: Any) -> float:
    """Root mean square of the mean that is applied, over that of the exact one; of 2, 4, 8, ... ranks, whose division is exact."""
    exact = values.double().mean(0).numpy()
    return float(np.linalg.norm(found / np.float32(len(values)) - exact) / np.linalg.norm(exact))


def dealt(values: Any) -> Any:
    """The row of each rank: samples are shuffled."""
    from workbench.problems.base import Sampler

    sampler = Sampler(len(values), 1, len(values), 0)
    return values[[int(sampler.share(0, rank)[0]) for rank in range(len(values))]]


# -- a quadratic ------------------------------------------------------------------------------------------------------------


def stable_limit(delay: int, momentum: float) -> float:
    """The eta lambda at which a root of z^(d+2) - (1 + mu) z^(d+1) + mu z^d + eta lambda leaves the unit circle."""

    def largest(step: float) -> float:
        terms = np.zeros(delay + 3)
        terms[:3] = 1, -1 - momentum, momentum
        terms[delay + 1] += step
        return float(abs(np.roots(terms)).max()) - 1

    return float(optimize.brentq(lambda step: largest(step) - 1e-12, 1e-4, 5.0))


def trained_limit(limit: float, delay: int, momentum: float, modes: int, steps: int) -> float:
    """Of modes around the limit, the last below which all shrink, by the largest in the second and in the last quarter."""
    rates = limit * np.linspace(0.95, 1.05, modes)
    path, speed = [np.full(modes, 1e-150)], np.zeros(modes)
    for t in range(steps):
        speed = momentum * speed + (rates * path[t - delay] if t >= delay else 0.0)  # until then no sum has come
        path.append(path[t] - speed)
    seen, quarter = np.abs(path[1:]), steps // 4
    shrank = seen[-quarter:].max(0) < seen[quarter : 2 * quarter].max(0)
    return float(rates[int(np.argmin(shrank)) - 1])


# -- studies -------------------------------------------------------------------------------------------------------------


def time_breakdown(names: Names, kept: list[Kept]) -> Again:
    workloads, networks, shown, p, steps = (
        names[key] for key in ("workloads", "networks", "shown", "workers", "steps")
    )
    links, algorithms, runs = names["links"], names["algorithms"], iter([item.run for item in kept])
    found = {(w, m, link): next(runs) for w in workloads for m in algorithms for link in networks}
    parts = {key: times_of(run, 4, steps - 2) for key, run in found.items() if key[1] != "PS-Sync"}
    again = Again(labels=[*networks, *workloads, links[shown].name])
    sums, told, alone, off = {}, {}, {}, []
    for w, batch in zip(workloads, names["batches"], strict=True):
        alone[w] = names["launch_ms"] / 1e3 + batch * operations(w) / names["tflops"] / 1e12
    for w, m, link in parts:
        key = w, m, link
        sums[key] = coded_s(4 * num_values(names["tasks"][w]), p, links[link], algorithms[m].collective.codec)
        told[key] = sums[key] if m.startswith("D-Sync") else max(0.0, sums[key] - alone[w])
        off.append(abs(parts[key]["exposed"] - told[key]) / parts[key]["step"])
    again.text("Time of a step, simulated", p, names["tflops"])
    short = [key for key in parts if key[1].startswith("Pipe") and sums[key] <= 0.95 * alone[key[0]]]
    plain = [key for key in parts if key[1] == "Pipe-SGD" and sums[key] > alone[key[0]]]
    ratios = [parts[w, "Pipe-SGD+Q", link]["exposed"] / parts[w, m, link]["exposed"] for w, m, link in plain]
    least = [parts[key]["hidden"] / (parts[key]["hidden"] + parts[key]["exposed"]) for key in short]
    again.claim(f"{KEY}exposed-is-what-is-longer", max(off))
    again.claim(f"{KEY}communication-hidden-at-width-two", min(least))
    again.claim(f"{KEY}compression-hides-more", max(ratios))
    rows = [
        [*(parts[key][each] for each in ("step", "compute", "hidden", "exposed")), told[key]]
        for key in parts
        if key[2] == shown
    ]
    again.text("A step on", rows)
    rows = []
    for w in workloads:
        for m in ("D-Sync+T", "D-Sync+Q", "Pipe-SGD+T", "Pipe-SGD+Q"):
            spent = parts_of(found[w, m, shown], 4, steps - 2)
            codec_s, wire_s = (
                (spent[one] + spent[other]) / p / (steps - 6) for one, other in (("encode", "decode"), ("wire", "none"))
            )
            step_s = parts[w, m, shown]["step"]
            rows.append([codec_s, wire_s, codec_s / step_s, 1 - step_s / parts[w, m[:-2], shown]["step"]])
    again.text("Seconds a step and rank", names["codec_gb_per_s"], rows)
    again.whole = False  # a calibration is shown, which has tests of its own
    exposed = {
        m: np.array([times_of(run, _warm(run))["exposed"] for run in names["real"][m]]) for m in ("D-Sync", "Pipe-SGD")
    }
    again.claim(f"{KEY}pipe-exposes-less-on-ranks", exposed["Pipe-SGD"] / exposed["D-Sync"])
    again.text("Time of a step, wide-mlp", 1e6 * names["real_megabytes"])
    usual = {
        (what, m): np.array([usual_step_s(run) for run in names[what][m]])
        for what in ("real", "predicted")
        for m in names["real_algorithms"]
    }
    missed = [abs(usual["predicted", m] / usual["real", m] - 1) for m in names["real_algorithms"] if m != "D-Sync"]
    answer: list[Any] = [0, max(off), min(least), 8, min(ratios), max(ratios), max(row[2] for row in rows)]
    answer += [-max(row[3] for row in rows), -min(row[3] for row in rows), p]
    answer += [with_ends(exposed["Pipe-SGD"] / exposed["D-Sync"]), with_ends(np.mean(missed, axis=0))]
    again.text("D-Sync exposes all communication m", answer)
    return again


def timing_model(names: Names, kept: list[Kept]) -> Again:
    models, workers, networks, links, shares, segments = (
        names[key] for key in ("models", "workers", "networks", "links", "shares", "segments")
    )
    runs = iter([item.run for item in kept])
    num_bytes = {w: 4 * num_values(names["tasks"][w]) for w in names["models"]}

    def step_s() -> float:
        return long_run_s(next(runs), 4)

    off = []
    for name, link, p in ((name, link, p) for name in models for link in networks for p in workers):
        sum_s = coded_s(num_bytes[name], p, links[link])
        for share in shares:
            off += [step_s() / (sum_s * (1 + share)) - 1, step_s() / (sum_s * max(1.0, share)) - 1]
    servers = []
    for p in (2, 4, 8):
        ring, shared, queued = (step_s() for _ in range(3))
        servers.append([p, p**2 / (p - 1), shared / ring, queued / ring])
    # Pipe-SGD and D-Sync in parts, bound by communication and by compute
    for _ in range(4 * len(segments)):
        step_s()
    link, surplus, still = links[networks[-1]], [], []
    for p in workers:
        slow_s, quick_s = step_s(), step_s()
        surplus += [(step_s() - slow_s) / (2 * (count - 1) * (p - 1) * link.latency_s) - 1 for count in segments[1:]]
        still += [step_s() / quick_s - 1 for _ in segments[1:]]
    gains = []
    for _ in range(len(models) * len(networks)):
        parts = [step_s() for _ in segments[1:]]
        gains.append(step_s() / min(parts))
    again = Again(labels=["p^2/(p-1)", *models, *networks, *(one.name for one in links.values())])
    again.claim(f"{KEY}steps-follow-the-model", max(map(abs, off)))
    again.claim(f"{KEY}server-over-ring", max(abs(shared / told - 1) for _, told, shared, _ in servers))
    again.text("Lines by formula", workers[-1])
    again.text("communication alone", servers)
    again.text("Lines by formula", 4)
    again.claim(f"{KEY}segments-cost-latency", max(map(abs, surplus)))
    again.claim(f"{KEY}segments-free-under-compute", max(map(abs, still)))
    again.claim(f"{KEY}layers-help-d-sync", min(gains))
    again.whole = not names["real_batches"]
    taken = {L: np.array([usual_step_s(run) for run in names["in_parts"][f"L = {L}"]]) for L in names["real_segments"]}
    most = names["real_segments"][-1]
    longer = taken[most] / taken[1]
    again.claim(f"{KEY}segments-cost-on-ranks", longer)
    again.text("Pipe-SGD on", names["real_workers"], names["real_batch"])
    answer = [
        max(map(abs, off)),
        max(abs(shared / told - 1) for _, told, shared, _ in servers),
        max(map(abs, surplus)),
        max(map(abs, still)),
        min(gains),
        max(gains),
    ]
    again.text("The formulas and the simulated steps differ", answer, most, with_ends(longer))
    return again


def codec_cost(names: Names, kept: list[Kept]) -> Again:
    import torch

    seeds, few, numel, link = (names[key] for key in ("seeds", "message_workers", "numel", "link"))
    # Costs: (rounds, 2)
    codecs, costs = (
        names["codecs"],
        {name: np.array(found) for name, found in names["costs"].items()},
    )
    hops, sums = [name for name in codecs if name in names["pays"]], iter([ends_of(item.run)[-1] / 2 for item in kept])
    ratio = {name: 4 * numel / codec.wire_bytes(numel) for name, codec in codecs.items()}

    def even(name: str, p: int, number: int) -> float:
        """Gbit/s at which a ring with the codec takes as long as one without, where latency is nothing."""
        (encode_s, decode_s), smaller = costs[name][number], ratio[name]
        rate = 2 * (p - 1) * (1 - 1 / smaller) / (p * (encode_s + decode_s))
        if rate * smaller * decode_s > 1:  # decoding is longer than an encoded block on the wire
            rate = (p - 1) * (2 - 1 / smaller) / (p * encode_s + (2 * p - 1) * decode_s)
        return float(8e-9 * rate)

    light, heavy = [*codecs][:2], [*codecs][2:]
    both = {name: found.sum(1) for name, found in costs.items()}
    longer = np.min([both[name] for name in heavy], axis=0) / np.max([both[name] for name in light], axis=0)
    share = []
    for encode_s, decode_s in costs[light[1]]:
        slow = replace(link, encode_s_per_byte=encode_s, decode_s_per_byte=decode_s)
        free = replace(link, encode_s_per_byte=0.0, decode_s_per_byte=0.0)
        share.append(1 - coded_s(4 * numel, 4, free, codecs[light[1]]) / coded_s(4 * numel, 4, slow, codecs[light[1]]))
    off = max(abs(next(sums) / next(sums) - 1) for _ in hops for _ in few)
    slopes: dict[str, list[float]] = {"hops": [], "once": [], "truncated": []}
    for seed in seeds:
        found = []
        for p in names["error_workers"]:
            values = dealt(torch.randn(p, p * names["block"], generator=torch.Generator().manual_seed(seed)))
            quantised, cut = codecs[light[1]], codecs[light[0]]
            all_ = ring_sum(values, quantised), once_sum(values, quantised), ring_sum(values, cut)
            found.append([error_of(one, values) for one in all_])
        fitted = np.polyfit(np.log(np.array(names["error_workers"]) + 1), np.log(found), 1)[0]
        for kind, slope in zip(slopes, fitted, strict=True):
            slopes[kind].append(float(slope))
    again = Again(labels=[*codecs, link.name, "(p + 1)", "8 bits"])
    again.claim(f"{KEY}heavier-codecs-take-longer", longer)
    again.claim(f"{KEY}codec-time-is-no-trifle", share)
    again.text("Medians of", len(seeds), [[ratio[name], 1e9 * np.median(costs[name], axis=0)] for name in codecs])
    again.claim(f"{KEY}break-even-by-formula", off)
    again.text("a line at", len(seeds), 10)
    again.claim(f"{KEY}quantised-hops-grow-as-root", slopes["hops"])
    again.claim(f"{KEY}once-stays", slopes["once"])
    again.claim(f"{KEY}truncated-hops-grow-linearly", slopes["truncated"])
    again.text("Error of sums on simulated workers", names["block"], len(seeds))
    cut, *rates = ([even(name, 4, number) for number in range(len(seeds))] for name in hops)
    answer = [4, 16, with_ends(cut), [with_ends(found) for found in rates], with_ends(longer), 4, with_ends(share)]
    again.text("shortens a sum below", answer, [with_ends(slopes[kind]) for kind in ("hops", "once", "truncated")])
    return again


def parts_of_sums(names: Names, kept: list[Kept]) -> Again:
    megabytes, workers, seeds, many = (names[key] for key in ("megabytes", "workers", "seeds", "jitter_steps"))
    runs, p, top = iter([item.run for item in kept]), max(names["workers"]), max(names["real_megabytes"])

    def busy_s(run: Any) -> float:
        """Seconds in which a rank communicates, all ranks together."""
        table, kinds = run.spans.table, np.isin(run.spans.kind_names, COMMUNICATES)
        mine = [table[kinds & (table["rank"] == rank)] for rank in set(table["rank"].tolist())]
        return sum(covered(rows["start_s"], rows["end_s"]) for rows in mine)

    simulated, off = {}, []
    for mb in megabytes:
        for count in workers:
            for name in names["rings"]:
                run = next(runs)
                simulated[mb, count, name] = parts_of(run)
                if name == "none":
                    off.append(abs(busy_s(run) / count / ends_of(run)[-1] - 1))

    def late_s(run: Any) -> float:
        ends = np.zeros((many, p))
        for row in run.spans.table[run.spans.kind_names == "backward"]:
            ends[row["step"], row["rank"]] = max(ends[row["step"], row["rank"]], row["end_s"])
        return float((ends.max(1) - ends.mean(1)).mean())

    even_s, rough = busy_s(next(runs)), [next(runs) for _ in seeds]
    skew = [(busy_s(run) - even_s) / p / many / late_s(run) - 1 for run in rough]
    again = Again(labels=[names["link"].name, "8 bits", "16 bits", "4 chunks"])
    again.claim(f"{KEY}parts-make-up-the-sum", max(off))
    again.claim(f"{KEY}skew-is-waiting", skew)
    again.text("D-Sync's ring", p, megabytes[-1] * 1e6, len(seeds))

    def share(found: dict[str, float], part: str) -> float:
        """Of all parts."""
        return found[part] / sum(found.values())

    real = {
        (mb, name): [parts_of(run, 2) for run in found]
        for mb, by_name in names["real"].items()
        for name, found in by_name.items()
    }
    plain = real[top, "none"]
    usual = {name: np.array([usual_step_s(run) for run in found]) for name, found in names["real"][top].items()}
    ratios, slower = [one["wire"] / one["sum"] for one in plain], usual["8 bits"] / usual["none"]
    again.claim(f"{KEY}wire-longer-than-sum", ratios)
    if names["launcher"] == "local":
        again.claim(f"{KEY}codec-costs-more-than-it-saves-on-one-machine", slower)
    again.text("D-Sync's ring", names["real_workers"], len(seeds))
    answer: list[Any] = [max(off), p]
    for mb in (megabytes[0], megabytes[-1]):
        answer += [share(simulated[mb, p, "none"], "wire"), mb * 1e6]
    answer += [with_ends(skew), names["real_workers"], top * 1e6]
    answer += [with_ends([share(one, part) for one in plain]) for part in ("wire", "wait")]
    again.text("In simulation waiting", answer, with_ends(ratios), with_ends(slower))
    return again


def hierarchical_sums(names: Names, kept: list[Kept]) -> Again:
    import torch

    megabytes, p, group, linear, chunks = (
        names[key] for key in ("megabytes", "workers", "group", "linear_workers", "chunks")
    )
    sums = iter([ends_of(item.run)[-1] / 2 for item in kept if item.run.info["settings"].get("steps") != 1])
    order = ["linear", "tree", "halving-doubling", "ring", "two levels"]
    taken = {
        (where, name): np.array([next(sums) for _ in megabytes]) for where in ("equal links", "hosts") for name in order
    }
    gain = {where: taken[where, "ring"] / taken[where, "two levels"] for where in ("equal links", "hosts")}
    off = max(abs(next(sums) / next(sums) / count - 1) for count in linear)
    kinds = ["ring, no codec", "ring, every hop", "once around the sum", "no codec", "each level", "between hosts"]
    spent, free = {}, {}
    for kind in kinds:
        spent[kind], free[kind] = next(sums), next(sums)
    errors: dict[str, list[float]] = {kind: [] for kind in kinds}
    codec = names["kinds"]["ring, every hop"].codec
    for seed in names["seeds"]:
        values = dealt(torch.randn(p, names["error_numel"], generator=torch.Generator().manual_seed(seed)))
        groups = values.split(group)
        found = {"ring, every hop": ring_sum(values, codec), "once around the sum": once_sum(values, codec)}
        found["between hosts"] = ring_sum([group_sum(rows) for rows in groups], codec)
        found["each level"] = over(
            codec, torch.from_numpy(ring_sum([group_sum(rows, codec) for rows in groups], codec))
        )
        for kind in kinds:
            errors[kind].append(error_of(found[kind], values) if kind in found else 0.0)
    wire, busy = ({count: next(sums) for count in chunks} for _ in range(2))
    best = min(busy, key=lambda count: busy[count])
    hidden = (busy[best] - wire[best]) / (busy[1] - wire[1])
    ratio = np.divide(errors["between hosts"], errors["ring, every hop"])
    rate = 8 / (4 * 10**6 / codec.wire_bytes(10**6) * (names["encode_ns"] + names["decode_ns"]))
    again = Again(labels=[names["hosts"], names["flat"], "8 bits"])
    again.claim(f"{KEY}two-levels-gain-on-hosts", gain["hosts"].min())
    again.claim(f"{KEY}two-levels-need-hosts", gain["equal links"][-1])
    again.claim(f"{KEY}linear-sum-costs-p-rings", off)
    again.text("simulated workers", p)
    again.claim(f"{KEY}codec-a-level-beats-codec-a-hop", ratio)
    rows = [[spent[kind], free[kind], np.mean(errors[kind])] for kind in kinds]
    again.text("simulated workers", megabytes[-1] * 1e6, p, names["encode_ns"], names["decode_ns"], rows)
    again.claim(f"{KEY}chunks-hide-the-codec", hidden)
    again.text("Ring of", names["chunk_workers"], names["chunk_megabytes"] * 1e6, rate)
    quick = [mb * 1e6 for mb, value in zip(megabytes, gain["equal links"], strict=True) if value > 1]
    answer = [
        group,
        gain["hosts"].min(),
        gain["hosts"].max(),
        p,
        gain["equal links"][0],
        megabytes[0] * 1e6,
        gain["equal links"][-1],
    ]
    answer += [
        megabytes[-1] * 1e6,
        quick,
        off,
        with_ends(ratio),
        best,
        hidden,
    ]
    again.text("On hosts of", answer)
    return again


def larger_clusters(names: Names, kept: list[Kept]) -> Again:
    from workbench.resources import shared

    workers, rates, few, seeds = (names[key] for key in ("workers", "rates_mbit", "message_workers", "seeds"))
    known, runs = names["recorded"].calibrations, iter([item.run for item in kept])
    short = {"synchronous": "D-Sync", "Pipe-SGD": "Pipe-SGD", "Pipe-SGD, 16-bit hops": "Pipe-SGD+T"}
    told = json.loads((shared("papers").parent / names["record"]).read_text())["rows"]
    told = [row for row in told if row["algorithm"] in short and not row["fitted"]]
    errors: dict[tuple[int, str], list[float]] = {(hosts, name): [] for hosts in (2, 4) for name in short.values()}
    for row in told:
        errors[row["hosts"], short[row["algorithm"]]].append(abs(row["error"]))
    of_hosts = {p: np.array([abs(row["error"]) for row in told if row["hosts"] == p]) for p in (2, 4)}
    again = Again(labels=[*known, names["record"], *(f"{rate:g} Mbit/s" for rate in rates)])
    again.claim(f"{KEY}model-holds-beyond-its-calibration", of_hosts[4])
    again.text("Relative errors", len(told), 2, [[p, np.median(found), max(found)] for (p, _), found in errors.items()])
    gains, every = {}, []
    for place in ((name, rate) for name in known for rate in rates):
        steps = {p: [long_run_s(next(runs), 4) for _ in range(2)] for p in workers}
        gains[place] = {p: sync / pipe for p, (sync, pipe) in steps.items()}
        every += [*gains[place].values(), *(long_run_s(next(runs), 4) / long_run_s(next(runs), 4) for _ in few)]
    top, lasting = max(workers), [gains[name, rates[0]] for name in known]
    ended = max(line[top] / line[4] for line in lasting)
    again.claim(f"{KEY}at-most-double-at-any-size", min(every) if min(every) < 1 else max(every))
    again.claim(f"{KEY}latency-ends-the-gain", ended)
    again.text("Lines by closed form", 2)
    first = next(iter(known.values()))
    sum_s, rows, off = coded_s(first.shapes.num_bytes, 4, names["link"]), [], []
    for share in names["shares"]:
        longer, slack = max(share, 1.0), max(0.0, 1 - share) / max(share, 1.0)
        for hold in names["holds"]:
            late = [ends_of(next(runs))[-1] - ends_of(next(runs))[-1] for _ in range(2)]
            late = [one / longer / sum_s for one in late]
            rows.append([share, hold, slack, late])
            off += [late[0] - hold, late[1] - max(0.0, hold - slack)]
    again.claim(f"{KEY}hold-up-absorbed-up-to-slack", max(map(abs, off)))
    again.text("One delay", 4, rows)
    calm = {(kind, p): long_run_s(next(runs), 4) for kind in range(2) for p in workers}
    rough = {(kind, p): np.array([long_run_s(next(runs), 4) for _ in seeds]) for kind in range(2) for p in workers}
    milder = (rough[1, top] - calm[1, top]) / (rough[0, top] - calm[0, top])
    again.claim(f"{KEY}pipe-suffers-less-from-jitter", milder)
    again.text("Lognormal compute", names["jitter"], len(seeds))
    again.text("No new measurement", 8, 1)
    extreme = min(every) if min(every) < 1 else max(every)
    answer = [2, 2, with_ends(of_hosts[2]), 4, with_ends(of_hosts[4])]
    answer += [min(workers), top, min(every), extreme, 4, top, ended, 4]
    answer += [max(map(abs, off)), top, with_ends(milder), max(row["hosts"] for row in told)]
    again.text("Calibrated on 2 hosts", answer)
    again.whole = not names["real_on"] and not names["predict_again"]
    return again


def pipeline_width(names: Names, kept: list[Kept]) -> Again:
    p, seeds, widths, momenta, rules, guess = (
        names[key] for key in ("workers", "seeds", "widths", "momenta", "rules", "guess")
    )
    runs, goal, link = iter([item.run for item in kept]), names["target_loss"], names["link"]
    sum_s, shares, filled = ring_s(4 * num_values(names["task"]), p, link), names["shares"], 4 * max(widths)
    steps = {K: [long_run_s(next(runs), filled) / sum_s for _ in shares] for K in widths}
    off = max(abs(one / two - 1) for K in widths if K > 2 for one, two in zip(steps[K], steps[2], strict=True))

    def next_runs() -> list[Any]:
        return [next(runs) for _ in seeds]

    def test_loss(found: list[Any]) -> Array:
        return np.array([min(evaluations_of(run)[-1]["loss"], guess) if run else guess for run in found])

    def train_loss(run: Any) -> float:
        """Over the last tenth of the steps, of all samples."""
        steps = sorted({row["step"] for rows in run.metrics.values() for row in rows}) if run else []
        last, found = steps[len(steps) - max(1, len(steps) // 10) :], []
        for step in last:
            mine = [
                row for rows in run.metrics.values() for row in rows if row["step"] == step and "evaluation" not in row
            ]
            found.append(
                sum(row["loss"] * row["num_samples"] for row in mine) / sum(row["num_samples"] for row in mine)
            )
        return min(float(np.mean(found)), guess) if run else guess

    again = Again(labels=[link.name, *RULES])
    again.claim(f"{KEY}wider-is-not-faster", off)
    again.text("Time of a step over", p, [[K, found] for K, found in steps.items()])
    trained = {K: next_runs() for K in widths}
    late = {
        K: np.array([first_at(run, "seconds", "loss", goal) if run else np.inf for run in found])
        for K, found in trained.items()
    }
    again.text("compute as long as communication", p, len(seeds))
    ahead = np.min([late[K] for K in widths if K != 2], axis=0) / late[2]
    again.claim(f"{KEY}width-two-is-best", ahead)
    rows = []
    for K, found in trained.items():
        right = [evaluations_of(run)[-1]["accuracy"] for run in found if run]
        losses, met = test_loss(found), [late[K].mean()] if np.isfinite(late[K]).all() else []
        rows.append([K, met, losses.mean(), losses.std(ddof=1), [np.mean(right)] if right else []])
    again.text(f"{names['problem']}, {len(seeds)} seeds", len(seeds), rows)

    def accuracy(found: list[Any]) -> Array:
        return np.array([evaluations_of(run)[-1]["accuracy"] if run else 0.1 for run in found])

    plain, (cut, hops, once, fed) = trained[2], (next_runs() for _ in range(4))
    lost = np.mean([accuracy(found) - accuracy(trained[1]) for found in (plain, cut, hops)], axis=0)
    gained = test_loss(once) - test_loss(fed)
    again.claim(f"{KEY}final-accuracy-kept", lost)
    again.claim(f"{KEY}q-needs-no-feedback", gained)
    rows = []
    for bits, found in ((32, plain), (16, cut), (8, hops), (8, once), (8, fed)):
        apart = (accuracy(found) - accuracy(trained[1])).mean()
        rows.append([bits, test_loss(found).mean(), (test_loss(found) - test_loss(plain)).mean()])
        rows[-1] += [accuracy(found).mean(), apart]
    again.text("K = 2, ", p, 2, names["epochs"], len(seeds), rows)
    table, wrong = [], []
    for K in (2, 3):
        for mu in sorted({min(momenta), max(momenta)}):
            next(runs)
            limit = stable_limit(K - 1, mu)
            found = trained_limit(limit, K - 1, mu, names["modes"], names["quadratic_steps"])
            table.append([K, mu, found, limit, 2 * (1 + mu)])
            wrong.append(abs(found / limit - 1))
    again.claim(f"{KEY}stable-below-one-minus-momentum", max(wrong))
    again.text("Largest stable", table)
    moved, mu = {(K, each): next_runs() for K in (1, 2) for each in momenta}, max(momenta)
    careful = np.log([train_loss(one) / train_loss(two) for one, two in zip(moved[2, mu], moved[1, mu], strict=True)])
    again.claim(f"{KEY}momentum-needs-care", careful)
    again.text("learning rate / (1 - momentum)", p, 1, names["effective_lr"], len(seeds))
    ruled = {rule: test_loss(next_runs()) for rule in rules}
    sync, width = test_loss(moved[1, mu]), names["rescaled_width"]
    again.claim(f"{KEY}rescaling-repairs", np.log(ruled["1"] / ruled["1 / (1 + tau)"]))
    again.text(f"{names['problem']}, momentum", mu, names["epochs"], len(seeds))

    def mean_step(width: int, sigma: float, seed: int) -> float:
        """A step computes for 1 once the sum of K steps before is there; sums go one after the other."""
        drawn = np.exp(sigma * np.random.default_rng([seed, 68]).standard_normal(names["link_steps"]))
        computed, ends = 0.0, [0.0] * width
        for seconds in drawn / drawn.mean():
            computed = max(computed, ends[-width]) + 1
            ends.append(max(ends[-1], computed) + seconds)
        return (ends[-1] - ends[width]) / (len(drawn) - 1)

    sigma, widest = max(names["fluctuations"]), max(widths)
    absorbed = [mean_step(2, sigma, seed) / mean_step(widest, sigma, seed) for seed in seeds]
    again.claim(f"{KEY}width-absorbs-fluctuation", absorbed)
    again.text("Communication lognormal", names["link_steps"], len(seeds))
    answer = [2, off, goal, with_ends(ahead), 2, with_ends(lost), 8, with_ends(gained), mu, 2]
    answer += [stable_limit(1, mu) / (2 * (1 + mu)), 1, max(wrong), 2, with_ends(careful), width]
    answer += [ruled["1"].mean(), ruled["1 / (1 + tau)"].mean(), 1, sync.mean()]
    answer += [sigma, 2, with_ends(absorbed), widest]
    again.text("On constant links", answer)
    return again


NOTEBOOKS: dict[str, Callable[[Names, list[Kept]], Again]] = {
    "62-time-breakdown": time_breakdown,
    "63-timing-model": timing_model,
    "64-codec-cost": codec_cost,
    "65-where-all-reduce-spends-time": parts_of_sums,
    "66-hierarchical-sums": hierarchical_sums,
    "67-larger-clusters": larger_clusters,
    "68-pipeline-width": pipeline_width,
}
