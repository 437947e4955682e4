"""Consistency of ranks: facts that are compared before the first step."""

from __future__ import annotations

import json
import platform
import warnings
import zlib
from collections.abc import Sequence

import torch

from workbench.content import code_digest
from workbench.errors import RankMismatch
from workbench.gradients import Layout
from workbench.problems.base import Problem, epoch_order
from workbench.problems.loading import ENDLESS, Source
from workbench.program import Algorithm
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import require_all
from workbench.runtimes.rank.fingerprint import package_digest, source_digest
from workbench.runtimes.transport.base import Transport
from workbench.settings import Settings

Facts = dict[str, str]

# Facts that may differ, with a note in the record: they change no message's order or length, and values only in a last
# bit.
NOTED_DIFFERENCES = ("build of torch", "patch of Python", "problem", "code of the problem")
FIXES = {
    "workbench": "Install the same version on every rank, or check out the same commit",
    "torch": "Install the same version on every rank",
    "Python": "Install the same version on every rank",
    "samples": "Give every rank the same data; the sampler deals them out (problems.shards: a shard for each)",
}
FIXES["order of the samples"] = (
    "Let the sampler draw from the global generator of torch, NumPy or Python, which each rank seeds equally"
)
FIXES |= dict.fromkeys(("training data", "test data"), FIXES["samples"])
MAX_NAMED = 4


def versions() -> Facts:
    """Versions of this rank's software."""
    number, _, build = torch.__version__.partition("+")
    major, minor, patch = platform.python_version_tuple()
    python = {"Python": f"{major}.{minor}", "patch of Python": patch}  # pickled functions need the same minor version
    return {"workbench": f"sources {package_digest()}", "torch": number, "build of torch": build or "plain", **python}


def facts_of_layout(layout: Layout) -> Facts:
    """The order, shapes and types of the parameters."""
    return {f"parameter {number}": line for number, line in enumerate(layout.describe())}


def facts_of_optimizer(optimizer: torch.optim.Optimizer) -> Facts:
    """The class of an optimizer, and the settings of each of its groups, without those that schedules add.

    >>> facts_of_optimizer(torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2))], lr=0.5))["group 0, lr"]
    '0.5'
    """
    kind = type(optimizer)
    facts = {"optimizer": f"{kind.__module__}.{kind.__qualname__}"}
    for number, group in enumerate(optimizer.param_groups):
        sizes = [param.numel() for param in group["params"]]
        settings = {name: _text_of(value) for name, value in group.items() if name in optimizer.defaults}
        settings["params"] = f"{len(sizes)} of {sum(sizes):,} numbers"
        facts |= {f"group {number}, {name}": value for name, value in settings.items()}
    return facts


def _text_of(value: object) -> str:
    """Describe a setting, the same on all ranks if it is equal: without addresses in memory."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text_of, value))})"
    if isinstance(value, int | float | str | None):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def facts_of_run(
    algorithm: Algorithm,
    problem: Problem,
    settings: Settings,
    layout: Layout,
    data: tuple[Source, Source | None],
) -> Facts:
    """Facts that must be equal on all ranks; those that explain other differences come first."""
    return {
        **versions(),
        "algorithm": str(algorithm),
        "code of the algorithm": code_digest(algorithm),
        **{f"setting {name}": str(value) for name, value in settings.as_record().items()},
        "code of the optimizer": code_digest(settings.optimizer or problem.optimizer, settings.schedule),
        "problem": problem.name,
        "samples": "a stream" if data[0].num_samples == ENDLESS else str(data[0].num_samples),
        "training data": source_digest(data[0]),
        "order of the samples": _order_digest(settings.seed, data[0]),
        "test data": source_digest(data[1]),
        **facts_of_layout(layout),
        "code of the problem": code_digest(
            problem.model,
            problem.loss,
            problem.correct,
            *(metric.function for metric in problem.named_metrics().values()),
        ),
    }


def _order_digest(seed: int, source: Source) -> str:
    """Return a digest of the first epoch's order, as a sampler of the user's draws it."""
    if source.num_samples == ENDLESS:
        return "a stream's"
    return f"{zlib.crc32(epoch_order(seed, 0, source.num_samples, source).tobytes()):08x}"


def check_consistency(facts: Facts, transport: Transport, interpreter: Interpreter) -> list[str]:
    """Compare the facts of all ranks. Return notes on allowed differences; rank 0 warns of them.

    Raises:
        RankMismatch: another fact differs; names the ranks that differ from most.
    """
    deadline = interpreter.clock.deadline("all ranks to describe their model, data and software")
    texts = require_all(transport.gather_texts(json.dumps(facts), deadline), "the beginning of a run")
    differences = compare([json.loads(text) for text in texts])
    wrong = {name: words for name, words in differences.items() if name not in NOTED_DIFFERENCES}
    if wrong:
        name, words = next(iter(wrong.items()))
        others = list(differences)[:MAX_NAMED]
        others.remove(name) if name in others else None
        more = f" Also different: {', '.join(others)}." if others else ""
        raise RankMismatch(f"{words}. {FIXES.get(name, 'Give every rank the same model and settings')}.{more}")
    notes = [f"{words}: the run continues, because only last bits may differ" for words in differences.values()]
    if transport.rank == 0:
        for line in notes:
            warnings.warn(line, RuntimeWarning, stacklevel=2)
    return notes


def compare(everyone: Sequence[Facts]) -> dict[str, str]:
    """Differences by name, as text. The value of most ranks counts as right; in a tie, that of the lowest rank.

    >>> compare([{"torch": "2.9"}, {"torch": "2.8"}, {"torch": "2.9"}])
    {'torch': "rank 1 differs from ranks 0 and 2: torch is '2.9' on ranks 0 and 2, and '2.8' on rank 1"}
    """
    names = dict.fromkeys(name for facts in everyone for name in facts)
    found = {}
    for name in names:
        values = [facts.get(name, "missing") for facts in everyone]
        groups: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            groups.setdefault(value, []).append(rank)
        if len(groups) > 1:
            found[name] = _difference(name, groups)
    return found


def _difference(name: str, groups: dict[str, list[int]]) -> str:
    usual = max(groups, key=lambda value: len(groups[value]))  # in a tie, the group with the lowest rank
    odd = {value: ranks for value, ranks in groups.items() if value != usual}
    those = sorted(rank for ranks in odd.values() for rank in ranks)
    differ = "differs" if len(those) == 1 else "differ"
    where = [f"{value!r} on {_ranks(ranks)}" for value, ranks in list(odd.items())[:MAX_NAMED]]
    return (
        f"{_ranks(those)} {differ} from {_ranks(groups[usual])}: {name} is {usual!r} on {_ranks(groups[usual])}, "
        f"and {', '.join(where)}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MAX_NAMED:
        return f"{len(ranks)} ranks (the first is {ranks[0]})"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
