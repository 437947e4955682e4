"""What each notebook on backup workers (41 to 50) must show, computed again as in `recomputed`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import integrate, stats

from tests.notebooks.formulas import (
    Array,
    Names,
    carried_s,
    ends_of,
    evaluations_of,
    first_at,
    num_values,
    student,
    updates_of,
    with_ends,
)
from tests.notebooks.shown import Again, Kept
from workbench import schedules
from workbench.rng import generator

KEY = "chen2016revisiting/"


def by_layer(run: Any) -> dict[int, Array]:
    """Bucket -> staleness that its server wrote, without the first quarter."""
    found: dict[int, list[int]] = {}
    for rows in run.events.values():
        for row in rows:
            if "update" in row:
                found.setdefault(row["bucket"], []).extend(row["staleness"])
    return {bucket: np.array(found[bucket][len(found[bucket]) // 4 :]) for bucket in sorted(found)}


def read_first(run: Any) -> dict[int, Array]:
    """The same if a worker had read all parameters when its step began: updates between that time and its own."""
    table, kinds = run.spans.table, run.spans.kind_names
    begins: dict[tuple[int, int], float] = {}
    for row in table[kinds == "forward"]:
        place = int(row["rank"]), int(row["step"])
        begins[place] = min(float(row["start_s"]), begins.get(place, np.inf))
    found: dict[int, list[tuple[float, int]]] = {}
    for rows in run.events.values():
        for row in rows:
            if "update" in row:
                found.setdefault(row["bucket"], []).append((row["seconds"], row["sources"][0]))
    counted = {}
    for bucket, updates in sorted(found.items()):
        ends, steps = np.array([end for end, _ in updates]), dict.fromkeys((source for _, source in updates), 0)
        late = []
        for place, (_, source) in enumerate(updates):
            late.append(int((ends[:place] > begins[source, steps[source]]).sum()))
            steps[source] += 1
        counted[bucket] = np.array(late[len(late) // 4 :])
    return counted


def staleness_by_layer(names: Names, kept: list[Kept]) -> Again:
    p, share = names["workers"], names["forward_share"]
    sizes = [sum(slot.numel for slot in bucket.slots) for bucket in names["layout"].buckets]
    formula = (p - 1) * (share + (1 - share) * np.cumsum(sizes) / sum(sizes))  # from the top
    first, answered = ([count(item.run) for item in kept] for count in (read_first, by_layer))
    means = np.array([[late[bucket].mean() for bucket in late] for late in first])
    level = np.array([[late[bucket].mean() for bucket in late] for late in answered])
    again = Again()
    again.text("Mean staleness of each layer", p)
    rows = []
    for bucket in range(len(sizes)):
        all_ = np.concatenate([late[bucket] for late in first])
        rows.append([len(sizes) - 1 - bucket, all_.min(), all_.mean(), np.median(all_), all_.max(), all_.std()])
    again.text("parameters read before a step", p, [[float(one) for one in row] for row in rows])
    again.claim(f"{KEY}lowest-layer-n-minus-one", means[:, -1] / (p - 1))
    again.claim(f"{KEY}staleness-depends-on-depth", means[:, -1] / means[:, 0])
    again.claim(f"{KEY}staleness-follows-the-pass", abs(means - formula).max(1) / (p - 1))
    again.claim(f"{KEY}reading-with-the-push-levels-layers", level[:, -1] / level[:, 0])
    real = by_layer(names["run"].run) if "run" in names else {}
    if real:
        again.text(
            "Staleness in updates, real ranks",
            [[bucket, late.mean(), late.min(), late.max()] for bucket, late in real.items()],
        )
    again.text(
        "reads all parameters before a step",
        *(with_ends(means[:, -1]), with_ends(means[:, 0]), with_ends(means[:, -1] / means[:, 0]), 1, p - 1),
        *(formula[-1], formula[0], with_ends(level[:, -1] / level[:, 0])),
        *(with_ends(level[:, -1]), with_ends(level[:, 0])),
    )
    return again


def injected_staleness(names: Names, kept: list[Kept]) -> Again:
    seeds, means, kinds, target = len(names["seeds"]), names["means"], names["kinds"], names["target"]
    runs = iter([item.run for item in kept if type(item.algorithm).__name__ == "StaleSGD"])
    constant = {mean: [next(runs) for _ in range(seeds)] for mean in means}
    others = {kind: [next(runs) for _ in range(seeds)] for kind in kinds}
    slow, abrupt = ([next(runs) for _ in range(seeds)] for _ in range(2))
    steps = names["epochs"] * -(-names["task"].num_samples() // names["batch_size"])

    def errors(found: list[Any]) -> Array:
        return np.array([90.0 if run is None else 100 - 100 * evaluations_of(run)[-1]["accuracy"] for run in found])

    none, last, kind_mean = errors(constant[0]), means[-1], names["kind_mean"]
    more = {mean: errors(constant[mean]) - none for mean in means}
    again = Again()
    again.text("Test error against average staleness", names["epochs"])
    rows = [[[mean], constant[mean]] for mean in means] + [[[kind_mean], others[kind]] for kind in kinds]
    rows += [[[last], abrupt], [[0, names["late_lr"]], slow]]
    table = [[entry, _targets_row(found, [target], steps)] for entry, found in rows]
    again.text("Updates to", target)
    again.text("updates, means of", steps, seeds, table)
    for mean in {20, 50} & {*means}:
        again.claim(f"{KEY}error-at-staleness-{mean}", more[mean])
    if 15 in means and last > 15:
        again.claim(f"{KEY}error-bends-upward-at-15", (more[last] - more[15]) / (last - 15) - more[15] / 15)
    needed = {
        name: _needed(found, target, steps)
        for name, found in ((0, constant[0]), (last, constant[last]), ("slow", slow))
    }
    gained, slower = errors(abrupt) - errors(constant[last]), needed[last] / needed[0]
    again.claim(f"{KEY}ramp-is-needed", gained)
    again.claim(f"{KEY}staleness-slows-convergence", slower)
    again.text(
        "changes the test error by",
        *(20, with_ends(more[20]), last, with_ends(more[50]), with_ends(errors(slow) - none), last, with_ends(gained)),
        *(target, with_ends(slower), last, with_ends(needed["slow"] / needed[0])),
    )
    return again


def _needed(found: list[Any], target: float, steps: int) -> Array:
    """Steps to an accuracy; all of them for a run that never has it."""
    return np.array([steps if run is None else min(first_at(run, "step", "accuracy", target), steps) for run in found])


def _targets_row(found: list[Any], targets: list[float], steps: int) -> list[Any]:
    """Accuracies at the end and at best, the step of the best, the steps to targets, how many have the last, and diverged."""
    rows = [evaluations_of(run) if run else [{"accuracy": 0.1, "step": steps - 1}] for run in found]
    best = [max(row["accuracy"] for row in one) for one in rows]
    at = [1 + min(row["step"] for row in one if row["accuracy"] == most) for one, most in zip(rows, best, strict=True)]
    last = [100 * one[-1]["accuracy"] for one in rows]
    reached = sum(run is not None and first_at(run, "step", "accuracy", targets[-1]) < np.inf for run in found)
    needed = [_needed(found, target, steps).mean() for target in targets]
    return [np.mean(last), 100 * np.mean(best), np.mean(at), *needed, reached, len(found), found.count(None)]


def best_backups(names: Names, kept: list[Kept]) -> Again:
    total, seeds, counts, goal, updates = (names[key] for key in ("total", "seeds", "counts", "goal", "updates"))
    drawn, distribution = names["drawn"], names["distribution"]
    runs = iter([item.run for item in kept])
    counted = np.array([[first_at(next(runs), "step", "loss", goal) for _ in seeds] for _ in counts])

    def needed(found: Array) -> Callable[[Array], Array]:
        """I(N) = 1 + S / N by least squares in 1 / N; where that fits nothing, straight lines between the points."""
        slope, limit = np.polyfit(1 / np.array(counts), found, 1)
        if limit > 0 and slope >= 0:
            return lambda number: limit + slope / number
        return lambda number: np.interp(number, counts, found) * np.maximum(1, counts[0] / number)

    def times(found: Array, one: Any, seed: int = 0) -> Array:
        """Of b = 0, 1, ...: iterations times the mean wait, if a late worker stays late."""
        seconds = one.quantile(generator(seed, "arrivals").random((drawn, total))) / one.mean
        gradients = np.arange(total, 0, -1)
        return needed(found)(gradients) * carried_s(seconds, gradients).mean(1)

    main = times(counted.mean(1), distribution)
    best, own = int(main.argmin()), [times(counted[:, i], distribution, seed) for i, seed in enumerate(seeds)]
    tried = sorted({*names["tried"], best})
    trained = {b: [next(runs) for _ in seeds] for b in tried}
    ends = {b: np.array([float(ends_of(run)[-1]) for run in found]) for b, found in trained.items()}
    took = {
        b: np.minimum([first_at(run, "seconds", "loss", goal) for run in found], ends[b])
        for b, found in trained.items()
    }
    last = {b: np.array([100 * evaluations_of(run)[-1]["accuracy"] for run in found]) for b, found in trained.items()}
    told = [np.mean([one[b] / took[b][i] for b in tried]) for i, one in enumerate(own)]
    quickest = min(tried, key=lambda b: took[b].mean())
    others = [times(counted.mean(1), _stragglers(name)) for name in names["more_distributions"]]
    halved, lost, points = (
        counted[counts.index(total // 2)] / counted[-1],
        took[best] / took[quickest],
        last[best] - last[tried[0]],
    )
    again = Again(labels=[names["stragglers"], *names["more_distributions"]])
    again.text("Updates to a test loss", goal, names["batch_size"], len(seeds))
    again.claim(f"{KEY}iterations-fall-with-n", halved)
    again.text("Time to a test loss", goal, total)
    again.claim(f"{KEY}few-backups-are-best", [one.argmin() / total for one in own])
    again.claim(f"{KEY}rule-predicts-time", told)
    again.claim(f"{KEY}rule-chooses-well", lost)
    rows = [[b, last[b].mean(), last[b].min(), last[b].max(), took[b].mean(), ends[b].mean()] for b in tried]
    again.text(" updates, ", updates, total, len(seeds), rows)
    again.claim(f"{KEY}backups-cost-no-accuracy", points)
    again.text("By the rule", total, [[one.argmin(), one[0] / one.min()] for one in (main, *others)])
    again.text(
        "The paper's rule chooses",
        *(best, total, main[0] / main[best], with_ends(lost), with_ends(told), updates),
        *(with_ends(points), with_ends(halved)),
    )
    return again


def _stragglers(name: str, factors: Array = ()) -> Any:
    """A distribution by its name, or of factors that were measured."""
    from workbench.costs import stragglers

    return stragglers.Empirical(values=tuple(factors.ravel().tolist())) if name == "empirical" else stragglers.get(name)


def learning_rate(names: Names, kept: list[Kept]) -> Again:
    p, batch, rates, seeds, epochs = (names[key] for key in ("workers", "batch_size", "rates", "seeds", "epochs"))
    easy, hard, worst = names["easy"], names["hard"], 0.0
    for number in (50, 100):  # the schedule alone, without an optimizer
        lr, schedule = schedules.synchronous(number, 1_281_167, 32)
        rule = [0.045 * number * 0.94 ** (t * number * 32 / (2 * 1_281_167)) for t in range(2000)]
        worst = max(worst, *(abs(lr * schedule.keywords["lr_lambda"](t) / wanted - 1) for t, wanted in enumerate(rule)))
    given = iter([item.run for item in kept])
    runs = {rate: [next(given) for _ in seeds] for rate in rates}
    steps = epochs * -(-names["num_samples"] // (p * batch))

    def best(found: list[Any]) -> Array:
        return np.array([100 * max(row["accuracy"] for row in evaluations_of(run)) if run else 10.0 for run in found])

    ends = {rate: best(found) for rate, found in runs.items()}
    small, large = rates[0], rates[2]
    to_easy, to_hard = ({rate: _needed(runs[rate], goal, steps) for rate in rates} for goal in (easy, hard))
    points, sooner, later = ends[large] - ends[small], to_easy[large] / to_easy[small], to_hard[small] / to_hard[large]
    again = Again()
    again.claim(f"{KEY}learning-rate-rule", worst)
    again.text("Test error", p, batch)
    rows = [[rate, _targets_row(found, [easy, hard], steps)] for rate, found in runs.items()]
    again.text("counts as all", len(seeds), steps, rows)
    again.claim(f"{KEY}small-rate-worse-in-the-end", points)
    again.claim(f"{KEY}small-rate-faster-at-easy-target", sooner)
    again.claim(f"{KEY}small-rate-later-at-hard-target", later)
    first = max(rates, key=lambda rate: ends[rate].mean())
    again.text(
        "The best accuracy with a rate of",
        *(large, small, with_ends(points), easy, large, with_ends(sooner), small),
        *(hard, small, with_ends(later), large, first, ends[first].mean() / 100, worst),
    )
    return again


def generative(names: Names, kept: list[Kept]) -> Again:
    seeds, workers, horizon, rates = (names[key] for key in ("seeds", "workers", "horizon", "rates"))
    untrained = math.log(names["task"].model().levels)
    given = iter([item.run for item in kept])

    def best(run: Any) -> list[tuple[float, float]]:
        """(time, least loss so far), up to the horizon, as the steps of a curve."""
        found = [(0.0, untrained)]
        for row in evaluations_of(run) if run else ():
            if row["seconds"] <= horizon:  # a mean gradient takes a second
                found.append((row["seconds"], np.nanmin([found[-1][1], row["loss"]])))
        return found

    tuned = [best(next(given))[-1][1] for _ in rates] if len(rates) > 1 else []
    rate = rates[int(np.argmin(tuned))] if tuned else rates[0]
    what = [("one worker", 1), *((name, p) for p in workers for name in ("Sync-Opt", "Async-Opt"))]
    runs = {item: [best(next(given)) for _ in seeds] for item in what}
    final = {item: np.array([one[-1][1] for one in found]) for item, found in runs.items()}
    alone = final["one worker", 1]
    synchronous, asynchronous = (
        np.min([final[name, p] for p in workers], axis=0) for name in ("Sync-Opt", "Async-Opt")
    )

    def reached(item: tuple[str, int]) -> Array:
        return np.array(
            [
                min((at for at, nll in one if nll <= goal), default=np.inf)
                for one, goal in zip(runs[item], alone, strict=True)
            ]
        )

    again = Again()
    again.text("untrained", num_values(names["task"]), names["task"].num_samples(), untrained)
    again.text("nats ->", [*zip(rates, tuned, strict=False)], rate)
    again.text("Best test NLL so far", names["spread"])
    named = {item: [] if item[1] == 1 else [item[1]] for item in what}
    rows = [[*named[item], nll.mean(), nll.mean() / math.log(2), nll.min(), nll.max()] for item, nll in final.items()]
    again.text("Best by time", horizon, len(seeds), rate, rows)
    again.claim(f"{KEY}generative-synchronous-best", np.minimum(alone, asynchronous) - synchronous)
    if 8 in workers:
        again.claim(f"{KEY}generative-asynchronous-worse-than-one-worker", final["Async-Opt", 8] - alone)
    there = np.mean([np.isfinite(reached(("Async-Opt", p))) for p in workers], axis=0)
    again.claim(f"{KEY}generative-asynchronous-never-there", there)
    if {8, 16} <= {*workers} and names["size"] != "smoke":
        again.claim(f"{KEY}generative-asynchronous-degrades", final["Async-Opt", 16] - final["Async-Opt", 8])
        ratios = reached(("one worker", 1)) / np.minimum(reached(("Sync-Opt", 16)), horizon)
        again.claim(f"{KEY}generative-time-to-target", ratios)
    within = {item: (found := reached(item))[np.isfinite(found)] for item in what}
    rows = [
        [*named[item], len(found), len(seeds), *([found.mean()] if len(found) else [])]
        for item, found in within.items()
    ]
    again.text("Time to the NLL", rows)
    again.whole = not names["own_rates"] and not names["larger_batch"]
    late = final["Async-Opt", workers[0]]
    again.text("best by time", workers[0], horizon, rate, late.mean(), (late < alone).sum(), len(seeds))
    few = final["Sync-Opt", workers[0]] - alone
    again.text("less one worker's", workers[0], names["batch_size"], student(few))
    answer = [horizon, with_ends(alone), workers[0], with_ends(few), with_ends(late - alone)]
    answer += [with_ends(np.minimum(alone, asynchronous) - synchronous), with_ends(there), workers[0]]
    again.text("mean times of a gradient one worker", answer, with_ends(late - alone))
    return again


def softsync(names: Names, kept: list[Kept]) -> Again:
    p, seeds, target, cutoffs = (names[key] for key in ("workers", "seeds", "target", "cutoffs"))
    given, distribution = iter([item.run for item in kept]), names["distribution"]
    order = [
        "synchronous",
        "backup workers",
        "asynchronous",
        "clipped",
        "cut off",
        "delay-compensated",
        "softsync",
        "stale synchronous",
    ]
    runs = {name: [next(given) for _ in seeds] for name in order}
    plain, clipped = ([next(given) for _ in seeds] for _ in range(2))
    middle = cutoffs[len(cutoffs) // 2]
    cut: dict[float, list[Any]] = {limit: [next(given) for _ in seeds] for limit in cutoffs if limit != middle}
    cut |= {middle: runs["cut off"], np.inf: runs["asynchronous"]}
    longest = max(ends_of(run)[-1] for found in runs.values() for run in found if run)

    def accuracy(found: list[Any]) -> Array:
        return np.array([100 * evaluations_of(run)[-1]["accuracy"] if run else 10.0 for run in found])

    def met(found: list[Any]) -> Array:
        return np.array([first_at(run, "seconds", "accuracy", target) if run else np.inf for run in found])

    def ages(found: list[Any]) -> tuple[Array, float]:
        """Staleness of the gradients that were used, and their share."""
        changes = [change for run in found if run for change in updates_of(run)]
        used = [age for change in changes for age in change["staleness"]]
        return np.array(used), len(used) / (len(used) + sum(len(change["dropped"]) for change in changes))

    def until(found: list[Any]) -> Array:
        """Seconds, for a run that never is there those of the longest."""
        return np.where(np.isfinite(met(found)), met(found), longest)

    def update_s(run: Any) -> float:
        ends = np.array([change["seconds"] for change in updates_of(run)])
        ends = ends[len(ends) // 10 : len(ends) - -(-len(ends) // 10)]
        return float(np.diff(ends).mean())

    times = {name: until(found) for name, found in runs.items()}

    def largest(t: float) -> float:
        """Quantile times density of the largest, at u = 1 - exp(-t)."""
        u = -math.expm1(-t)
        return float(distribution.quantile(u) * p * u ** (p - 1) * math.exp(-t))

    slowest = integrate.quad(largest, 0, 36, limit=500)[0] / distribution.mean
    waits, soft = ([update_s(next(given)) for _ in seeds] for _ in range(2))
    again = Again(labels=[names["stragglers"]])
    again.text("Time to", target, p)
    rows = []
    for name, found in runs.items():
        values, (late, share) = accuracy(found), ages(found)
        rows.append(
            [
                values.mean(),
                values.min(),
                times[name].mean(),
                np.isfinite(met(found)).sum(),
                late.mean(),
                late.max(),
                share,
            ]
        )
    again.text("means of", names["epochs"], p, len(seeds), rows)
    ratios = times["synchronous"] / times["backup workers"]
    points = accuracy(runs["backup workers"]) - accuracy(runs["asynchronous"])
    gained = accuracy(clipped) - accuracy(plain)
    again.claim(f"{KEY}backups-beat-waiting", ratios)
    again.claim(f"{KEY}backups-better-than-asynchronous", points)
    until_there = [
        [
            sum(row["seconds"] <= at for row in updates_of(run)) if run else 0
            for run, at in zip(found, met(found), strict=True)
        ]
        for found in (runs["asynchronous"], runs["backup workers"])
    ]
    epochs = np.array(until_there[0]) / (p - names["backups"]) / np.array(until_there[1])
    again.claim(f"{KEY}fewer-epochs", epochs)
    bound = (p - 1) * (2 * names["bound"] + 1)
    again.claim(f"{KEY}stale-synchronous-is-bounded", ages(runs["stale synchronous"])[0].max() / bound)
    again.claim(f"{KEY}asynchronous-needs-clipping", gained)
    rows = [
        [limit, accuracy(cut[limit]).mean(), ages(cut[limit])[1], until(cut[limit]).mean()] for limit in sorted(cut)
    ]
    again.text("Asynchronous SGD, ", p, len(seeds), [row[row[0] == np.inf :] for row in rows])
    again.claim(f"{KEY}synchronous-step-is-the-slowest", np.array(waits) / slowest)
    again.claim(f"{KEY}softsync-never-waits", soft)
    answer = [with_ends(ratios), target, names["backups"], p]
    answer += [with_ends(times[name] / times["backup workers"]) for name in order[2:]]
    answer += [
        with_ends(points),
        with_ends(epochs),
        names["large_lr"],
        with_ends(gained),
        with_ends(waits),
        with_ends(soft),
    ]
    again.text("Waiting for all takes", answer)
    return again


def tuned_settings(names: Names, kept: list[Kept]) -> Again:
    quadratic_workers, window, workers, rates, momenta, seeds = (
        names[key] for key in ("quadratic_workers", "quadratic_window", "workers", "rates", "momenta", "seeds")
    )
    given, every = iter([item.run for item in kept]), range(len(names["seeds"]))
    late = {}
    for p in quadratic_workers:
        ages = [np.array([change["staleness"][0] for change in updates_of(next(given))]) for _ in seeds]
        late[p] = [one[len(one) // 5 : len(one) - -(-len(one) // 5)] for one in ages]

    def momentum(ages: Array) -> float:
        """a of w[t+1] - w[t] = a (w[t] - w[t-1]) - b w[t], fitted to the mean of w[t+1] = w[t] - eta w[t - age] over windows."""
        paths = []
        for begin in range(0, len(ages) - window + 1, window):
            path = [1.0]
            for t, age in enumerate(ages[begin : begin + window]):
                path.append(path[t] - names["quadratic_rate"] * path[max(t - int(age), 0)])
            paths.append(path)
        mean = np.mean(paths, axis=0)
        moves = np.diff(mean)
        return float(np.linalg.lstsq(np.column_stack([moves[:-1], -mean[1:-1]]), moves[1:], rcond=None)[0][0])

    judged = quadratic_workers[-1]
    shown = np.array([momentum(ages) for ages in late[judged]])
    grid, guess = [(rate, mu) for rate in rates for mu in momenta], math.log(10)
    losses = {}
    for algorithm in ("synchronous", "asynchronous"):
        for p in workers:
            found = [[next(given) for _ in seeds] for _ in grid]
            losses[algorithm, p] = np.array(
                [[min(guess, evaluations_of(run)[-1]["loss"]) if run else guess for run in row] for row in found]
            )
    own = {key: np.array([grid[int(place)] for place in found.argmin(0)]) for key, found in losses.items()}

    def with_settings(algorithm: str, p: int, settings_of: str) -> Array:
        """Loss of each seed with what is best on the others."""
        chosen = [int(np.delete(losses[settings_of, p], i, axis=1).mean(1).argmin()) for i in every]
        return np.array([losses[algorithm, p][place, i] for i, place in enumerate(chosen)])

    few, most = workers[0], workers[-1]
    falls = own["asynchronous", most][:, 1] - own["asynchronous", few][:, 1]
    control = own["synchronous", most][:, 1] - own["synchronous", few][:, 1]
    again = Again(labels=["- 1/p"])
    again.claim(f"{KEY}asynchrony-is-momentum", shown / (1 - 1 / judged))
    again.claim(f"{KEY}staleness-is-geometric", [judged * np.mean(ages == 0) for ages in late[judged]])
    again.text("Test loss at the best rate", names["epochs"])
    rows = [[p, own[m, p][:, 1].mean(), own[m, p][:, 0].mean(), (1 - 1 / p) * (m == "asynchronous")] for m, p in losses]
    again.text("Each seed's best", len(grid), len(seeds), rows)
    again.claim(f"{KEY}best-momentum-falls", falls)
    pairs = [("synchronous", "synchronous"), ("asynchronous", "asynchronous"), ("asynchronous", "synchronous")]
    found = {(p, *pair): with_settings(pair[0], p, pair[1]) for p in workers for pair in pairs}
    again.text(
        "Test loss after",
        names["epochs"],
        len(seeds),
        [[key[0], row.min(), row.mean(), row.max()] for key, row in found.items()],
    )
    sync, tuned, untuned = (found[most, *pair] for pair in pairs)
    again.claim(f"{KEY}tuning-helps-asynchronous-more", (untuned - sync) - (tuned - sync))
    again.claim(f"{KEY}tuned-synchronous-still-better", tuned - sync)
    answer = [
        judged,
        with_ends(shown / (1 - 1 / judged)),
        1 - 1 / judged,
        few,
        most,
        with_ends(falls),
        with_ends(control),
    ]
    again.text("times the momentum of the theory", answer, with_ends(untuned - tuned), most, with_ends(tuned - sync))
    return again


def skewed_data(names: Names, kept: list[Kept]) -> Again:
    p, b, steps, seeds = (names[key] for key in ("workers", "backups", "steps", "seeds"))
    labels = np.array([int(label) for _, label in names["task"].train_data()])
    shards = np.array_split(np.argsort(labels, kind="stable"), p)
    slow = list(range(p - b, p))
    held = sorted(
        {int(label) for rank in slow for label in set(labels) if np.mean(labels[shards[rank]] == label) > 0.4}
    )
    given = iter([item.run for item in kept])
    order = [
        (kind, distribution, number)
        for kind in ("own", "shuffled")
        for distribution in ("at random", "permanently slow")
        for number in (0, b)
    ]
    runs = {key: [next(given) for _ in seeds] for key in order}
    without, some, soft = ([next(given) for _ in seeds] for _ in range(3))

    def accuracy(found: list[Any]) -> Array:
        return np.array([100 * evaluations_of(run)[-1]["accuracy"] for run in found])

    def share(found: list[Any]) -> float:
        sources = [source for run in found for change in updates_of(run) for source in change["sources"]]
        return sum(source in slow for source in sources) / len(sources)

    def points(kind: str, distribution: str) -> Array:
        return accuracy(runs[kind, distribution, b]) - accuracy(runs[kind, distribution, 0])

    random, shuffled = points("own", "at random"), points("shuffled", "permanently slow")
    never, lost, kept_more = (
        share(runs["own", "permanently slow", b]),
        accuracy(some) - accuracy(without),
        accuracy(soft) - accuracy(some),
    )
    again = Again()
    again.text("slow machines", slow, held)
    rows = []
    for (_, _, number), found in runs.items():
        last = [ends_of(run)[-1] for run in found]
        rows.append([number, accuracy(found).mean(), accuracy(found).min(), share(found), np.mean(last)])
    again.text("updates", steps, p, len(seeds), rows)
    again.text("permanently slow", b, p, steps, len(seeds))
    again.claim(f"{KEY}dropping-is-unbiased", random)
    again.claim(f"{KEY}slow-data-is-never-seen", never)
    again.text(
        "Accuracy on the classes", held, student(accuracy(without)), b, student(accuracy(some)), student(accuracy(soft))
    )
    again.claim(f"{KEY}slow-data-biases", lost)
    again.claim(f"{KEY}softsync-uses-all", kept_more)
    again.claim(f"{KEY}shuffled-shards-cure", shuffled)
    answer = [b, with_ends(random), len(held), never, with_ends(lost), with_ends(kept_more), with_ends(shuffled)]
    again.text("each worker holds its own classes", answer)
    return again


def arrival_statistics(names: Names, kept: list[Kept]) -> Again:
    p, seeds, servers, more, steps = (names[key] for key in ("workers", "seeds", "servers", "more_servers", "steps"))
    part, drawn, seconds, late, compute_s = (
        names[key] for key in ("last_share", "drawn", "seconds", "late", "compute_s")
    )
    if seconds is not None:
        late = _stragglers("empirical", seconds / np.median(seconds))
    distributions, given = (
        {name: _stragglers(name) for name in names["other_distributions"]},
        iter([item.run for item in kept]),
    )

    def draws(distribution: Any, seed: int, count: int = drawn) -> Array:
        return (
            np.sort([distribution.factors(seed, step, p) for step in range(count)], axis=1)
            * compute_s
            / distribution.mean
        )

    def heard(run: Any) -> Array:
        """(iterations, p) when the first server has received each gradient, since all servers have made the update before."""
        begins = np.zeros(steps + 1)
        for row in updates_of(run):
            begins[row["update"]] = max(begins[row["update"]], row["seconds"])
        table = run.spans.table[run.spans.kind_names == "recv"]
        ends = np.sort(table["end_s"][table["rank"] == p])[: steps * p]
        return ends.reshape(steps, p) - begins[:-1, None]

    def step_s(run: Any) -> float:
        ends = [row["seconds"] for row in updates_of(run) if row["bucket"] == 0] or ends_of(run)
        return float(np.diff(ends).mean())

    def by_then(times: Array, missing: int) -> float:
        return float(np.mean(times[:, -1 - missing] <= np.quantile(times[:, -1], part)))

    def independent(of: int, missing: int) -> float:
        return float(stats.binom.cdf(missing, of, 1 - part ** (1 / of)))

    fresh = [draws(late, seed) for seed in seeds]
    served = [heard(next(given)) for _ in seeds]
    missing = p - math.ceil(0.98 * p)
    early, expected = [by_then(found, missing) for found in fresh], independent(p, missing)
    apart = {
        name: np.array([by_then(draws(distribution, seed), missing) for seed in seeds]) - expected
        for name, distribution in distributions.items()
    }
    mean, half, high = np.array([found.mean(0) for found in served]), p // 2, math.floor(0.97 * p)
    bent = (mean[:, -1] - mean[:, high - 1]) / (p - high) / ((mean[:, high - 1] - mean[:, half - 1]) / (high - half))
    tails = [
        found[:, -1] - found[:, math.ceil(0.9 * p) - 1]
        for found in [*served, *(draws(late, seed, steps) for seed in seeds)]
    ]
    tail_s = np.mean(tails, axis=1).reshape(2, -1)
    plain = {kind: step_s(next(given)) for kind in ("servers", "ring")}
    slow = {kind: np.array([step_s(next(given)) for _ in seeds]) for kind in plain}
    adds = {kind: slow[kind] - plain[kind] for kind in plain}
    bare = {number: step_s(next(given)) for number in more}
    link, num_bytes = names["gathering"].scaled, 4 * num_values(names["gathering"].task)
    # A flag and a count more
    wire_s = {number: link.latency_s + (num_bytes / number + 8) / link.bandwidth_bytes_per_s for number in more}
    told = {number: compute_s + (p + number) * wire_s[number] for number in more}

    measured = f"{names['real_workers']} MPI ranks, {names['real_problem']}"
    again = Again(labels=[*distributions, measured, names["network"]])
    rows = [
        [*np.asarray(distribution.quantile(np.array([0.5, 0.9, 0.99, 0.999]))), distribution.mean]
        for distribution in (late, *distributions.values())
    ]
    again.text("Delays, as factors", rows)
    again.text("Arrival of the k-th", p)
    again.claim(f"{KEY}all-but-two-come-soon", early)
    rows = [[found.mean() + expected, expected] for found in apart.values()]
    if seconds is not None:
        rows.append([len(seconds), by_then(np.sort(seconds.T, axis=1), 1), independent(len(seconds), 1)])
    again.text("Share of the iterations in which all but", missing, p, rows)
    again.claim(f"{KEY}all-but-two-whatever-the-law", np.mean([*apart.values()], axis=0))
    again.text("Mean time to collect k", p)
    again.claim(f"{KEY}tail-grows", bent)
    again.claim(f"{KEY}tail-is-not-traffic", tail_s[1] / tail_s[0])
    again.text(
        "gradient of",
        p,
        names["model_bytes"],
        servers,
        [[plain[kind], slow[kind].mean(), adds[kind].mean()] for kind in plain],
    )
    again.claim(f"{KEY}ring-waits-too", adds["ring"] / adds["servers"])
    again.text("without delays", p, names["model_bytes"])
    again.claim(f"{KEY}servers-are-a-bottleneck", [bare[number] / told[number] for number in more])
    answer = [p, part, missing, with_ends(early), expected, 0.03, with_ends(bent), with_ends(tail_s[1] / tail_s[0])]
    answer += [servers, with_ends(adds["ring"] / adds["servers"]), plain["ring"]]
    answer += [bare[more[0]], more[0], bare[more[-1]], more[-1]]
    again.text("Let T be the time", answer)
    return again


NOTEBOOKS: dict[str, Callable[[Names, list[Kept]], Again]] = {
    "41-staleness-by-layer": staleness_by_layer,
    "42-injected-staleness": injected_staleness,
    "43-arrival-statistics": arrival_statistics,
    "44-best-backups": best_backups,
    "45-learning-rate": learning_rate,
    "47-generative": generative,
    "48-softsync-and-clipping": softsync,
    "49-tuned-hyperparameters": tuned_settings,
    "50-skewed-data": skewed_data,
}
