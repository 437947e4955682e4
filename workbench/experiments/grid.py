"""A grid of runs, from a YAML file: common options (base), axes, excluded cells, and additional cells (include)."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from workbench.content import digest, digest_of
from workbench.errors import ConfigError
from workbench.experiments.yaml_file import read_yaml
from workbench.naming import parse_value, unknown
from workbench.run_spec import OPTION_GROUPS, check_train, train_options
from workbench.user_file import is_in_user_file, load

ENTRIES = ("name", "notebook", "base", "axes", "include", "exclude", "jobs", "timeout_s")
# Options with their own settings, as in {pipe-sgd: {width: 2}} -> prefix of the settings' keys.
NESTED = {"algorithm": "set", "problem": "option", "optimizer": "optimizer_set"}
SAME = {"micro_batches": "num_micro"}  # option of the command line -> its key
RENAMED = {"method": "algorithm"}  # option of earlier versions -> its present name
REPEATED = ("stragglers", "log")  # options that may be repeated: their value may be a list
REFUSED = ("json", "resume")  # options of `workbench train` that do not define a run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a sweep.

    Attributes:
        values: value of each option. "algorithm" is the algorithm's name, and its settings are "set.width" and so on.
        axes: the values of `values` that differ between cells.
        notebook: the notebook to execute with these parameters; None for a run of `workbench train`.
        content: digest of the notebook's code, and of each value that names an object in your file.
    """

    values: dict[str, Any]
    axes: dict[str, Any] = field(default_factory=dict)
    notebook: str | None = None
    content: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that identify the code and the values, whatever the order of the values."""
        content = {"notebook": self.notebook, **self.values} if self.notebook else self.values
        if self.content:
            content = {**content, "content": self.content}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """The values that distinguish the cell, as text.

        >>> Cell(values={}, axes={"algorithm": "pipe-sgd", "set.width": 2, "seed": 0}).label
        'pipe-sgd width=2 seed=0'
        """
        first = {"algorithm": 0, "set": 1}  # the algorithm comes first, then its settings
        names = sorted(self.axes, key=lambda name: first.get(name.split(".")[0], 2))
        words = []
        for name in names:
            value = word(self.axes[name])
            words.append(value if name == "algorithm" else f"{name.split('.')[-1]}={value}")
        return " ".join(words) or str(self.values.get("algorithm") or self.notebook)

    def train_arguments(self) -> list[str]:
        """Return the arguments of `workbench` that run the cell.

        >>> Cell(values={"algorithm": "pipe-sgd", "set.width": 2, "lr": 0.1, "compile": True}).train_arguments()
        ['train', 'pipe-sgd', '--set=width=2', '--lr=0.1', '--compile']
        """
        words = ["train", str(self.values["algorithm"])]
        for name, value in self.values.items():
            group, _, inner = name.partition(".")
            flag = f"--{group.replace('_', '-')}"
            if inner:
                words.append(f"{flag}={inner}={word(value)}")
            elif value is True:
                words.append(flag)
            elif name != "algorithm" and value is not None and value is not False:
                words += [f"{flag}={word(item)}" for item in (value if isinstance(value, list) else [value])]
        return words


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The cells of a sweep.

    Attributes:
        name: the sweep's name; a sweep of the same name continues where it stopped.
        cells: the cells.
        notebook: the notebook that all cells execute; None for runs of `workbench train`.
        jobs: number of cells that run at a time.
        timeout_s: limit for one cell, in seconds; None for no limit.
    """

    name: str
    cells: tuple[Cell, ...]
    notebook: str | None = None
    jobs: int = 1
    timeout_s: float | None = None


def word(value: Any) -> str:
    """Return a value as text that the command line parses as the same value.

    >>> [word(value) for value in (True, None, 0.001, "ring:truncate16", [64, 32])]
    ['true', 'none', '0.001', 'ring:truncate16', '[64, 32]']
    """
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def read_grid(source: Path | str | Mapping[str, Any]) -> Grid:
    """Read a grid from a YAML file, or from the content of such a file. Check each cell as `workbench train` does.

    Raises:
        ConfigError: the file cannot be read, a name is unknown, or a cell is not valid; the message says which
            and why.
    """
    if isinstance(source, Mapping):
        content, where = dict(source), "the grid"
    else:
        content, where = read_yaml(Path(source)), str(source)
        content.setdefault("name", Path(source).stem)
    for entry in content:
        if entry not in ENTRIES:
            raise ConfigError(f"{where}: {unknown('entry of a grid', str(entry), ENTRIES)}")
    name = content.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{where}: name: {name!r}: give the sweep a name of letters, digits, dots and hyphens")
    notebook = content.get("notebook")
    reader = _Notebook(notebook, where) if notebook else _Train(where)
    cells = _cells(content, reader, where)
    jobs, timeout_s = content.get("jobs", 1), content.get("timeout_s")
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise ConfigError(f"{where}: jobs: {jobs!r}: give the number of cells that run at a time, 1 or more")
    if timeout_s is not None and (
        isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0
    ):
        raise ConfigError(f"{where}: timeout_s: {timeout_s!r}: give the seconds that one cell may take, above 0")
    for cell in cells:
        try:
            reader.check(cell)
        except ConfigError as error:
            raise ConfigError(f"{where}: cell {cell.label}: {error}") from None
    return Grid(name=name, cells=cells, notebook=reader.notebook, jobs=jobs, timeout_s=timeout_s)


