"""A study's folder: what was asked, the calibration, and which run of the store each training is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from workbench.calibration.model import Calibration
from workbench.errors import ConfigError
from workbench.trace.files.atomic import write_atomic
from workbench.trace.files.lock import locked
from workbench.trace.run import Run
from workbench.trace.store import runs_root

FILE = "study.json"


@final
@dataclass(slots=True)
class Saved:
    """Trainings by what they were, in memory and, of a study with a name, as runs of the store."""

    folder: Path | None = None
    _runs: dict[str, Run | None] = field(default_factory=dict)

    @classmethod
    def open(cls, name: str, asked: Mapping[str, Any]) -> Saved:
        """Open the folder of the study `name` in the store of runs, or make it.

        Raises:
            ConfigError: it holds a study of something else; the message names the difference.
        """
        if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
            raise ConfigError(f"name={name!r}: give a word without slashes, for a folder in {runs_root()}")
        folder = runs_root() / f"study-{name}"
        path = folder / FILE
        if path.exists():
            before = json.loads(path.read_text())["asked"]
            other = [key for key in {**before, **asked} if before.get(key) != asked.get(key)]
            if other:
                raise ConfigError(
                    f"{folder} is a study with other values of {' and '.join(other)}: give another name=, or "
                    "remove the folder"
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps({"asked": dict(asked), "trainings": {}}, indent=1) + "\n")
        return cls(folder)

    def calibration(self) -> Calibration | None:
        """Return the calibration that the study began with."""
        path = None if self.folder is None else self.folder / "calibration.json"
        return Calibration.load(path) if path is not None and path.exists() else None

    def set_calibration(self, calibration: Calibration) -> None:
        """Keep the calibration."""
        if self.folder is not None:
            calibration.save(self.folder / "calibration.json")

    def has(self, known: Mapping[str, Any]) -> bool:
        """Return whether this training was done."""
        return self._key(known) in self._runs or self._entry(known) is not None

    def run(self, known: Mapping[str, Any]) -> Run | None:
        """Return the run of a training; None if it diverged."""
        key = self._key(known)
        if key not in self._runs:
            entry = self._entry(known)
            assert entry is not None and self.folder is not None
            self._runs[key] = None if entry["diverged"] else Run.load(self.folder / entry["folder"])
        return self._runs[key]

    def add_run(self, known: Mapping[str, Any], run: Run | None) -> None:
        """Keep a training."""
        key = self._key(known)
        self._runs[key] = run
        if self.folder is None:
            return
        with locked(self.folder):  # another process may continue the same study
            if self._entry(known) is not None:
                return
            place = "" if run is None else os.path.relpath(run.save(), self.folder)
            record = json.loads((self.folder / FILE).read_text())
            record["trainings"][key] = {**known, "folder": place, "diverged": run is None}
            write_atomic(self.folder / FILE, json.dumps(record, indent=1) + "\n")

    def _entry(self, known: Mapping[str, Any]) -> dict[str, Any] | None:
        if self.folder is None:
            return None
        entry: dict[str, Any] | None = json.loads((self.folder / FILE).read_text())["trainings"].get(self._key(known))
        if entry is None or entry["diverged"] or (self.folder / entry["folder"] / "run.json").exists():
            return entry
        return None  # its run was removed

    @staticmethod
    def _key(known: Mapping[str, Any]) -> str:
        return hashlib.sha256(json.dumps(dict(known), sort_keys=True).encode()).hexdigest()[:10]
