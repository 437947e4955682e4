"""A cost model with its uncertainty: stored as readable JSON, and converted to `workbench.costs` objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Self, final

from workbench.analysis.table import Column, Table, num_bytes, percent, seconds
from workbench.calibration.parts import Estimate, Host, Line, Origin, Pace, Shapes
from workbench.calibration.record import (
    as_tuples,
    describe_distribution,
    distribution_of,
    distribution_record,
    without_nan,
)
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.trace.files.atomic import write_atomic
from workbench.units import GBIT_PER_S

VERSION = 2
COLUMNS = (
    Column("what", "what"),
    Column("value", "fitted"),
    Column("error", "± (1 sd)"),
    Column("relative", "", percent),
)
RESAMPLED = ("forward_s", "backward_s", "update_s", "other_s", "latency_s", "message_latency_s", "s_per_byte")


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Calibration:
    """A cost model fitted to real steps.

    Attributes:
        draws: fitted numbers of each resample of the steps, with the names in `RESAMPLED`.
        notes: what could not be determined, and the assumptions made instead.
    """

    origin: Origin
    shapes: Shapes
    pace: Pace
    line: Line
    host: Host = Host()
    draws: tuple[Mapping[str, float], ...] = ()
    notes: tuple[str, ...] = ()

    # -- as costs --------------------------------------------------------------------------------------------------

    def compute(self) -> Compute:
        """Return the compute costs of one rank. The unrecorded time of a step is added to the update."""
        pace = self.pace
        return Compute(
            forward_s=pace.forward_s.value,
            backward_s=pace.backward_s.value,
            update_s=pace.update_s.value + pace.other_s.value,
            stragglers=pace.stragglers,
            forward_shares=pace.forward_shares,
            backward_shares=pace.backward_shares,
        )

    def network(
        self,
        line_bytes_per_s: float | None = None,
        latency_s: float | None = None,
        *,
        codec: str | None = None,
    ) -> Network:
        """Return the measured network, or one with another nominal rate and the same efficiency.

        It has the costs of messages that an algorithm sends itself, and those of the library's own sums, whose additions
        are part of the time of their bytes. A simulation charges each request by its kind.

        Args:
            line_bytes_per_s: nominal rate of the other network; None: the measured one (`line.line_bytes_per_s`).
            latency_s: latency of a message in addition to the measured one.
            codec: the codec whose encoding and decoding are included.
        """
        line = self.line
        rate = 1 / line.s_per_byte.value if line_bytes_per_s is None else line_bytes_per_s * line.efficiency
        encode, decode = next(((encode, decode) for name, encode, decode in line.codecs if name == codec), (0.0, 0.0))
        return Network(
            latency_s=line.message_latency_s.value + (latency_s or 0.0),
            bandwidth_bytes_per_s=rate,
            sum_s_per_byte=line.sum_s_per_byte.value,
            encode_s_per_byte=encode,
            decode_s_per_byte=decode,
            fair=self.origin.runtime != "simulated",
            name="calibrated",
            library_latency_s=line.latency_s.value + (latency_s or 0.0),
            library_sum_s_per_byte=0.0,
        )

    def drawn(self, draw: Mapping[str, float]) -> Calibration:
        """Return the model with the numbers of one draw."""
        pace: dict[str, Any] = {
            name: Estimate(draw[name]) for name in RESAMPLED if name in draw and hasattr(self.pace, name)
        }
        line: dict[str, Any] = {
            name: Estimate(draw[name]) for name in RESAMPLED if name in draw and hasattr(self.line, name)
        }
        return replace(self, pace=replace(self.pace, **pace), line=replace(self.line, **line), draws=())

    # -- as text ---------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """Return every number with its standard error."""
        rate, shapes, pace, line = 1 / self.line.s_per_byte.value, self.shapes, self.pace, self.line
        rows = [
            _row("forward", pace.forward_s, seconds),
            _row("backward", pace.backward_s, seconds),
            _row("update", pace.update_s, seconds),
            _row("rest of a step", pace.other_s, seconds),
            *(
                {"what": "slowed by", "value": describe_distribution(one), "error": "", "relative": None}
                for one in pace.stragglers
            ),
            _row("latency of a hop", line.latency_s, seconds),
            _row("latency of a message", line.message_latency_s, seconds),
            _row("bandwidth", Estimate(rate, rate * line.s_per_byte.error / line.s_per_byte.value), _bits),
            _row("to sum a byte", line.sum_s_per_byte, _nanoseconds),
        ]
        origin = self.origin
        caption = (
            f"{origin.algorithm} on {origin.num_workers} ranks ({origin.runtime}), {origin.num_steps} steps; "
            f"{len(shapes.parameters)} parameters, {num_bytes(shapes.num_bytes)}, {shapes.batch_size} samples a worker"
        )
        return Table([row for row in rows if row], COLUMNS, caption=caption)

    def __str__(self) -> str:
        lines = [str(self.table())]
        lines += [f"stragglers: {self.pace.fit}"] if self.pace.fit else []
        host = self.host
        if host.cores is not None:
            a_byte = f"{host.cpu_s_per_byte * 1e9:.3g} ns of a core a byte"
            lines.append(f"cores: {host.cores:g} that all ranks share, {host.threads} threads a rank, {a_byte}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    # -- as JSON ---------------------------------------------------------------------------------------------------

    def as_record(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        record = {name: asdict(getattr(self, name)) for name in ("origin", "shapes", "pace", "line", "host")}
        record["pace"]["stragglers"] = [distribution_record(one) for one in self.pace.stragglers]
        return {"version": VERSION, **record, "draws": [dict(draw) for draw in self.draws], "notes": list(self.notes)}

    def save(self, path: Path | str) -> Path:
        """Write JSON atomically; return the path."""
        path = Path(path)
        text = json.dumps(without_nan(self.as_record()), indent=1, allow_nan=False)
        try:
            write_atomic(path, text + "\n")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}): name a file in a folder that exists"
            ) from error
        return path

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: the file cannot be read, or is not a calibration of this version.
        """
        try:
            record = json.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}): make one with `workbench calibrate RUN -o {path}`"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{path} is not JSON ({error}): make it again with `workbench calibrate RUN -o {path}`"
            ) from error
        return cls.from_record(record, str(path))

    @classmethod
    def from_record(cls, record: Any, name: str = "the record") -> Self:
        """Make a calibration from `as_record`."""
        if isinstance(record, dict) and "traceEvents" in record:
            raise ConfigError(
                f"{name} is a trace by torch.profiler, not a calibration: make one with `workbench calibrate {name} "
                "--batch-size N "
                "-o calibration.json`, and give that file"
            )
        if not isinstance(record, dict) or record.get("version") != VERSION:
            found = record.get("version") if isinstance(record, dict) else type(record).__name__
            raise ConfigError(
                f"{name} is not a calibration of version {VERSION} (it has {found!r}): repeat `workbench calibrate`"
            )
        try:
            pace = {**record["pace"], "stragglers": tuple(distribution_of(one) for one in record["pace"]["stragglers"])}
            return cls(
                origin=Origin(**record["origin"]),
                shapes=Shapes(
                    **{
                        **record["shapes"],
                        "parameters": tuple((key, tuple(shape)) for key, shape in record["shapes"]["parameters"]),
                    }
                ),
                pace=Pace(**{key: _read(value) for key, value in pace.items()}),
                line=Line(**{key: _read(value) for key, value in record["line"].items()}),
                host=Host(**record["host"]),
                draws=tuple(record["draws"]),
                notes=tuple(record["notes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{name} is a damaged calibration ({type(error).__name__}: {error}): make it again with `workbench "
                "calibrate`"
            ) from error


def _bits(value: float) -> str:
    return f"{value / GBIT_PER_S * 1e3:.4g} Mbit/s"


def _nanoseconds(value: float) -> str:
    return f"{value * 1e9:.3g} ns"


def _row(what: str, estimate: Estimate, show: Any) -> dict[str, Any]:
    known = isfinite(estimate.error)
    relative = estimate.error / estimate.value if known and estimate.value > 0 else None
    return {
        "what": what,
        "value": show(estimate.value),
        "error": show(estimate.error) if known else "given",
        "relative": relative,
    }


def _read(value: Any) -> Any:
    """Convert a value from JSON: an estimate, or tuples for lists."""
    if isinstance(value, dict):
        return Estimate(float(value["value"]), float("nan") if value["error"] is None else float(value["error"]))
    return as_tuples(value)