def _cells(content: dict[str, Any], reader: _Train | _Notebook, where: str) -> tuple[Cell, ...]:
    base = _mapping(content, "base", where)
    reader.options(base)  # its errors first
    axes = _mapping(content, "axes", where)
    choices = []
    for axis, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: axes: {axis}: give a list of values, such as [1, 2]")
        choices.append([reader.choice(str(axis), value) for value in values])
    chosen = [_merged(*choice) for choice in itertools.product(*choices)] if axes or "include" not in content else []
    found = [_on_base(base, options, reader) for options in chosen]
    for number, rule in enumerate(_list(content, "exclude", where), 1):
        left = [values for values in found if not _matches(values, reader.pattern(rule))]
        if len(left) == len(found):
            raise ConfigError(f"{where}: exclude: entry {number}, {rule}, matches no cell: correct or remove it")
        found = left
    found += [_on_base(base, reader.options(extra), reader) for extra in _list(content, "include", where)]
    try:
        distinct = {json.dumps(values, sort_keys=True): values for values in found}
    except TypeError as error:  # a date
        raise ConfigError(f"{where}: {error}: write such a value in quotes") from None
    if not distinct:
        raise ConfigError(f"{where}: no cell is left: give axes with values, or include")
    every = list(distinct.values())
    names = list(dict.fromkeys(name for values in every for name in values))
    vary = [name for name in names if len({json.dumps(values.get(name)) for values in every}) > 1]
    return tuple(
        Cell(
            values=values,
            axes={name: values[name] for name in vary if name in values},
            notebook=reader.notebook,
            content=reader.content(values),
        )
        for values in every
    )


def _on_base(base: dict[str, Any], options: dict[str, Any], reader: _Train | _Notebook) -> dict[str, Any]:
    """Return the options of a cell, on top of the base.

    Settings of a name in the base, as in {pipe-sgd: {width: 2}}, are not those of another name in `options`.
    """
    kept = {
        name: value
        for name, value in base.items()
        if not (isinstance(value, Mapping) and name in NESTED and options.get(name) not in (None, *value))
    }
    return _merged(reader.options(kept), options)


def _merged(*mappings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for mapping in mappings for name, value in mapping.items()}


def _mapping(content: dict[str, Any], entry: str, where: str) -> dict[str, Any]:
    found = content.get(entry) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: {entry}: give `name: value` lines, not {found!r}")
    return dict(found)


def _list(content: dict[str, Any], entry: str, where: str) -> list[dict[str, Any]]:
    found = content.get(entry) or []
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise ConfigError(f"{where}: {entry}: give a list of mappings, such as [{{algorithm: pipe-sgd, workers: 4}}]")
    return [dict(item) for item in found]


def _matches(values: dict[str, Any], pattern: dict[str, Any]) -> bool:
    """Return True if the values match a pattern; a list in it matches any of its values."""
    return all(
        name in values and (values[name] == wanted or (isinstance(wanted, list) and values[name] in wanted))
        for name, wanted in pattern.items()
    )


