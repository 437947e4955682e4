"""The record of predicted and measured steps on emulated hosts (`records/predictions.json`), for notebooks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from workbench import problems, resources
from workbench.calibration import Calibration, predict
from workbench.calibration.probe import without_hold_up
from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.program import Algorithm

SHORT_NAMES = {"synchronous": "D-Sync", "Pipe-SGD": "Pipe-SGD", "Pipe-SGD, 16-bit hops": "Pipe-SGD+T"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A measured step and its prediction.

    Attributes:
        model, algorithm: what was trained, and by which algorithm.
        hosts, rate_mbit: on which hosts, with links of this rate.
        measured_s: seconds of a step.
        error: predicted over measured, minus one.
    """

    model: str
    algorithm: str
    hosts: int
    rate_mbit: float
    measured_s: float
    error: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Calibrations on two hosts, and the steps of the paper's algorithms that they predict.

    Attributes:
        calibrations: model -> what was fitted on two hosts.
        problems, batch_sizes: model -> its problem, and its minibatch.
        cells: predicted steps, without those to which the calibration was fitted.
    """

    calibrations: Mapping[str, Calibration]
    problems: Mapping[str, Problem]
    batch_sizes: Mapping[str, int]
    cells: tuple[Cell, ...]

    @classmethod
    def read(cls, record: str) -> Predictions:
        """Read a record of the checkout.

        Args:
            record: its path in the checkout, such as "records/predictions.json".

        Raises:
            ConfigError: there is no such record.
        """
        path = resources.shared("papers").parent / record
        if not path.is_file():
            raise ConfigError(
                f"{record}: there is no {path}; run in a checkout, or give a record of `make predictions`"
            )
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        models: dict[str, dict[str, Any]] = content["how"]["models"]
        cells = tuple(
            Cell(
                model=row["model"],
                algorithm=SHORT_NAMES[row["algorithm"]],
                hosts=row["hosts"],
                rate_mbit=float(row["rate"].removesuffix("mbit")),
                measured_s=row["measured_s"],
                error=row["error"],
            )
            for row in content["rows"]
            if row["algorithm"] in SHORT_NAMES and not row["fitted"]
        )
        return cls(
            calibrations={
                name: without_hold_up(Calibration.from_record(one)) for name, one in content["calibrations"].items()
            },
            problems={name: problems.get(model["problem"], **model["options"]) for name, model in models.items()},
            batch_sizes={name: model["batch_size"] for name, model in models.items()},
            cells=cells,
        )

    def predicted_again(self, algorithms: Mapping[str, Algorithm]) -> Predictions:
        """Return the same cells with the errors of the present simulator, for the same calibrations and measurements.

        Args:
            algorithms: name -> algorithm.
        """

        def error(cell: Cell) -> float:
            found = predict(
                self.calibrations[cell.model],
                algorithms[cell.algorithm],
                workers=cell.hosts,
                bandwidth_bytes_per_s=125e3 * cell.rate_mbit,
                draws=0,
            )
            return found.usual_s / cell.measured_s - 1

        return replace(self, cells=tuple(replace(cell, error=error(cell)) for cell in self.cells))

    def errors(self, hosts: int, algorithm: str | None = None) -> list[float]:
        """Return the absolute errors of the cells with this number of hosts, of one algorithm or of all."""
        return [abs(cell.error) for cell in self.cells if cell.hosts == hosts and algorithm in (None, cell.algorithm)]
