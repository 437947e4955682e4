"""Supervision: which clusters and ranks exist, whether they are alive, and how they ended.

- `registry`: a folder for each cluster of this user, with its record.
- `rank_output`: what a rank writes into the run's folder (its output and its end), and whether it is alive.
- `exit_status`: how a rank's process ended, as its launcher reports it.
- `reaper`: ends a cluster's processes when the process that started them has ended.
- `sigterm`: a terminated process runs its `finally:` clauses.
- `start_progress`: the line that is shown while ranks start.

Imports nothing else of `clusters`. Used by `local`, `launchers`, `engines`, the cluster, and layers above. Begin with
`registry`.
"""
