"""What each notebook on delays (21 to 32) must show, computed again as in `recomputed`.

Runs on real ranks are read by their rows and spans. What 21 predicts is `calibrate` and `predict`, called again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy import optimize, special, stats

from tests.notebooks.formulas import Array, Names, ends_of, num_values, ring_s, usual_step_s, with_ends
from tests.notebooks.shown import Again, Kept, numbers

KEY = "daily2016leveraging/"

# -- rows of runs ------------------------------------------------------------------------------------------------------


def evaluations_of(run: Any) -> list[tuple[int, float, float]]:
    """(step, test loss, accuracy) of each evaluation, of which each rank has judged a share."""
    found: dict[int, list[dict[str, Any]]] = {}
    for rows in run.metrics.values():
        for row in rows:
            if "evaluation" in row:
                found.setdefault(row["step"], []).append(row["evaluation"])
    total = {step: {key: sum(part[key] for part in parts) for key in parts[0]} for step, parts in sorted(found.items())}
    return [
        (step, part["loss_sum"] / part.get("loss_weight", part["count"]), part["correct"] / part["judged"])
        for step, part in total.items()
    ]


def losses_of(run: Any) -> Array:
    """(steps,) of the minibatches of all ranks, mean over samples."""
    sums: dict[int, Array] = {}
    for rows in run.metrics.values():
        for row in rows:
            if "evaluation" not in row and row["loss"] is not None:
                sums[row["step"]] = sums.get(row["step"], 0.0) + row["num_samples"] * np.array([row["loss"], 1.0])
    return np.array([sums[step][0] / sums[step][1] for step in sorted(sums)])


def parts_of(run: Any) -> dict[str, float]:
    """Mean seconds of a step and rank: compute, hidden communication, exposed communication, neither.

    The first tenth of the traced steps is left out.
    """
    total, count = np.zeros(4), 0
    table, kinds = run.spans.table, np.array(run.spans.kind_names)
    for rank in np.unique(table["rank"]):
        mine, what = table[table["rank"] == rank], kinds[table["rank"] == rank]
        steps = np.unique(mine["step"][what == "forward"])
        first = steps[min(max(1, len(steps) // 10), 10)]
        moments = np.unique([*mine["start_s"], *mine["end_s"]])
        begin_s = mine["start_s"][(what == "forward") & (mine["step"] == first)].min()
        end_s = mine["end_s"][(what != "evaluate") & (mine["step"] >= 0)].max()
        moments = moments[(moments >= begin_s) & (moments <= end_s)]
        middle, length = (moments[1:] + moments[:-1])[:, None] / 2, np.diff(moments)
        on = (mine["start_s"] < middle) & (middle < mine["end_s"])
        computes = (on & np.isin(what, ["forward", "backward", "apply"])).any(1)
        sends = (on & ~np.isin(what, ["forward", "backward", "apply", "wait", "barrier", "evaluate"])).any(1)
        judges = (on & (what == "evaluate")).any(1)
        for at, there in enumerate((computes, sends & computes, sends & ~computes, ~sends & ~computes)):
            total[at] += length[there & ~judges].sum()
        count += int((steps >= first).sum())
    return dict(zip(("compute", "hidden", "exposed", "idle"), (total / count).tolist(), strict=True))


def student(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its interval of 95 %."""
    found = np.array([*values])
    half = stats.t.ppf(0.975, len(found) - 1) * stats.sem(found)
    return float(found.mean()), float(found.mean() - half), float(found.mean() + half)


# -- operations of a network, by its shapes ----------------------------------------------------------------------------


def forward_operations(task: Any) -> tuple[list[int], list[float]]:
    """Of each parameter in order of registration: elements, and operations of an image's forward that are spent where it is used."""
    import torch

    with torch.device("meta"):
        model, batch = task.model(), torch.empty(2, *task.train_data()[0][0].shape)
    done: dict[int, float] = {}

    def note(module: Any, given: Any, came: Any) -> None:
        weights = list(module.parameters(recurse=False))
        if isinstance(module, torch.nn.MultiheadAttention):
            tokens, width = given[0].shape[1:]
            operations = 8 * tokens * width**2 + 4 * tokens**2 * width
        else:
            operations = came.numel() * math.prod(module.weight.shape[1:])  # two of each, of two images
        for weight in weights:
            done[id(weight)] = operations * weight.numel() / sum(each.numel() for each in weights)

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear | torch.nn.MultiheadAttention):
            module.register_forward_hook(note)
    model(batch)
    return [weight.numel() for weight in model.parameters()], [
        done.get(id(weight), 0.0) for weight in model.parameters()
    ]


def final_after(numels: list[int], backward: Any) -> list[tuple[float, float]]:
    """(part of backward that is done, part of the bytes that is final) of each parameter from the last one on."""
    shares, sizes = np.array(backward)[::-1], np.array(numels)[::-1]
    return [*zip((np.cumsum(shares) / shares.sum()).tolist(), (np.cumsum(sizes) / sizes.sum()).tolist(), strict=True)]


def counted(task: Any) -> tuple[float, float, list[tuple[float, float]]]:
    """Operations of an image's forward and backward, which is twice forward but for the first layer, and `final_after` of these."""
    numels, each = forward_operations(task)
    # Its weight; then its bias, or a layer that counts nothing
    first = next(at for at, operations in enumerate(each) if operations)
    weights = [operations if first <= at < first + 2 else 2 * operations for at, operations in enumerate(each)]
    return sum(each), sum(weights), final_after(numels, weights)


def linear_share(task: Any) -> float:
    """Part of the elements in fully connected layers, a transformer's attention among them."""
    import torch

    with torch.device("meta"):
        model = task.model()
    kinds = torch.nn.Linear | torch.nn.MultiheadAttention
    inside = {id(w): w.numel() for module in model.modules() if isinstance(module, kinds) for w in module.parameters()}
    return float(sum(inside.values()) / sum(weight.numel() for weight in model.parameters()))


def gpt2_operations(name: str) -> float:
    """Of forward and backward of 1,024 tokens: of each layer 12 h^2 weights and the attention, of the head h V; backward is twice."""
    width, layers = {
        "gpt2-small": (768, 12),
        "gpt2-medium": (1024, 24),
        "gpt2-large": (1280, 36),
        "gpt2-xl": (1600, 48),
    }[name]
    attention = 4 * 1024**2 * width
    return 3.0 * (layers * (24 * width**2 * 1024 + attention) + 2 * width * 50257 * 1024)


# -- studies -------------------------------------------------------------------------------------------------------------


def same_order(rates: Any, model: str, machines: list[str], at: int) -> float:
    """Of the pairs of algorithms that are 1 % apart on 8 devices of all machines, the share that is ordered the same; 1 without one."""
    found = [np.array([of[8][at] for of in rates[model, machine].values() if 8 in of]) for machine in machines]
    one, other = np.triu_indices(len(found[0]), 1)
    ratios = np.log([each[one] / each[other] for each in found])
    signs = np.sign(ratios[:, (np.abs(ratios) > math.log(1.01)).all(0)])
    return float((signs == signs[0]).all(0).mean()) if signs.size else 1.0


