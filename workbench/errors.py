"""The few errors a caller meets. Each message names the fix; the command line prints it alone and exits with status 2."""


class WorkbenchError(Exception):
    """Base of every error that is the caller's to mend. `exit_code` is what the command line returns."""

    exit_code = 2


class ConfigError(WorkbenchError, ValueError):
    """A setting, or a combination of settings, that cannot run."""


class DataMissing(WorkbenchError, FileNotFoundError):
    """A data set is not where it was looked for."""


class LaunchError(WorkbenchError, RuntimeError):
    """The ranks could not be started, or did not find each other."""


class RankMismatch(WorkbenchError, ValueError):
    """The ranks do not hold the same thing (model, algorithm or settings)."""


class Diverged(WorkbenchError, ArithmeticError):
    """The loss is no longer a finite number."""


class PeerFailed(WorkbenchError, RuntimeError):
    """Another rank failed; this rank left the run because of it."""


class Stalled(WorkbenchError, TimeoutError):
    """Nobody can move: names every rank's pending request."""


class RunNotFound(WorkbenchError, FileNotFoundError):
    """No run of that name is in the run store, or its folder cannot be read."""