@final
class _Train:
    """Reads the options of `workbench train`."""

    notebook = None

    def __init__(self, where: str) -> None:
        self._where = where
        self._known = [name for name in train_options() if name not in REFUSED]

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return option -> value, with settings as "set.width" and so on."""
        found = _merged(*(self._option(str(name), value) for name, value in given.items()))
        for name, value in found.items():
            self._check_one(name, value)
        return found

    def choice(self, axis: str, value: Any) -> dict[str, Any]:
        """Return the options that one value of an axis sets.

        If the axis is not an option, its values are mappings of options.
        """
        self._refuse_renamed(axis)
        known = axis.split(".")[0] in self._known
        return self.options({axis: value}) if known or not isinstance(value, Mapping) else self.options(value)

    def pattern(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pattern of an entry of `exclude`. A list in it matches any of its values."""
        return _merged(*(self._option(str(name), value) for name, value in given.items()))

    def _check_one(self, name: str, value: Any) -> None:
        """Refuse a list, because the command line would use only its last value."""
        if isinstance(value, list) and "." not in name and name not in REPEATED:
            raise ConfigError(f"{self._where}: {name}: {value}: give one value; several values belong under axes")

    def content(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return option -> digest of the file that it names, and of what the named object uses of other files."""
        named = {name: value for name, value in values.items() if isinstance(value, str) and is_in_user_file(value)}
        return {name: _digest_of_object(value) for name, value in named.items()}

    def check(self, cell: Cell) -> None:
        """Check a cell as `workbench train` does.

        Raises:
            ConfigError: the cell is not valid.
        """
        if "algorithm" not in cell.values:
            raise ConfigError("it has no algorithm: give one under base or axes; `workbench algorithms` lists them")
        check_train(cell.train_arguments()[1:])

    def _refuse_renamed(self, name: str) -> None:
        if name in RENAMED:
            raise ConfigError(
                f"{self._where}: no option of `workbench train` is called {name!r}: did you mean {RENAMED[name]}? "
                f"Earlier versions called it {name!r}"
            )

    def _option(self, name: str, value: Any) -> dict[str, Any]:
        name = name.replace("-", "_")
        name = SAME.get(name, name)
        group, _, inner = name.partition(".")
        self._refuse_renamed(group)
        if group not in self._known:
            raise ConfigError(f"{self._where}: {unknown('option of `workbench train`', name, self._known)}")
        if inner and group not in OPTION_GROUPS:
            raise ConfigError(
                f"{self._where}: {name}: {group} has no settings; only {', '.join(OPTION_GROUPS)} have this form"
            )
        if group in OPTION_GROUPS and not inner:
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{self._where}: {name}: give `name: value` pairs, such as {{width: 2}}, not {value!r}"
                )
            return {f"{name}.{str(key).replace('-', '_')}": _plain(item) for key, item in value.items()}
        if name in NESTED and isinstance(value, Mapping):
            if len(value) != 1 or not all(isinstance(item, Mapping) for item in value.values()):
                raise ConfigError(
                    f"{self._where}: {name}: write one name and its settings, such as {{pipe-sgd: {{width: 2}}}}, not "
                    f"{value!r}"
                )
            ((word, settings),) = value.items()
            return {name: word, **self._option(NESTED[name], settings)}
        if name == "trace_steps" and _plain(value) is None:  # as in `Settings`, where 2,000 is the default
            return {name: "all"}
        return {name: _plain(value)}


@final
class _Notebook:
    """Reads the parameters of a notebook."""

    def __init__(self, notebook: Any, where: str) -> None:
        from workbench.experiments.notebook_catalogue import code_of, find_notebook, parameters_of

        self.notebook: str | None = str(notebook)
        self._path = find_notebook(str(notebook))
        self._digest = digest(*(code.encode() for code in code_of(self._path)))
        self._where = where
        self._known = [parameter.name for parameter in parameters_of(self._path)]

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameter -> value."""
        for name in given:
            if name not in self._known:
                raise ConfigError(f"{self._where}: {unknown(f'parameter of {self.notebook}', str(name), self._known)}")
        return dict(given)

    def choice(self, axis: str, value: Any) -> dict[str, Any]:
        """Return the parameters that one value of an axis sets."""
        if axis not in self._known and isinstance(value, Mapping):
            return self.options(value)
        return self.options({axis: value})

    def pattern(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pattern of an entry of `exclude`."""
        return self.options(given)

    def content(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the digest of the notebook's code."""
        return {"notebook": self._digest}

    def check(self, cell: Cell) -> None:
        """Check that the notebook uses the cell's values; `options` has checked the names.

        Raises:
            ConfigError: a later cell replaces one.
        """
        from workbench.experiments.notebook_catalogue import check_given

        check_given(self._path, cell.values)


def _digest_of_object(name: str) -> str:
    """Return the digest of a user's file, as it is now, and of the object in it that `file.py:name` names."""
    try:
        text = Path(name.rpartition(":")[0]).expanduser().read_bytes()
        return digest(text, str(digest_of(load(name, "object", callable))).encode())
    except (OSError, ConfigError):  # the check of the cell has the message
        return ""


def _plain(value: Any) -> Any:
    """Return the value as the command line parses it: the text "1e-3" is a number."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return parse_value(value) if isinstance(value, str) else value
