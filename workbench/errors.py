"""The errors that a caller can fix. Each message names the fix; the command line prints it and exits with status 2."""

import traceback
from pathlib import Path

PACKAGE = str(Path(__file__).parent)
SHELLS = ("IPython", "ipykernel")


class WorkbenchError(Exception):
    """Base of every error that the caller can fix. `exit_code` is the status of the command line."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the caller's own frames and the message, not the frames of this package."""
        frames = [frame for frame in traceback.extract_tb(self.__traceback__) if not _is_hidden(frame.filename)]
        lines = [line.rstrip("\n") for line in traceback.format_list(frames)]
        return [*lines, f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


def _is_hidden(path: str) -> bool:
    return path.startswith(PACKAGE) or any(part in SHELLS for part in Path(path).parts)


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
