"""The training algorithms, one file each.

The folder is long and flat on purpose: a file is one algorithm, and none imports another. What several share is not an
algorithm: `parameter_server`, `first_gradients`, `outer_optimizer`, `gossip`, `quorum` and `staleness`.

Imports `collectives`, `codecs`, `topologies`, `program` and layers below, and never a runtime. Used by `calibration`, `plots`,
`clusters` and layers above. Begin with `synchronous`, then `pipe`.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import get_annotations
from typing import Any

from workbench import codecs, collectives, topologies
from workbench.algorithms.ad_psgd import ADPSGD
from workbench.algorithms.adaptive_delay import AdaptiveDelaySGD
from workbench.algorithms.adasum import AdasumSGD
from workbench.algorithms.async_sgd import AsyncSGD
from workbench.algorithms.backup import BackupSGD, ParameterServerSGD
from workbench.algorithms.bmuf import BMUF
from workbench.algorithms.choco_sgd import ChocoSGD
from workbench.algorithms.dc_asgd import DelayCompensatedSGD
from workbench.algorithms.de_mo import DeMo
from workbench.algorithms.dear import DeAR
from workbench.algorithms.diloco import DiLoCo
from workbench.algorithms.dpsgd import DPSGD
from workbench.algorithms.eager_diloco import EagerDiLoCo
from workbench.algorithms.fed_avg import FedAvg, FedProx
from workbench.algorithms.gradient_tracking import GradientTracking
from workbench.algorithms.layerwise import ApplyOrder, LayerwiseSGD, SendOrder
from workbench.algorithms.local_sgd import LocalSGD
from workbench.algorithms.no_communication import NoCommunication
from workbench.algorithms.noloco import NoLoCo
from workbench.algorithms.online_backup import OnlineBackupSGD
from workbench.algorithms.partial import PartialAllReduce, Quorum
from workbench.algorithms.pipe import DelayedSGD, FirstSteps, PipeSGD
from workbench.algorithms.serial import SerialSGD
from workbench.algorithms.sign_sgd import SignSGD
from workbench.algorithms.slow_mo import SlowMo
from workbench.algorithms.softsync import SoftsyncSGD
from workbench.algorithms.sparta import SPARTA
from workbench.algorithms.stale import StaleSGD
from workbench.algorithms.stale_synchronous import StaleSynchronousSGD
from workbench.algorithms.staleness import Constant, Empirical, Geometric, Staleness, Uniform, parse_staleness
from workbench.algorithms.stochastic_gradient_push import StochasticGradientPush
from workbench.algorithms.streaming_diloco import StreamingDiLoCo
from workbench.algorithms.synchronous import SynchronousSGD
from workbench.errors import ConfigError
from workbench.naming import build, call_checked, check_kinds, shorten, unknown
from workbench.program import Algorithm
from workbench.user_file import is_defined_in_user_file, is_in_user_file, load

__all__ = [
    "ADPSGD",
    "BMUF",
    "DPSGD",
    "SPARTA",
    "AdaptiveDelaySGD",
    "AdasumSGD",
    "ApplyOrder",
    "AsyncSGD",
    "BackupSGD",
    "ChocoSGD",
    "Constant",
    "DeAR",
    "DeMo",
    "DelayCompensatedSGD",
    "DelayedSGD",
    "DiLoCo",
    "EagerDiLoCo",
    "Empirical",
    "FedAvg",
    "FedProx",
    "FirstSteps",
    "Geometric",
    "GradientTracking",
    "LayerwiseSGD",
    "LocalSGD",
    "NoCommunication",
    "NoLoCo",
    "OnlineBackupSGD",
    "ParameterServerSGD",
    "PartialAllReduce",
    "PipeSGD",
    "Quorum",
    "SendOrder",
    "SerialSGD",
    "SignSGD",
    "SlowMo",
    "SoftsyncSGD",
    "StaleSGD",
    "StaleSynchronousSGD",
    "Staleness",
    "StochasticGradientPush",
    "StreamingDiLoCo",
    "SynchronousSGD",
    "Uniform",
    "family_of",
    "find",
    "get",
    "named",
    "names",
    "parse_staleness",
    "recorded",
]

_ALGORITHMS: dict[str, Callable[..., Algorithm]] = {  # in the order of the table
    "synchronous-sgd": SynchronousSGD,
    "layerwise-sgd": LayerwiseSGD,
    "dear": DeAR,
    "sign-sgd": SignSGD,
    "adasum-sgd": AdasumSGD,
    "de-mo": DeMo,
    "pipe-sgd": PipeSGD,
    "delayed-sgd": DelayedSGD,
    "adaptive-delay-sgd": AdaptiveDelaySGD,
    "partial-all-reduce": PartialAllReduce,
    "parameter-server-sgd": ParameterServerSGD,
    "backup-sgd": BackupSGD,
    "online-backup-sgd": OnlineBackupSGD,
    "async-sgd": AsyncSGD,
    "stale-synchronous-sgd": StaleSynchronousSGD,
    "softsync-sgd": SoftsyncSGD,
    "delay-compensated-sgd": DelayCompensatedSGD,
    "local-sgd": LocalSGD,
    "diloco": DiLoCo,
    "streaming-diloco": StreamingDiLoCo,
    "eager-diloco": EagerDiLoCo,
    "slow-mo": SlowMo,
    "bmuf": BMUF,
    "fed-avg": FedAvg,
    "fed-prox": FedProx,
    "sparta": SPARTA,
    "d-psgd": DPSGD,
    "gradient-tracking": GradientTracking,
    "stochastic-gradient-push": StochasticGradientPush,
    "choco-sgd": ChocoSGD,
    "ad-psgd": ADPSGD,
    "noloco": NoLoCo,
    "stale-sgd": StaleSGD,
    "no-communication": NoCommunication,
    "serial-sgd": SerialSGD,
}

_FAMILIES: dict[str, str] = {  # the first name of each family, in the order of the table -> its heading
    "synchronous-sgd": "synchronous",
    "pipe-sgd": "delayed",
    "partial-all-reduce": "partial sums",
    "parameter-server-sgd": "servers",
    "local-sgd": "local steps",
    "d-psgd": "gossip",
    "stale-sgd": "for comparison",
}


def family_of(name: str) -> str:
    """Return the family of an algorithm by its name.

    >>> family_of("dear"), family_of("choco-sgd"), family_of("mine.py:Mine")
    ('synchronous', 'gossip', 'your own')
    """
    order = list(_ALGORITHMS)
    if name not in order:
        return "your own"
    first = [other for other in order[: order.index(name) + 1] if other in _FAMILIES][-1]
    return _FAMILIES[first]


def names() -> tuple[str, ...]:
    """Return the names that `get` accepts.

    >>> names()[:3]
    ('synchronous-sgd', 'layerwise-sgd', 'dear')
    """
    return tuple(_ALGORITHMS)


def find(name: str) -> Callable[..., Algorithm]:
    """Return the class of an algorithm by name, or the function that makes it from another algorithm and settings.

    `path/to/file.py:Class` is the class of an algorithm in your own file, which is executed like a script.

    >>> find("dear")
    <class 'workbench.algorithms.dear.DeAR'>

    Raises:
        ConfigError: no such algorithm.
    """
    if is_in_user_file(name):
        return _of_file(name)
    plain = name.lower().replace("_", "-")
    if plain not in _ALGORITHMS:
        error = unknown("algorithm", name, _ALGORITHMS)
        raise ConfigError(f"{error}; for your own algorithm, give file.py:Class")
    return _ALGORITHMS[plain]


def _of_file(name: str) -> type[Algorithm]:
    """Return the class of an algorithm from a user's file."""
    found = load(name, "algorithm", lambda value: _is_algorithm(value) and is_defined_in_user_file(value))
    if isinstance(found, Algorithm):
        raise ConfigError(f"{name} is a {type(found).__name__}: name the class, and give its fields by --set")
    if not _is_algorithm(found):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(f"{name} is {what}: name a class that derives from workbench.Algorithm")
    kind: type[Algorithm] = found
    settings = [setting for setting in get_annotations(kind) if setting not in kind.__dataclass_fields__]
    if settings:
        raise ConfigError(
            f"{name} is no dataclass, so it cannot take {', '.join(settings)}: write @dataclass(frozen=True, kw_only=True) "
            "above the class"
        )
    return kind