def throughput(names: Names, kept: list[Kept]) -> Again:
    """21: batches a second from the rows of the runs; predictions by `calibrate` and `predict` of the same runs."""
    from workbench.calibration import calibrate, predict

    seeds, models, machines, devices = names["seeds"], names["models"], names["machines"], names["devices"]
    batch_of, agd = dict(zip(models, names["effective_batches"], strict=True)), ("AGD 1", "AGD 2", "AGD 3")
    rates: dict[Any, dict[str, dict[int, Array]]] = {}
    # Not what `predict` simulates
    left = (item for item in kept if any(item.problem is shape.timed for shape in names["shapes"].values()))

    def rate() -> float:
        """Batches a second of the next run, after its fifth step."""
        ends = ends_of(next(left).run)[5:]
        return float((len(ends) - 1) / (ends[-1] - ends[0]))

    everything = ("SGD", "layer-wise", "task-wise", *agd, "no comm")
    for place in ((model, machine) for model in models for machine in machines):
        most_of = {
            name: names["taskwise_devices"] if name == "task-wise" else batch_of[place[0]] for name in everything
        }
        tried = {name: [p for p in devices if p <= most] for name, most in most_of.items()}
        rates[place] = {name: {p: np.array([rate() for _ in seeds]) for p in of} for name, of in tried.items()}
    ahead = {}
    for place, p in ((place, p) for place, found in rates.items() for p in found["SGD"] if p > 1):
        of = rates[place]
        ahead[(*place, p)] = np.max([of[name][p] for name in agd], 0) / np.max(
            [of[name][p] for name in ("SGD", "layer-wise", "task-wise") if p in of[name]], 0
        )
    least = np.min([*ahead.values()], axis=0)
    same = [min(same_order(rates, model, machines, at) for model in models) for at in range(len(seeds))]
    weak = {
        model: {
            name: {p: np.array([p * rate() for _ in seeds]) for p in names["beyond"]}
            for name in names["beyond_algorithms"]
        }
        for model in models
    }
    further = np.min([of["AGD 3"][p] / of["SGD"][p] for of in weak.values() for p in names["beyond"]], axis=0)

    again = Again(labels=[*agd, names["hosts"], *(machine["network"].name for machine in names["machine_of"].values())])
    for model, at in [*((model, at) for model in models for at in range(len(machines)))][1:]:
        again.text(f"{model}, {machines[at]}", batch_of[model])
    again.text(f"{models[0]}, {machines[0]}", batch_of[models[0]])
    rows = [
        [of[name][8].mean() / 8 / of["SGD"][1].mean() for name in ("SGD", "layer-wise", "AGD 1", "AGD 3")]
        for of in rates.values()
    ]
    again.text("Parallel efficiency", 8, rows)
    runs, ranks, algorithms = names["runs"], names["ranks"], names["algorithms"]
    others = [name for name in names["real_algorithms"] if name != "SGD"]
    took = {name: np.array([usual_step_s(run) for run in runs[name]]) for name in others}
    fitted = [calibrate(run) for run in runs["SGD"]]
    told = {
        name: np.array([predict(model, algorithms[name], workers=ranks, draws=0).step_s for model in fitted])
        for name in others
    }
    again.text("Predicted over measured", ranks)
    wrong = np.mean([np.abs(took[name] / told[name] - 1) for name in others], axis=0)
    best = max(
        float(np.mean(np.max([of[name][p] for name in agd], 0) / of["SGD"][p]))
        for of in rates.values()
        for p in of["SGD"]
        if p > 1
    )
    answer = [with_ends(least), best, with_ends(same), names["beyond"][-1], with_ends(further), ranks, with_ends(wrong)]
    again.text("the best AGD has", answer)
    again.claim(f"{KEY}agd-is-fastest", least)
    again.claim(f"{KEY}same-trend-on-both-machines", same)
    again.claim(f"{KEY}agd-beyond-eight", further)
    return again


