"""Your defaults: the run store, the launcher, the site's name, and options of Slurm, from one TOML file.

    # workbench.toml in the current folder, or ~/.config/workbench/config.toml; the first counts more
    runs = "/scratch/me/runs"
    launcher = "slurm"
    site = "lab-8-gpus"

    [slurm]
    account = "physics"
    partition = "gpu"

What you give in a call or on the command line counts most, then an environment variable, then the file.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from workbench.errors import ConfigError
from workbench.naming import unknown

VARIABLES = {
    "runs": "WORKBENCH_RUNS",
    "launcher": "WORKBENCH_LAUNCHER",
    "site": "WORKBENCH_SITE",
    "compiled_codecs": "WORKBENCH_COMPILED_CODECS",
}
KNOWN = {
    "runs": "folder of the run store",
    "launcher": "where `wb.Cluster` starts ranks",
    "site": "name of this machine in records",
    "compiled_codecs": "codecs in compiled C on a CPU: on or off",
    "slurm.account": "as for sbatch",
    "slurm.partition": "as for sbatch",
}
DEFAULTS = {"runs": "runs", "launcher": "local", "compiled_codecs": "on"}


@final
@dataclass(frozen=True, slots=True)
class Found:
    """A setting's value, and where it is from: a variable, a file or "default". None: it is not set."""

    name: str
    value: str | None
    origin: str


def files() -> tuple[Path, ...]:
    """Return the places of the file, the one that counts more first; $WORKBENCH_CONFIG names another file for all of them."""
    if os.environ.get("WORKBENCH_CONFIG"):
        return (Path(os.environ["WORKBENCH_CONFIG"]),)
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path("workbench.toml").absolute(), Path(home) / "workbench" / "config.toml"


def value_of(name: str) -> str | None:
    """Return the value of a setting; None if it is not set anywhere.

    Raises:
        ConfigError: a file cannot be read, or has a setting that does not exist.
    """
    return find(name).value


def is_on(name: str) -> bool:
    """Return whether a setting is "on".

    Raises:
        ConfigError: it is neither "on" nor "off".
    """
    found = find(name)
    if found.value not in ("on", "off"):
        raise ConfigError(f"{name} = {found.value!r}, from {found.origin}: give on or off")
    return found.value == "on"


def find(name: str) -> Found:
    """Return a setting with its origin. See `value_of`."""
    variable = VARIABLES.get(name)
    if variable is not None and os.environ.get(variable):
        return Found(name, os.environ[variable], f"${variable}")
    for path in files():
        value = read(path).get(name)
        if value is not None:
            return Found(name, os.path.expanduser(value) if name == "runs" else value, str(path))
    return Found(name, DEFAULTS.get(name), "default")


def read(path: Path) -> dict[str, str]:
    """Return the settings of a file by name, "slurm.account" for those of a table; {} if there is no file.

    Raises:
        ConfigError: it cannot be read, or has a setting that does not exist.
    """
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return {}
    return _parsed(path, changed)


@lru_cache(maxsize=8)
def _parsed(path: Path, _changed: int) -> dict[str, str]:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    found: dict[str, Any] = {}
    for key, value in given.items():
        found |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
    for name, value in found.items():
        if name not in KNOWN:
            raise ConfigError(f"{path}: {unknown('setting', name, KNOWN)}")
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{path}: {name} = {value!r}: give a text in quotation marks")
    return found