def _is_algorithm(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Algorithm)


def named(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with objects in place of their names.

    >>> named({"collective": "ring", "codec": "top-k", "width": 3})
    {'collective': Ring(), 'codec': TopK(fraction=None, k=None), 'width': 3}
    >>> named({"collective": "Ring(codec=TopK(k=5))"})["collective"].codec.k
    5
    >>> named({"topology": "random-regular:3"})
    {'topology': RandomRegular(degree=3, seed=0)}
    >>> named({"inner": "local-sgd"})["inner"].every
    8
    """
    makers: dict[str, Callable[[str], Any]] = {
        "collective": collectives.get,
        "codec": codecs.get,
        "staleness": parse_staleness,
        "topology": topologies.get,
        "inner": _inner,
    }
    return {
        key: _named(key, makers[key], value) if key in makers and isinstance(value, str) else value
        for key, value in settings.items()
    }


def _named(setting: str, make: Callable[[str], Any], text: str) -> Any:
    """Return an object that is given in full, as in records, or by name."""
    return _build(setting, text) if text.endswith(")") else None if text.lower() == "none" else make(text)


def _inner(name: str) -> Algorithm:
    try:
        return get(name)
    except ConfigError as error:
        raise ConfigError(f"inner={shorten(name)}: {error}") from None


def _build(setting: str, text: str) -> Any:
    """Return the object that a record or a command gives for that setting, such as "Ring(codec=TopK(k=5))"."""
    of_setting = {"topology": _parts("topology")}  # `Ring` is also the name of a collective
    return build(text, of_setting.get(setting) or _parts(setting), of_setting)


def _parts(setting: str) -> dict[str, Callable[..., Any]]:
    """Return the classes of objects in that setting of an algorithm: name -> class."""
    if setting == "topology":
        return {name: getattr(topologies, name) for name in topologies.__all__}
    classes = {name: getattr(module, name) for module in (collectives, codecs) for name in module.__all__}
    classes |= {item.__name__: item for item in (Constant, Empirical, Geometric, Uniform)}
    return {item.__name__: item for item in _ALGORITHMS.values()} | classes if setting == "inner" else classes


def get(name: str, **settings: Any) -> Algorithm:
    """Return an algorithm by name; its collective and its distribution of staleness may be names too.

    >>> get("pipe-sgd", width=3, collective="ring").width
    3
    >>> get("stale-sgd", staleness="uniform:0:8").staleness
    Uniform(low=0, high=8)

    Args:
        name: of an algorithm of this package, or `file.py:Class` for your own.
        settings: fields of the algorithm.

    Raises:
        ConfigError: no such algorithm or setting, or a value that is not valid.
    """
    make = find(name)
    settings = named(settings)
    plain = name if is_in_user_file(name) else name.lower().replace("_", "-")
    check_kinds(plain, make, settings)
    algorithm: Algorithm = call_checked(plain, make, settings)
    return algorithm


def recorded(entry: dict[str, Any]) -> Algorithm | None:
    """Return the algorithm of a `run.json`; None if it, or an object in its settings, is not of this package.

    >>> recorded({"name": "PipeSGD", "settings": {"width": 3, "collective": "Ring(codec=Truncate16())"}}).width
    3
    """
    kind = globals().get(str(entry.get("name"))) if entry.get("name") in __all__ else None
    try:
        settings = {
            key: _build(key, value) if isinstance(value, str) and value.endswith(")") else value
            for key, value in (entry.get("settings") or {}).items()
        }
        return kind(**settings) if isinstance(kind, type) and issubclass(kind, Algorithm) else None
    except (ConfigError, TypeError, ValueError):
        return None
