"""One rank of a run, from the job that it is given to the record that it leaves.

- `main`: joins the library, builds the replica, trains, and reports a failure to the other ranks.
- `training_loop`: the loop around a rank's program: metrics, evaluation, commands, checkpoints.
- `join`: the same for a process that takes the place of a rank that left.
- `consistency`, `fingerprint`: what all ranks must have in common, compared before the first step.
- `pending_evaluations`: evaluations that must wait; their parameters are stored in the run's folder.

May import everything in `runtimes` but `simulator` and `user_loop`. Begin with `main`.
"""
