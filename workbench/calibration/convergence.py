"""The number of steps that an algorithm needs to reach a loss, measured in given runs only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

from workbench.analysis.summary import time_to
from workbench.calibration.effective import codec_of
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.trace.run import Run

EXACT = "exact"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Convergence:
    """The number of steps that each recipe needs to reach a loss.

    A recipe is the settings that change numerical results. Buckets, orders and libraries are not part of it.

    Attributes:
        steps: recipe (see `recipe`) -> steps to the target loss; None: the loss was not reached.
        target_loss: target of the loss on the test data.
        source: the runs that were used.
    """

    steps: dict[str, float | None] = field(default_factory=dict)
    target_loss: float
    source: str

    def of(self, algorithm: Algorithm) -> float | None:
        """Return the steps that an algorithm needs.

        It is None if no run has its recipe, or if the run did not reach the loss.
        """
        return self.steps.get(recipe(algorithm))

    @classmethod
    def from_runs(cls, runs: Iterable[Run], target_loss: float) -> Convergence:
        """Measure with runs of one problem, batch size and number of workers: the mean over the runs of a recipe.

        Raises:
            ConfigError: there is no run, or the runs cannot be compared.
        """
        from workbench.calibration.from_run import batch_size_of_run

        chosen = list(runs)
        if not chosen:
            raise ConfigError("no run shows the time to a loss: give a run of each algorithm, on the same problem")
        kinds = {
            (
                str((run.info.get("problem") or {}).get("name")),
                run.info.get("num_workers"),
                batch_size_of_run(run) or "an unknown number of",
            )
            for run in chosen
        }
        if len(kinds) > 1:
            said = "; ".join(
                f"{name} on {workers} workers with {size} samples each"
                for name, workers, size in sorted(kinds, key=str)
            )
            raise ConfigError(
                f"these runs have different problems, numbers of workers or batch sizes ({said}): give runs with the "
                "same ones"
            )
        found: dict[str, list[float | None]] = {}
        for run in chosen:
            met = time_to(run, "test_loss", target_loss)
            found.setdefault(recipe_of_run(run), []).append(None if met is None else float(met["step"] + 1))
        steps = {
            key: None if None in values else sum(filter(None, values)) / len(values) for key, values in found.items()
        }
        (problem, workers, _), *_ = kinds
        return cls(steps=steps, target_loss=target_loss, source=f"{len(chosen)} runs of {problem} on {workers} workers")


def recipe(algorithm: Algorithm) -> str:
    """Return the settings that change an algorithm's numerical results: staleness, a codec, dropped gradients.

    >>> from workbench.algorithms import LayerwiseSGD, PipeSGD
    >>> recipe(LayerwiseSGD()), recipe(PipeSGD(width=3))
    ('exact', 'late by 2')
    """
    parts = []
    backups = getattr(algorithm, "backups", 0)
    if backups:
        parts.append(f"without {backups}")
    elif not algorithm.requires.servers and algorithm.max_staleness:
        parts.append(f"late by {algorithm.max_staleness}")
    codec = codec_of(algorithm)
    if codec:
        parts.append(codec)
    return ", ".join(parts) or EXACT


def recipe_of_run(run: Run) -> str:
    """Return the recipe of a recorded run."""
    algorithm = run.info.get("algorithm") or {}
    settings: dict[str, Any] = algorithm.get("settings") or {}
    parts = []
    if settings.get("backups"):
        parts.append(f"without {settings['backups']}")
    elif int(settings.get("width") or 1) > 1:
        parts.append(f"late by {int(settings['width']) - 1}")
    elif algorithm.get("name") not in ("SynchronousSGD", "LayerwiseSGD", "DeAR", "PipeSGD", "BackupSGD"):
        raise ConfigError(
            f"run {run.id} used {algorithm.get('name')}, which is not among the algorithms that can be recommended"
        )
    from workbench.calibration.from_run import codec_name

    codec = codec_name(run)
    return ", ".join([*parts, *([codec] if codec else [])]) or EXACT
