"""The errors that a caller can fix. Each message names the fix; the command line prints it and exits with status 2."""

import os
import traceback
from collections.abc import Collection
from pathlib import Path

PACKAGE = f"{Path(__file__).parent}{os.sep}"
SHELLS = ("IPython", "ipykernel")


class WorkbenchError(Exception):
    """Base of every error that the caller can fix. `exit_code` is the status of the command line."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows of an error in a cell: the caller's own frames and the message.

        The frames of this package are left out, those of a function of the caller's that failed in it are not. On a rank
        it is the whole traceback.
        """
        if not any(_is_in(frame.filename, SHELLS) for frame in traceback.extract_tb(self.__traceback__)):
            return "".join(traceback.format_exception(self)).splitlines()
        cause = self.__cause__
        lines = [*_frames(cause), *_message(cause), ""] if cause is not None and _frames(cause) else []
        return [*lines, *_frames(self), *_message(self)]


def _frames(error: BaseException) -> list[str]:
    found = traceback.extract_tb(error.__traceback__)
    shown = [one for one in found if not (one.filename.startswith(PACKAGE) or _is_in(one.filename, SHELLS))]
    return [line.rstrip("\n") for line in traceback.format_list(shown)]


def _message(error: BaseException) -> list[str]:
    return [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]


def _is_in(path: str, packages: Collection[str]) -> bool:
    return any(part in packages for part in Path(path).parts)


class ConfigError(WorkbenchError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataMissing(WorkbenchError, FileNotFoundError):
    """A data set is missing."""


class LaunchError(WorkbenchError, RuntimeError):
    """The ranks could not be started, or did not find each other."""


class RankMismatch(WorkbenchError, ValueError):
    """The ranks do not have the same model, algorithm or settings."""


class Diverged(WorkbenchError, ArithmeticError):
    """The loss is not a finite number."""


class PeerFailed(WorkbenchError, RuntimeError):
    """Another rank failed; this rank left the run because of it."""


class Stalled(WorkbenchError, TimeoutError):
    """Deadlock: names every rank's pending request."""


class RunNotFound(WorkbenchError, FileNotFoundError):
    """No run with that name is in the run store, or its folder cannot be read."""
