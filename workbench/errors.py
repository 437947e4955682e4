"""The errors that a caller can fix. Each message names the fix; the command line prints it and exits with status 2."""


class WorkbenchError(Exception):
    """Base of every error that the caller can fix. `exit_code` is the status of the command line."""

    exit_code = 2


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
