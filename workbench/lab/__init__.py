"""The panel in JupyterLab: a server extension that reads clusters and runs, and the built front end in `static/`.

- `handlers`: what the server answers below `workbench/api/`.
- `run_rows`: the runs of the stores as rows; a run that did not change is not read again.
- `live_curve`: the loss and the evaluations of a run, in a bounded number of points, from new lines only.
- `compare_runs`: curves of several runs, averaged over seeds, and the settings in which the runs differ.
- `cluster_rows`: the registered clusters as rows; their logs; how one is stopped, scaled or healed.
- `rank_rows`: the ranks of a run or a cluster: what each one does and uses, and which one delays the others.
- `run_timeline`: the timeline of a run, of its newest steps while it trains.
- `snippets`: Python that attaches to a cluster, opens a run, or continues it.

The sources of the front end are in `lab/`, and `make lab-extension` builds them. The Jupyter server imports this
package when it starts, so no module here may import torch or ipyparallel. May import `catalogue` and the layers below
it. Begin with `handlers`.
"""

from __future__ import annotations

from typing import Any

EXTENSION = "sgd-workbench"  # name of the front end


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    return [{"src": "static", "dest": EXTENSION}]


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "workbench.lab"}]


def _load_jupyter_server_extension(server: Any) -> None:
    from workbench.lab.handlers import add_handlers

    add_handlers(server)
