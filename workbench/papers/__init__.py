"""Claims of papers, the measurements of them here, and the verdicts. Their files are in `papers/KEY/`.

In a notebook, `require` checks a parameter, `ranks` provides a cluster, `finding` reports the values measured
for a claim (`Reporter`: for many claims of one paper), and `answer` reports the notebook's answer with its numbers.

- Before a measurement: `claims`, `sizes` (parameters of notebooks). `history` and `amendments` read their git history.
- In a notebook: `parameters`, `pool_client`, `findings`. `studies` is a folder: what notebooks compute.
- `workbench reproduce`: `plan`, `rank_pool`, `reproduction`, `reproduction_page`.
- A record: `records`, `digest` (of code and parameters), `site`.
- After it: `verdicts`, `verdict_rows` of all tables, `table` and `pictures` of the pages, `check`, `artefact`.

Imports `experiments`, `clusters` and what lies below. Used by `bench` and `cli`; only notebooks use `studies`. Begin
with `claims`, then `verdicts`.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

_NAMES = MappingProxyType(
    {
        "ranks": "workbench.papers.pool_client",
        "where_of": "workbench.papers.pool_client",
        "within_reach": "workbench.papers.pool_client",
        "require": "workbench.papers.parameters",
        "finding": "workbench.papers.findings",
        "Reporter": "workbench.papers.findings",
        "answer": "workbench.papers.findings",
        "Claim": "workbench.papers.claims",
        "Expectation": "workbench.papers.claims",
        "read_claims": "workbench.papers.claims",
        "Verdict": "workbench.papers.verdicts",
        "judge": "workbench.papers.verdicts",
    }
)

__all__ = [*_NAMES]  # noqa: PLE0604 - the names are all strings


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'workbench.papers' has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