def falling(losses: Array, leave: float) -> float:
    """The power of the steps with which a loss falls: covariance of the logarithms over the variance of that of the step."""
    t = np.arange(1, len(losses) + 1)
    x, y = np.log(t[t > leave * len(t)]), np.log(losses[t > leave * len(t)])
    return float(-((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def early_accuracy(names: Names, kept: list[Kept]) -> Again:
    """22: iterations from the evaluations, seconds from the rows of the timed runs."""
    seeds, ratios, early, late, workers = (names[key] for key in ("seeds", "ratios", "early", "late", "workers"))
    targets, delayed = [early, *names["between"], late], ("AGD 1", "AGD 2", "AGD 3")
    left = iter(kept)
    runs = {name: [next(left).run for _ in seeds] for name in ("SGD", "layer-wise", *delayed)}
    curves = {name: [evaluations_of(run) for run in group] for name, group in runs.items()}
    hard_runs = {name: [next(left).run for _ in seeds] for name in ("SGD", *delayed)}
    clocks = {(name, ratio): [ends_of(next(left).run) for _ in seeds] for name in ("SGD", *delayed) for ratio in ratios}
    need = {
        (name, target): np.array([next(step + 1 for step, _, right in curve if right >= target) for curve in group])
        for name, group in curves.items()
        for target in targets
    }
    last = {name: np.array([curve[-1][2] for curve in group]) for name, group in curves.items()}
    over = {(name, target): need[name, target] / need["SGD", target] for name in delayed for target in targets}
    rate, won = {}, {}
    for name, ratio in ((name, ratio) for name in delayed for ratio in ratios):
        pairs = [*zip(clocks["SGD", ratio], clocks[name, ratio], strict=True)]
        rate[name, ratio] = np.array([slow[-1] / fast[-1] for slow, fast in pairs])
        for target in targets:
            first = zip(pairs, need["SGD", target], need[name, target], strict=True)
            won[name, ratio, target] = np.array([slow[base - 1] / fast[own - 1] for (slow, fast), base, own in first])
    hits = {
        place: np.where(abs(np.log(by)) < 0.02, np.nan, (rate[place[:2]] > over[place[0], place[2]]) == (by > 1))
        for place, by in won.items()
    }
    right = np.nanmean([*hits.values()], axis=0)
    worst = np.min([of - last["SGD"] for name, of in last.items() if name != "SGD"], axis=0)
    again = Again(labels=[*delayed])
    for words in ("Test loss", "Test accuracy"):
        again.text(words, workers)
    rows = [[[need[name, target].mean() for target in targets], last[name].mean()] for name in curves]
    again.text("Iterations to a test accuracy", workers, rows)
    again.text("Training loss", workers)
    slopes, rows = [], []
    for group in (runs, hard_runs):
        of = {
            name: np.array([falling(losses_of(run), names["fit_from"]) for run in some]) for name, some in group.items()
        }
        slopes.append(of["AGD 3"] / of["SGD"])
        rows += [[student(each), [] if name == "SGD" else student(each / of["SGD"])] for name, each in of.items()]
    again.text("Exponent of the training loss", len(seeds), rows)
    again.text("below the dotted line", rate["AGD 1", 1.0].mean())
    rows = [[ratio, rate[name, ratio].mean(), won[name, ratio, late].mean()] for ratio in ratios for name in delayed]
    again.text("Time simulated", workers, rows)
    answer: list[Any] = [
        early,
        [with_ends(over[name, early]) for name in delayed],
        late,
        with_ends(over["AGD 1", late]),
    ]
    answer += [with_ends(won["AGD 1", 1.0, late]), late, with_ends(right), len(clocks["SGD", 1.0][0]), with_ends(worst)]
    answer += [with_ends(each) for each in slopes]
    again.text("takes more iterations than SGD", answer)
    again.claim(
        f"{KEY}late-gradients-need-more-iterations",
        np.minimum(over["AGD 1", early], need["AGD 2", early] / need["AGD 1", early]),
    )
    again.claim(f"{KEY}agd-loses-early", over["AGD 2", early])
    again.claim(f"{KEY}all-methods-converge", worst)
    again.claim(f"{KEY}break-even", right)
    again.claim(f"{KEY}agd-wins-late", won["AGD 1", 1.0, late])
    for where, each in zip(("", "-on-mnist1d"), slopes, strict=True):
        again.claim(f"{KEY}delay-keeps-the-convergence-rate{where}", each)
    return again


def layer_by_layer_s(forward_s: float, ready_s: Array, sums_s: Any, updates_s: Any, order: str) -> float:
    """A step of layer-wise SGD on one lane: r ready, s = max(r, e before), e = s + c; updates after backward, at once or in order."""
    free_s, ends = 0.0, []
    for ready, sum_s in zip(forward_s + np.array(ready_s), sums_s, strict=True):
        free_s = max(float(ready), free_s) + sum_s
        ends.append(free_s)
    computed_s = forward_s + float(ready_s[-1])
    if order == "all":
        return float(max(free_s, computed_s) + sum(updates_s))
    for end, update_s in zip(ends, updates_s, strict=True):
        computed_s = max(end, computed_s) + update_s
    return float(computed_s)


def traced_step(run: Any, ready: Any, order: str) -> float:
    """By how much the step that follows from medians of the trace's buckets is off the traced one, of the measured."""
    table, kinds = run.spans.table, np.array(run.spans.kind_names)
    steps = np.unique(table["step"][(kinds == "all_reduce") & (table["bucket"] >= 0)])
    rows = []
    for step in steps[min(max(1, len(steps) // 10), 10) :]:
        ranks = [
            (table[mine], kinds[mine])
            for mine in ((table["step"] == step) & (table["rank"] == r) for r in np.unique(table["rank"]))
        ]
        of = {
            kind: [rows[what == kind] for rows, what in ranks]
            for kind in ("forward", "backward", "all_reduce", "apply")
        }
        origin_s = np.mean([each["start_s"].min() for each in of["forward"]])
        forward_s, computed_s = (
            max(each["end_s"].max() for each in of[kind]) - origin_s for kind in ("forward", "backward")
        )
        sums = [np.sort(each[each["bucket"] >= 0], order="bucket") for each in of["all_reduce"]]
        ends_s = np.mean([each["end_s"] for each in sums], axis=0) - origin_s
        last_s = np.max([each["start_s"] for each in sums], axis=0) - origin_s
        begins_s = np.maximum(last_s, [0.0, *np.maximum.accumulate(ends_s)[:-1]])
        spent = [each["end_s"] - each["start_s"] for each in of["apply"]]
        if all((each["bucket"] >= 0).all() for each in of["apply"]):
            update_s = np.mean(
                [np.bincount(each["bucket"], s) for each, s in zip(of["apply"], spent, strict=True)], axis=0
            )
        else:
            update_s = np.full(len(ends_s), np.mean([s.sum() for s in spent]) / len(ends_s))
        done_s = np.mean([each["end_s"].max() for each in of["apply"]]) - origin_s
        rows.append([forward_s, computed_s - forward_s, done_s, *(np.maximum(ends_s, begins_s) - begins_s), *update_s])
    forward_s, backward_s, step_s, *rest = np.median(rows, axis=0)
    sums_s, updates_s = np.reshape(rest, (2, -1))
    return abs(layer_by_layer_s(forward_s, np.array(ready) * backward_s, sums_s, updates_s, order) / float(step_s) - 1)


def layerwise_bottleneck(names: Names, kept: list[Kept]) -> Again:
    """23: the recurrence, with operations counted by hooks, against the simulated steps."""
    from workbench.gradients import build_layout

    models, links, sizes, devices, shares = (
        names[key] for key in ("models", "links", "bucket_kib", "devices", "shares")
    )
    seeds, ranks, runs, orders = (names[key] for key in ("seeds", "ranks", "runs", "orders"))
    weights = {model: names["shapes"][model].weights for model in models}
    layouts = {(model, kib): build_layout(weights[model], kib * 1024) for model in models for kib in sizes}
    passes = {model: counted(names["shapes"][model].problem) for model in models}

    def parts(model: str, link: Any, kib: int, share: float = 1.0) -> tuple[float, Array, list[float], list[float]]:
        """Forward, when buckets are ready since then, their sums and updates."""
        forward, backward, arrivals = passes[model]
        scale, layout = share * names["batch_of"][model] / devices / (names["teraflops"] * 1e12), layouts[model, kib]
        there = (
            np.cumsum([sum(slot.numel for slot in bucket.slots) for bucket in layout.buckets]) / layout.parameter_numel
        )
        ready = [next(done for done, part in arrivals if part > up_to - 1e-12) for up_to in there]
        sums_s = [ring_s(layout.bucket_bytes(at), devices, link) for at in range(len(layout.buckets))]
        whole_s = 4 * layout.parameter_numel / (names["update_gb_per_s"] * 1e9)
        return (
            forward * scale,
            np.array(ready) * backward * scale,
            sums_s,
            [whole_s * (b.stop - b.start) / layout.numel for b in layout.buckets],
        )

    left = iter([item.run for item in kept])
    places, step_s, off = [(model, link) for model in models for link in links], {}, 0.0
    for model, link, kib, order in (
        (*place, kib, order) for place in places for kib in sizes for order in orders.values()
    ):
        if order != "any" or kib >= 1024 or model == "alexnet" or names["size"] != "smoke":
            step_s[model, link, kib, order] = usual_step_s(next(left))
            off = max(off, abs(step_s[model, link, kib, order] / layer_by_layer_s(*parts(model, link, kib), order) - 1))
    assert off < 1e-9 and max(names["off"]) < 1e-9  # which digits rounding leaves is not told
    apart = max(abs(took / step_s[(*place[:3], "backward")] - 1) for place, took in step_s.items() if place[3] == "any")
    whole_s, bounds = {place: usual_step_s(next(left)) for place in places}, []
    for model, link, kib in ((*place, kib) for place in places for kib in sizes):
        ready_s = parts(model, link, kib)[1]
        if len(ready_s) > 1:
            bounds.append((whole_s[model, link] - step_s[model, link, kib, "all"]) / (ready_s[-1] - ready_s[0]))
    hidden: dict[Any, list[float]] = {place: [] for place in places}
    for (model, link), share in ((place, share) for place in places for share in shares):
        forward_s, ready_s, sums_s, updates_s = parts(model, link, 0, share)
        hidden[model, link].append(
            1 - (usual_step_s(next(left)) - forward_s - ready_s[-1] - sum(updates_s)) / sum(sums_s)
        )
    tuned = {place: [usual_step_s(next(left)) for _ in range(5)] for place in places}
    again = Again(labels=[*(link.name for link in links), "AGD 1"])
    again.text("One step of layer-wise SGD", 0, ranks)
    rows: list[Any] = []
    for model, link, kib in ((*place, kib) for place in places for kib in (0, 1024, sizes[-1])):
        forward_s, ready_s, sums_s, updates_s = parts(model, link, kib)
        compute_s = forward_s + ready_s[-1] + sum(updates_s)
        step = layer_by_layer_s(forward_s, ready_s, sums_s, updates_s, "all")
        starts_s = len(sums_s) * 2 * (devices - 1) * link.latency_s
        rows.append([len(sums_s), compute_s, ready_s[-1] - ready_s[0], sum(sums_s), starts_s, step - compute_s])
    again.text("gradients applied at once", devices, rows)
    for words, *number in (
        ("Buckets of", devices),
        ("Bandwidth of", ranks),
        ("Hidden part", devices),
        ("Time of a step", devices, 4),
    ):
        again.text(words, number)
    rows = []
    for model, link in places:
        numels = [weight.numel() for _, weight in weights[model]]
        last = max(at for at, (_, weight) in enumerate(weights[model]) if weight.dim() == 4) + 1
        forward_s, ready_s, _, updates_s = parts(model, link, 0)
        gains = [whole_s[model, link] - step_s[model, link, kib, "backward"] for kib in (0, 1024)]
        could_s = whole_s[model, link] - forward_s - ready_s[-1] - sum(updates_s)
        rows.append([len(numels), sum(numels[last:]) / sum(numels), [gain / could_s for gain in gains]])
    again.text("simulated devices", devices, rows)
    wrong = [
        np.mean([traced_step(runs[name][at], names["ready_shares"], order) for name, order in orders.items()])
        for at in range(len(seeds))
    ]
    times = {name: np.array([usual_step_s(run) for run in group]) for name, group in runs.items()}
    many = times["one message a parameter"] / times["B2, layer-wise"]
    paid = max(
        step_s[model, link, 0, "backward"] / min(step_s[model, link, kib, "backward"] for kib in sizes)
        for model, link in places
    )
    best = [max(of[0] / of[at] for of in tuned.values()) for at in (1, 3, 4)]
    answer = [ranks, with_ends(many), names["real_kib"], 1, paid, max(bounds), best, with_ends(wrong), apart]
    again.text("one message per parameter makes", answer)
    again.claim(f"{KEY}recurrences-are-the-simulator", off)
    again.claim(f"{KEY}taskwise-is-layerwise", apart)
    again.claim(f"{KEY}recurrences-predict-traces", wrong)
    again.claim(f"{KEY}gain-is-bounded", max(bounds))
    again.claim(f"{KEY}one-message-a-parameter-costs", many)
    again.claim(f"{KEY}small-batches-hide-less", max(line[0] / line[-1] for line in hidden.values()))
    again.claim(f"{KEY}forward-hides-too", min(of[1] / of[3] for of in tuned.values()))
    return again


def choosing_the_delay(names: Names, kept: list[Kept]) -> Again:
    """24: d* = ceil(t_c / max(t, t_bw)) against the steps of the sweep."""
    import workbench as wb

    workers, largest, links, seeds = names["workers"], names["largest"], names["links"], names["seeds"]
    num_bytes, t, warm = 4 * num_values(names["task"]), names["compute_ms"] / 1e3, 2 * names["sweep_steps"] // 5
    late = [2 * (workers - 1) * ms / 1e3 for ms in names["latency_ms"]]
    t_bw = [2 * (workers - 1) / workers * num_bytes * 8e-6 / rate for rate in names["mbit_per_s"]]
    t_c = [one + other for one, other in zip(late, t_bw, strict=True)]
    rule = [max(1, math.ceil(one / max(t, wire) - 1e-9)) for one, wire in zip(t_c, t_bw, strict=True)]
    swept = [ends_of(item.run)[warm:] for item in kept if item.how.get("steps") == names["sweep_steps"]]
    took = np.array([(ends[-1] - ends[0]) / (len(ends) - 1) for ends in swept]).reshape(2, len(links), largest + 1)
    threads, one = took
    adaptive = [item for item in kept if type(item.algorithm).__name__ == "AdaptiveDelaySGD"]
    ages = [
        [row["staleness"] for row in item.run.metrics[0] if row.get("staleness") is not None][-1] for item in adaptive
    ]
    own = dict(zip((10, names["longer_period"]), np.reshape(ages, (2, len(links))), strict=True))
    rights: dict[int, list[float]] = {d: [] for d in names["trained_delays"]}
    for item, d in zip(
        (item for item in kept if "epochs" in item.how), np.repeat(names["trained_delays"], len(seeds)), strict=True
    ):
        rights[int(d)].append(100 * evaluations_of(item.run)[-1][2] if item.run else 10.0)
    lost = {d: np.subtract(found, rights[0]) for d, found in rights.items() if d}
    off = [steps[d] / steps.min() for steps, d in zip(threads, rule, strict=True)]
    before = [steps[d - 1] / steps[d] for steps, d in zip(threads, rule, strict=True)]
    alone = max(steps[1] / steps.min() for steps in one)
    clear = [at for at in range(len(links)) if t_bw[at] < t and t_c[at] > 0.05 * t]
    again = Again(labels=[*links])
    again.text("Time of a step with d threads", workers)
    again.text("Delay of AdaptiveDelaySGD", workers)
    rows = []
    for at, steps in enumerate(threads):
        best = int(np.argmax(steps <= 1.01 * steps.min()))
        rows.append(
            [t_c[at], t_bw[at], rule[at], best, *(int(found[at]) for found in own.values()), steps[0] / steps[rule[at]]]
        )
    again.text("ms of compute a step", workers, t, rows)
    again.text("Test error after", names["epochs"], workers)
    plain = parts_of(wb.Run.load(names["plain"]["folder"]))
    settled = [row.get("staleness") for row in names["own"].metrics[0] if row["step"] >= names["real_steps"] // 2]
    now = float(np.median([age for age in settled if age is not None]))
    sums_s = plain["exposed"] + plain["hidden"]
    told = min(largest, max(1, math.ceil(sums_s / plain["compute"])))
    again.text("local, wide-mlp", names["ranks"], seeds[0], plain["compute"], sums_s, told, now)
    far = max(abs(int(own[10][at]) - rule[at]) for at in clear)
    answer = [max(off), min(before), alone, far, names["ranks"], now - told]
    again.text("the step of the rule d*", answer, [[d, with_ends(values)] for d, values in lost.items()])
    again.claim(f"{KEY}one-thread-needs-one-step", alone)
    again.claim(f"{KEY}rule-has-the-shortest-step", max(off))
    again.claim(f"{KEY}nothing-smaller-is-as-fast", min(before))
    again.claim(f"{KEY}adaptive-finds-the-rule", far)
    again.claim(f"{KEY}delay-costs-accuracy", lost[largest])
    return again


def small_minibatch(names: Names, kept: list[Kept]) -> Again:
    """25: losses of the evaluations, and steps on the networks against c + m."""
    from workbench import costs

    batch, workers, seeds, nets, split = (names[key] for key in ("batch", "workers", "seeds", "networks", "split"))
    fixed_s, sample_s, num_bytes, most = (
        names["fixed_ms"] / 1e3,
        names["sample_ms"] / 1e3,
        4 * num_values(names["wide"]),
        max(workers),
    )
    links = {net: costs.get(net) for net in nets}
    curves = [np.array([loss for _, loss, _ in evaluations_of(item.run)]) for item in kept if "epochs" in item.how]
    after = len(names["algorithms"]) * len(names["idle_workers"]) * len(seeds) * 2
    idle = max(np.abs(one / other - 1).max() for other, one in zip(curves[:after:2], curves[1:after:2], strict=True))
    whole = curves[after : after + len(seeds)]  # on one worker
    rest = [np.abs(one / whole[at % len(seeds)] - 1).max() for at, one in enumerate(curves[after:])]
    cut, micro = max(rest[: len(split) * len(seeds)]), max(rest[len(split) * len(seeds) :])
    timed, third = [item for item in kept if "epochs" not in item.how], names["sim_steps"] // 3
    took = iter(
        float((ends[-1] - ends[third]) / (len(ends) - 1 - third)) for ends in (ends_of(item.run) for item in timed)
    )
    step_s = {(net, late): {p: next(took) for p in workers} for net in nets for late in (0, 1)}
    with_jitter = [{net: np.array([next(took) for _ in seeds]) for net in nets} for _ in ("SGD", "AGD 1")]
    faster = np.min([with_jitter[0][net] / with_jitter[1][net] for net in nets], axis=0)
    beyond = {(net, late, p): of[p] / of[batch] for (net, late), of in step_s.items() for p in workers if p > batch}
    limit = {
        net: (fixed_s + batch * sample_s) / (fixed_s + sample_s + ring_s(num_bytes, batch, links[net])) for net in nets
    }
    speedup = {net: {p: step_s[net, 0][1] / each for p, each in step_s[net, 0].items()} for net in nets}
    again = Again(labels=[*nets, "AGD 1"])
    again.text("the lines coincide", batch)
    again.text("the rest is idle", batch, batch)
    rows = []
    for net in nets:
        larger_s = fixed_s + sample_s + ring_s(num_bytes, most, links[net])
        added_s = fixed_s + most / batch * sample_s + ring_s(num_bytes, batch, links[net])
        rows.append([batch / step_s[net, 0][batch], batch / step_s[net, 0][most], most / larger_s, most / added_s])
    again.text("Samples per second", rows)
    answer: list[Any] = [idle, cut, micro, min(beyond.values()), max(beyond.values()), batch, with_ends(faster)]
    again.text("micro-batches by", answer, [[speedup[net][batch], limit[net]] for net in nets])
    again.claim(f"{KEY}idle-workers-change-nothing", idle)
    again.claim(f"{KEY}one-sample-a-worker-is-the-same-training", cut)
    again.claim(f"{KEY}accumulated-is-the-same-training", micro)
    again.claim(f"{KEY}no-gain-beyond-one-sample", min(beyond.values()))
    again.claim(f"{KEY}limit-of-strong-scaling", max(abs(speedup[net][batch] / limit[net] - 1) for net in nets))
    again.claim(f"{KEY}agd-scales-further", faster)
    return again


def stable_below(delay: int, momentum: float, modes: int, steps: int) -> tuple[float, float]:
    """The largest eta lambda that shrinks, over the limit and as it is, of a grid 5 % around the limit.

    w[t+1] = w[t] + mu (w[t] - w[t-1]) - eta lambda w[t-d].
    """

    def radius(a: float) -> float:
        terms = np.zeros(delay + 3)
        terms[:3] = 1, -1 - momentum, momentum
        terms[delay + 1] += a  # z^(d+2) - (1 + mu) z^(d+1) + mu z^d + eta lambda z
        return float(abs(np.roots(terms)).max())

    limit = optimize.bisect(lambda a: radius(a) - 1 - 1e-12, 1e-3, 5.0)
    grid = limit * np.linspace(0.95, 1.05, modes)
    weights, moved = [np.full(modes, 1e-150)], np.zeros(modes)
    for step in range(steps):
        moved = momentum * moved - (grid * weights[step - delay] if step >= delay else 0.0)
        weights.append(weights[-1] + moved)
    sizes, quarter = np.abs(np.array(weights[1:])), steps // 4
    shrinks = sizes[-quarter:].max(0) < sizes[quarter : 2 * quarter].max(0)
    return float(grid[int(np.argmin(shrinks)) - 1]) / limit, float(grid[int(np.argmin(shrinks)) - 1])


def least_loss(task: Any, radius: float, steps: int, seed: int) -> float:
    """Mean over a run's minibatches of 16 of the loss of softmax regression's best parameters of norm `radius` at most."""
    from workbench.problems.base import Sampler

    images, labels = (item.numpy() for item in (task.train() if callable(task.train) else task.train))
    sampler, weight = Sampler(len(labels), 16, 1, seed), np.zeros(len(labels))
    for step in range(steps):
        share = sampler.share(step, 0).numpy()
        weight[share] += 1 / len(share) / steps
    inputs = np.column_stack([images.reshape(len(labels), -1), np.ones(len(labels))])

    def loss(flat: Array, price: float) -> tuple[float, Array]:
        scores = inputs @ flat.reshape(-1, 10)
        logs = scores - special.logsumexp(scores, axis=1, keepdims=True)
        slope = inputs.T @ (weight[:, None] * (np.exp(logs) - np.eye(10)[labels]))
        return -weight @ logs[np.arange(len(labels)), labels] + price / 2 * flat @ flat, slope.ravel() + price * flat

    found = np.zeros(inputs.shape[1] * 10)

    def best(price: float) -> Array:
        exact = {"maxiter": 5000, "maxfun": 10000, "ftol": 1e-13, "gtol": 1e-7}
        found[:] = optimize.minimize(loss, found, price, "L-BFGS-B", jac=True, options=exact).x
        return found

    price = math.exp(optimize.brentq(lambda log: np.linalg.norm(best(math.exp(log))) - radius, -12.0, 2.0, xtol=1e-4))
    # Of the dual problem, which errs by the square of the price's error
    return float(loss(best(price), price)[0] - price / 2 * radius**2)


def delay_theory(names: Names, kept: list[Kept]) -> Again:
    """26: the delayed recurrence by itself, and regret against the best parameters for the run's own minibatches."""
    delays, seeds, horizons, radius = (names[key] for key in ("delays", "seeds", "horizons", "radius"))
    latest, longest, backups = max(delays), max(horizons), names["backups"]
    limits = {
        (d, mu): stable_below(d, mu, names["modes"], names["quadratic_steps"])
        for d in delays
        if d <= 4
        for mu in names["momenta"]
    }
    images = np.stack([np.asarray(row).ravel() for row in names["task"].data()[0]])
    steepest = math.sqrt(2 * float((images**2).sum(1).max() + 1))
    best = {(T, seed): least_loss(names["task"].problem, radius, T, seed) for T in horizons for seed in seeds}
    regret: dict[tuple[int, int], list[float]] = {}
    dropped: dict[int, list[float]] = {}
    for item in kept:
        steps, losses = item.how["steps"], losses_of(item.run)
        if type(item.algorithm).__name__ == "BackupSGD":
            dropped.setdefault(item.algorithm.backups, []).append(float(losses[-(len(losses) // 10) :].mean()))
        elif "seed" in item.how:  # those on the quadratic have none
            regret.setdefault((item.algorithm.delay, steps), []).append(
                losses.sum() - steps * best[steps, item.how["seed"]]
            )
    bound = {d: 2 * radius * steepest * math.sqrt((1 + 2 * d) * longest) for d in delays}
    shares = np.max([np.array(regret[d, longest]) / bound[d] for d in delays], axis=0)
    growth = np.log(np.array(regret[latest, longest]) / regret[latest, horizons[0]]) / math.log(longest / horizons[0])
    dearer = np.array(regret[latest, longest]) / regret[0, longest] / math.sqrt(1 + 2 * latest)
    relative = np.array(dropped[backups]) / dropped[0] - 1
    off, ratio = max(abs(share - 1) for share, _ in limits.values()), limits[0, 0.9][1] / limits[1, 0.9][1]
    again = Again()
    again.text("Regret of softmax regression", longest, len(seeds))
    again.text(
        "gradients an update",
        names["workers"],
        [[b, np.mean(found), np.std(found, ddof=1)] for b, found in dropped.items()],
    )
    allowed = math.sqrt(1 + 2 * latest)
    again.text(
        "largest stable step size",
        *(off, 0.9, ratio, with_ends(shares), with_ends(growth)),
        *(latest, with_ends(dearer * allowed), allowed, backups, names["workers"], with_ends(relative)),
    )
    again.claim(f"{KEY}stable-where-theory-says", off)
    again.claim(f"{KEY}one-delay-costs-momentum", ratio)
    again.claim(f"{KEY}regret-within-its-bound", shares)
    again.claim(f"{KEY}regret-grows-as-a-root", growth)
    again.claim(f"{KEY}delay-costs-less-than-its-bound", dearer)
    again.claim("chen2016revisiting/dropping-costs-variance-only", relative)
    return again


def transformers(names: Names, kept: list[Kept]) -> Again:
    """27: losses of the evaluations; steps of the large shapes, GPT-2's compute by its published shape."""
    import torch

    workers, steps, seeds, shapes, links = (names[key] for key in ("workers", "steps", "seeds", "shapes", "links"))
    p, batch, rate, numel = (
        names["shape_workers"],
        names["shape_batch"],
        names["tflops"] * 1e12,
        num_values(names["task"]),
    )
    trained = [item for item in kept if "timing_only" not in item.how]
    after = np.array([step + 1 for step, _, _ in evaluations_of(trained[0].run)])
    found = np.array([[loss for _, loss, _ in evaluations_of(item.run)] for item in trained]).reshape(4, len(seeds), -1)
    sgd, layered, late, later = found
    gap, third = late - sgd, int(np.argmin(np.abs(after - steps / 3)))
    took = iter(usual_step_s(item.run) for item in kept if "timing_only" in item.how)
    places = [(name, link) for name in shapes for link in links]
    step_s = {place: [next(took) for _ in range(5)] for place in range(len(places))}
    gains, ahead = [of[0] / of[2] for of in step_s.values()], [of[1] / of[2] for of in step_s.values()]
    again = Again(labels=["AGD, 1 step late", "AGD, 2 steps late", *shapes, *(link.name for link in links)])
    again.text("Test loss of a small transformer", workers)
    ends = found[:, :, -1]
    again.text("on text", numel, workers, steps, [[of.mean(), of.std(ddof=1), (of - ends[0]).mean()] for of in ends])
    again.text("Speed-up over SGD", p, names["tflops"], [[of[0] / each for each in of[1:4]] for of in step_s.values()])
    rows: list[Any] = []
    for (name, link), of in zip(places, step_s.values(), strict=True):
        with torch.device("meta"):
            num_bytes = 4 * num_values(names["large"][name].problem)
        alone_s = gpt2_operations(name) * batch / rate if name.startswith("gpt2-") else of[4]
        sum_s = ring_s(num_bytes, p, link)
        rows.append([num_bytes, alone_s, sum_s, (of[0] - of[1]) / (of[0] - of[4]), alone_s / max(alone_s, sum_s)])
    again.text("One step", p, rows)
    answer = [np.abs(layered - sgd).max(), with_ends(gap[:, -1]), with_ends(gap[:, third])]
    answer += [with_ends((later - late)[:, -1]), min(gains), max(gains), min(ahead), max(ahead)]
    again.text("On the large shapes AGD", answer)
    again.claim(f"{KEY}transformer-layer-wise-is-sgd", np.abs(layered - sgd).max())
    again.claim(f"{KEY}transformer-delay-costs", gap[:, -1])
    again.claim(f"{KEY}transformer-second-delay-costs-more", (later - late)[:, -1])
    again.claim(f"{KEY}transformer-gap-closes", gap[:, third] - gap[:, -1])
    again.claim(f"{KEY}transformer-gain-at-most-two", gains)
    again.claim(f"{KEY}transformer-delay-fastest", min(ahead))
    return again


def other_networks(names: Names, kept: list[Kept]) -> Again:
    """28: operations counted by hooks on layers, and steps read from the runs."""
    models, links, p, batch, rate = (
        names["models"],
        names["links"],
        names["workers"],
        names["batch_size"],
        names["tflops"] * 1e12,
    )
    ratios, counts, half = names["ratios"], names["layer_counts"], names["steps"] // 2
    tasks = {name: names["shapes"][name].problem for name in models}
    steps = iter(
        float((ends[-1] - ends[half]) / (len(ends) - 1 - half)) for ends in (ends_of(item.run) for item in kept)
    )
    again = Again(labels=[link.name for link in links])
    linear = {name: linear_share(tasks[name]) for name in models}
    numels = {name: forward_operations(tasks[name])[0] for name in models}
    forward = {name: counted(tasks[name])[:2] for name in models}
    arrivals = {name: counted(tasks[name])[2] for name in models}
    early = {name: max([there for done, there in of if done <= 0.1], default=0.0) for name, of in arrivals.items()}
    rows: list[Any] = []
    for name in models:
        sizes = numels[name]
        rows.append(
            [
                4e-6 * sum(sizes),
                len(sizes),
                linear[name],
                early[name],
                forward[name][0] / 1e9,
                forward[name][0] / sum(sizes),
            ]
        )
    again.text("Counted from the shapes", rows)
    (name,), (timed,) = names["measured"], names["timed"].values()
    clocked = final_after(numels[name], timed.backward_shares)
    when = [
        [min(done for done, there in of if there >= part) for of in (arrivals[name], clocked)] for part in (0.5, 0.9)
    ]
    speed = names["measured_batch"] * sum(forward[name]) / (timed.forward_s + timed.backward_s) / 1e9
    again.text("One core here", names["measured_batch"], speed, timed.backward_s / timed.forward_s, when)
    took = {(name, link): [next(steps) for _ in range(5)] for name in models for link in links}
    gains = {place: [of[0] / each for each in of[1:]] for place, of in took.items()}
    again.text("Speed-up over SGD: ", p, names["tflops"], [of[:3] for of in gains.values()])
    rows, shares = [], []
    for (name, link), of in took.items():
        num_bytes, compute_s = 4 * sum(numels[name]), sum(forward[name]) * batch / rate
        sum_s, hidden_s = ring_s(num_bytes, p, link), forward[name][1] * batch / rate * (1 - arrivals[name][0][0])
        shares.append((of[0] - of[1]) / hidden_s)
        rows.append([compute_s, sum_s, hidden_s, of[0] - of[1], shares[-1], compute_s / max(compute_s, sum_s)])
    again.text("could save, and what it saves", rows)
    swept = {(name, ratio): [next(steps) for _ in range(3)] for name in models for ratio in ratios}
    again.text("Speed-up over SGD on", p)
    again.text("L equal layers", p)
    by_count = {link: {count: next(steps) / next(steps) for count in counts} for link in links}
    extra = []
    for link, count in ((link, count) for link in links for count in counts if count > 1):
        whole_s, parts_s = next(steps), next(steps)
        extra.append((parts_s - whole_s) / ((count - 1) * 2 * (p - 1) * link.latency_s))
    late = {place: of[0] / of[2] for place, of in swept.items()}
    peaks = [max(ratios, key=lambda ratio: late[name, ratio]) for name in models]
    farthest = max(peaks, key=lambda ratio: abs(math.log(ratio)))
    rest = max(early[name] for name in models if name != "alexnet")
    answer: list[Any] = [linear["alexnet"], early["alexnet"], rest]
    for at in (1, 0):
        found = [of[at] for of in gains.values()]
        answer += [min(found), max(found)]
    answer += [max(late.values()), farthest]
    answer += [max(curve.items(), key=lambda item: item[1]) for curve in by_count.values()]
    again.text("of AlexNet's bytes", answer)
    again.claim(f"{KEY}alexnet-bytes-fully-connected", linear["alexnet"])
    again.claim(f"{KEY}alexnet-bytes-come-first", early["alexnet"] - rest)
    again.claim(f"{KEY}layer-wise-gain-bounded", max(shares))
    again.claim(f"{KEY}delay-best-on-other-networks", min(min(of[0], of[1]) / of[2] for of in took.values()))
    again.claim(f"{KEY}delay-gains-most-at-balance", farthest)
    again.claim(f"{KEY}layer-wise-costs-latency", max(extra, key=lambda ratio: abs(ratio - 1)))
    return again


def frameworks(names: Names, kept: list[Kept]) -> Again:
    """29: medians of the seconds that rank 0 returned, against those of DDP with the same seed."""
    seeds, ranks, found, twins = (names[key] for key in ("seeds", "ranks", "found", "twins"))
    ddp, hooked = "torch DDP", "torch DDP, our hook"
    algorithms = [ddp, hooked, "SGD", "layer-wise SGD", "AGD 1"]
    step_s = {name: np.array([float(np.median(found[seed]["seconds"][name])) for seed in seeds]) for name in algorithms}
    over = {name: of / step_s[ddp] for name, of in step_s.items()}
    far = {name: [twins[seed]["off"][name] for seed in seeds] for name in algorithms}
    equal = np.max([far[hooked], far["SGD"], far["layer-wise SGD"]], axis=0)
    again = Again(labels=["AGD 1", *names["versions"].values()])
    again.text("Time of a step over that of torch DDP", ranks)
    rows = [
        [of.mean(), [1, 1, 1] if name == ddp else student(over[name]), max(far[name])] for name, of in step_s.items()
    ]
    again.text("turns of", len(seeds), names["rounds"], names["block"], names["bucket_kib"], ranks, rows)
    by_hand, hook, late = over["layer-wise SGD"], over[hooked], over["AGD 1"]
    answer = [ranks, with_ends(by_hand), with_ends(hook), with_ends(late), equal.max()]
    again.text("with our all-reduce as its hook", answer)
    again.claim(f"{KEY}same-parameters-as-ddp", equal)
    again.claim(f"{KEY}a-scheduler-already-overlaps", by_hand)
    again.claim(f"{KEY}a-hook-costs-little", hook)
    return again


def limitations(names: Names, kept: list[Kept]) -> Again:
    """30: d + 1 buffers, the largest of the rates that halve the loss, and accuracies with shards."""
    num_bytes, seeds, workers = 4 * num_values(names["task"]), names["seeds"], names["shard_workers"]
    trains: dict[tuple[int, float, int], dict[float, bool]] = {}
    for item in kept:
        if "optimizer" in item.how:
            solver, ends = (
                item.how["optimizer"].keywords,
                evaluations_of(item.run) if item.run else [(0, math.inf, 0.0)],
            )
            place = item.algorithm.width - 1, solver["momentum"], item.how["seed"]
            trains.setdefault(place, {})[solver["lr"]] = ends[-1][1] < (losses_of(item.run)[0] / 2 if item.run else 0.0)
    best = {place: max(lr for lr, well in tried.items() if well) for place, tried in trains.items()}
    largest = {(d, mu): [best[d, mu, seed] for seed in seeds] for d in (0, 3) for mu in (0.0, 0.9)}
    for (d, mu, seed), tried in trains.items():  # none above it was left out
        assert {lr for lr in names["rates"] if lr >= best[d, mu, seed]} == set(tried)
    needs = {mu: np.divide(largest[0, mu], largest[3, mu]) for mu in (0.0, 0.9)}
    last = [evaluations_of(item.run)[-1][2] for item in kept if "optimizer" not in item.how]
    anew, drawn, sorted_ = np.reshape(last, (3, len(seeds)))
    again = Again(labels=["AGD 1", "AGD 2", "AGD 3"])
    # 1: of "K - 1 gradients"
    rows = [[[1] if d else [], d + 1, (d + 1) * num_bytes, (d + 1) * 240e6, d] for d in (0, 0, 1, 2, 3)]
    again.text("Gradient buffers of a worker", rows)
    again.text("AGD 1, ", workers)
    answer = [1, 0, 60, 240e6, with_ends(needs[0.9]), 0.9, with_ends(needs[0.0])]
    again.text("with a delay of d holds", answer, with_ends(drawn - anew), with_ends(sorted_ - anew))
    again.claim(f"{KEY}memory-is-d-gradients", 0)
    again.claim(f"{KEY}delay-needs-smaller-steps", needs[0.9])
    again.claim(f"{KEY}momentum-makes-delay-dearer", needs[0.9] / needs[0.0])
    again.claim(f"{KEY}fixed-shards-cost-nothing", drawn - anew)
    again.claim(f"{KEY}skewed-shards-cost-little", sorted_ - anew)
    return again


def mpi_progress(names: Names, kept: list[Kept]) -> Again:
    """31: from the rows and spans of the runs on real ranks."""
    import inspect

    seeds, ranks, ways, runs = (names[key] for key in ("seeds", "ranks", "ways", "runs"))
    cases = [("SGD", "auto"), *(("AGD 1", way) for way in ways)]
    parts = {key: parts_of(run) for key, run in runs.items() if key[:2] in cases}
    step_s = {case: np.array([usual_step_s(runs[*case, seed]) for seed in seeds]) for case in cases}
    over = {case: took / step_s["AGD 1", "blocking"] for case, took in step_s.items()}
    again = Again(labels=["AGD 1", names["library"]])
    source = "".join(inspect.getsource(names[kind].worker) for kind in ("SynchronousSGD", "LayerwiseSGD", "PipeSGD"))
    again.text("def worker", [value for value, _, _ in numbers(source, [])])  # of the program's own text
    again.text("Schedules, ", ranks)
    rows: list[Any] = []
    for case in cases:
        spent = [np.mean([parts[*case, seed][key] for seed in seeds]) for key in ("compute", "hidden", "exposed")]
        rows.append([step_s[case].mean(), spent, student(over[case])])
    again.text("Means of a step", len(seeds), ranks, rows)
    again.text("over that of AGD 1", ranks)
    first = losses_of(runs["SGD", "auto", seeds[0]])
    off = {key[:2]: np.abs(losses_of(run) / first - 1).max() for key, run in runs.items() if key[2] == seeds[0]}
    same = max(far for (name, _), far in off.items() if name != "AGD 1")
    told = [with_ends(over["AGD 1", way]) for way in ways if way != "blocking"]
    again.text(
        "relative to a blocking sum", ranks, told, with_ends(over["SGD", "auto"]), 0, same, off["AGD 1", "thread"]
    )
    again.claim(f"{KEY}averaging-does-not-change-the-numbers", same)
    return again


def used_s(run: Any) -> float:
    """When the last gradient was used: late ones come after the last step."""
    return float(run.info["result"]["seconds"])


def on_front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Of (seconds, accuracy), those that none is at least as quick and as accurate as, and better in one; quickest first."""

    def beaten(one: tuple[float, float]) -> bool:
        return any(t <= one[0] and a >= one[1] and (t, a) != one for t, a in points.values())

    return sorted((name for name, one in points.items() if not beaten(one)), key=lambda name: points[name])


def speed_accuracy_front(names: Names, kept: list[Kept]) -> Again:
    """32: fronts from the end of each run and its last evaluation."""
    seeds, algorithms, workers, ratio = names["seeds"], [*names["algorithms"]], names["workers"], names["ratio"]
    unit_s, left = names["compute_ms"] / 1e3, iter(kept)
    took: dict[str, Array] = {}
    right: dict[str, Array] = {}
    for name in algorithms:
        found = []
        for item in (next(left) for _ in seeds):
            accuracy = 100 * evaluations_of(item.run)[-1][2] if item.run else 10.0
            found.append((used_s((item if item.run else next(left)).run), accuracy))
        took[name], right[name] = np.array(found).T
    sgd, late, later, server, backup, partial, free, stale = algorithms
    shares = sorted({ratio, *names["other_ratios"]})
    rows: list[Any] = []
    for name in (sgd, late, later, partial, server, backup, free):
        times = [took[name] if share == ratio else [used_s(next(left).run) for _ in seeds[:2]] for share in shares]
        rows.append([np.mean(each) / unit_s for each in times])
    fronts = [on_front({name: (took[name][at], right[name][at]) for name in algorithms}) for at in range(len(seeds))]
    there = [float(late in front or later in front) for front in fronts]
    about = [workers, names["epochs"], names["often"], names["factor"]]
    again = Again(labels=algorithms)
    again.text("Test error against time", workers)
    of: dict[str, Any] = {}
    for name in algorithms:
        sooner, points = took[sgd] / took[name], right[name] - right[sgd]
        both = ([], []) if name == sgd else (student(sooner), student(points))
        rate = names["rates"].get(name, [0.05, 0.9])
        of[name] = [rate, took[name].mean() / unit_s, both[0], student(right[name]), both[1]]
    again.text(
        "in units of mean compute",
        about,
        [[of[name], sum(name in front for front in fronts), len(seeds)] for name in algorithms],
    )
    again.text("Time for the same samples", len(seeds), ratio, len(seeds[:2]), rows)
    less, waits, spared = right[sgd] - right[free], took[stale] / took[free], took[server] / took[backup]
    answer: list[Any] = []
    for name in (late, later):
        answer += [with_ends(took[sgd] / took[name]), with_ends(right[name] - right[sgd])]
    answer += [
        with_ends(there),
        [with_ends(took[sgd] / took[partial]), with_ends(right[partial] - right[sgd])],
        with_ends(took[sgd] / took[free]),
        with_ends(less),
        with_ends(waits),
        with_ends(spared),
    ]
    again.text("is on the front with", answer)
    again.claim(f"{KEY}delayed-on-the-front", there)
    again.claim(f"{KEY}delay-faster-than-waiting", took[sgd] / took[late])
    again.claim(f"{KEY}tuned-asynchronous-less-accurate", less)
    again.claim(f"{KEY}bounded-staleness-costs-time", waits)
    again.claim(f"{KEY}backups-faster-than-waiting", spared)
    return again


NOTEBOOKS: dict[str, Callable[[Names, list[Kept]], Again]] = {
    "21-throughput": throughput,
    "22-early-accuracy": early_accuracy,
    "23-layerwise-bottleneck": layerwise_bottleneck,
    "24-choosing-the-delay": choosing_the_delay,
    "25-small-minibatch": small_minibatch,
    "26-delay-theory": delay_theory,
    "27-transformers": transformers,
    "28-other-networks": other_networks,
    "29-frameworks": frameworks,
    "30-limitations": limitations,
    "31-mpi-progress": mpi_progress,
    "32-speed-accuracy-front": speed_accuracy_front,
}
