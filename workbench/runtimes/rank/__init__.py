"""One rank of a run, from its job to its record.

- `main`: joins the library, builds the replica, trains, and reports a failure to the other ranks.
- `training_loop`: the loop around a rank's program: metrics, evaluation, commands, checkpoints.
- `join`: the same for a process that takes the place of a rank that has left.
- `consistency`, `fingerprint`: settings, software and data that must be equal on all ranks, compared before the first step.
- `pending_evaluations`: evaluations that are made later; their parameters are stored in the run's folder.

May import everything in `runtimes` but `simulator` and `user_loop`. Begin with `main`.
"""
