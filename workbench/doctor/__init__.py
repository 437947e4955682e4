"""Checks what works on this machine and what does not. Each fault is reported with its fix.

- `checks`: all checks, in order.
- `machine`, `software`, `ranks`: the checks. `check_result` is the result of one.

Imports `clusters` and the layers below it. Used by `cli` alone. Begin with `checks`.
"""

from workbench.doctor.check_result import CheckResult
from workbench.doctor.checks import run_checks

__all__ = ["CheckResult", "run_checks"]
