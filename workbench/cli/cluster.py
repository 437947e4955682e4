"""`workbench cluster`: lists, shows, scales, heals and stops clusters, also detached ones."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError, LaunchError, WorkbenchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.clusters.cluster import Cluster
    from workbench.clusters.supervision.registry import Entry

EXAMPLES = """
A detached cluster runs until a process attaches to it (workbench.attach in Python) and ends, or until you stop it here:

  workbench cluster list
  workbench cluster status cluster-3f2a
  workbench cluster scale cluster-3f2a 8
  workbench cluster stop cluster-3f2a
"""


def add_cluster_options(cluster: argparse.ArgumentParser) -> None:
    """Add the options of `workbench cluster`, and set its function."""
    cluster.epilog = EXAMPLES
    actions = cluster.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list all clusters: owned by a process, detached, or left by a crash")
    listing.add_argument("--json", action="store_true", help="print one JSON object per line")
    listing.set_defaults(command=_list)
    status = actions.add_parser("status", help="show the ranks of a cluster and their states")
    status.add_argument("name", help="the cluster's name, or the beginning of it")
    status.set_defaults(command=_status)
    scale = actions.add_parser("scale", help="restart a detached cluster with another number of ranks")
    scale.add_argument("name", help="the cluster's name, or the beginning of it")
    scale.add_argument("ranks", type=int, help="number of ranks")
    scale.set_defaults(command=_scale)
    heal = actions.add_parser("heal", help="restart the ranks of a detached cluster if some have ended")
    heal.add_argument("name", help="the cluster's name, or the beginning of it")
    heal.set_defaults(command=_heal)
    stop = actions.add_parser("stop", help="end a cluster and remove its files")
    stop.add_argument("name", help="the cluster's name, or the beginning of it")
    stop.add_argument("--force", action="store_true", help="also if a running process owns it")
    stop.set_defaults(command=_stop)


def _list(options: argparse.Namespace) -> int:
    from workbench.analysis.table import Column, Table
    from workbench.clusters.supervision.registry import entries, state_folder

    rows = [_row(entry) for entry in entries()]
    if options.json:
        for row in rows:
            print(json.dumps(row))
    elif rows:
        columns = (
            Column("id", "cluster"),
            Column("num_ranks", "ranks"),
            Column("title", "started by"),
            Column("state", "state"),
        )
        print(Table(rows, (*columns, Column("since", "since"), Column("run", "training"))))
    else:
        print(f"no clusters in {state_folder()}", file=sys.stderr)
    return 0


def _row(entry: Entry) -> dict[str, Any]:
    begin_s = (entry.detached or {}).get("at_s", entry.record["started_s"])
    row = {name: entry.record.get(name) for name in ("num_ranks", "title", "host", "runtime", "run")}
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin_s))
    return {"id": entry.id, **row, "state": entry.state, "since": since, "run": _training(row["run"])}


def _training(folder: str | None) -> str | None:
    from pathlib import Path

    from workbench.trace.processes import with_true_status
    from workbench.trace.store import read_info

    if folder is None:
        return None
    try:
        info = with_true_status(Path(folder), read_info(Path(folder)))
        return f"{Path(folder).name}: {info.get('status', 'unknown')}"
    except WorkbenchError:
        return f"{Path(folder).name}: removed"


def _status(options: argparse.Namespace) -> int:
    from workbench.clusters.status import entry_table
    from workbench.clusters.supervision.registry import find_entry

    entry = find_entry(options.name)
    print(entry_table(entry))
    training = _training(entry.record.get("run"))
    if training is not None:
        print(f"training {training}")
    return 0


def _scale(options: argparse.Namespace) -> int:
    _change(options.name, f"scale({options.ranks})", lambda cluster: cluster.scale(options.ranks))
    return 0


def _heal(options: argparse.Namespace) -> int:
    _change(options.name, "heal()", lambda cluster: cluster.heal())
    return 0


def _change(name: str, what: str, change: Callable[[Cluster], object]) -> None:
    """Change a detached cluster: attach to it, and detach it again."""
    from workbench.clusters.cluster import Cluster
    from workbench.clusters.supervision.registry import find_entry
    from workbench.clusters.supervision.start_progress import count

    entry = find_entry(name)
    if entry.detached is None:
        who = f"process {entry.owner} owns it: call {what} there" if entry.owner else f"it is {entry.state}"
        raise ConfigError(f"cluster {entry.id} is not detached: {who}")
    cluster = Cluster.attach(entry.id, quiet=True)
    try:
        change(cluster)
    finally:
        if cluster.state != "stopped":  # else the new ranks did not start
            cluster.detach()
    print(f"{entry.id}: {count(cluster.num_ranks)}")


def _stop(options: argparse.Namespace) -> int:
    from workbench.clusters.engines.engines import Engines
    from workbench.clusters.supervision.registry import find_entry

    entry = find_entry(options.name)
    if not entry.is_here and not entry.record.get("reachable"):
        raise ConfigError(f"cluster {entry.id} is on host {entry.record['host']}: stop it there")
    if entry.owner is not None and not options.force:
        raise ConfigError(f"process {entry.owner} owns cluster {entry.id}: end it there, or here with --force")
    if not entry.is_here and entry.detached is None and not options.force:  # the owner may be alive on the other host
        raise ConfigError(
            f"cluster {entry.id} was not detached on host {entry.record['host']}: stop it there, or here with --force"
        )
    if entry.detached is not None:
        try:
            Engines.attach(entry).stop()  # the cluster's launcher also cancels its job
        except LaunchError as error:
            print(f"workbench: {error}; the cluster's processes are ended", file=sys.stderr)
    num_ended = entry.clear()
    _mark_training_failed(entry)
    left = f", and {num_ended} remaining processes" if num_ended else ""
    print(f"stopped {entry.id}{left}")
    return 0


def _mark_training_failed(entry: Entry) -> None:
    """Record as failed a training that the cluster's end has ended."""
    from pathlib import Path

    from workbench.trace.store import ENDED, read_info, update_run

    folder = entry.record.get("run")
    if folder is not None and Path(folder).is_dir() and read_info(Path(folder))["status"] not in ENDED:
        update_run(Path(folder), status="failed", error="the cluster was stopped while it trained")
