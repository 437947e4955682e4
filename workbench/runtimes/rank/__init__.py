"""One rank of a run, from its job to its record.

- `main`: joins the library, builds the replica, trains, and reports a failure to the other ranks.
- `training_loop`: the loop around a rank's programs; it carries out what `control/generations.py` decides.
- `async_evaluations`: evaluations of asynchronous ranks; their parameters are kept until the run is over.
- `join`: the same for a process that takes the place of a rank that left.
- `consistency`, `fingerprint`: what must be equal on all ranks, compared before the first step.
- `pending_evaluations`: the files in which these parameters are kept.

May import everything in `runtimes` but `simulator` and `user_loop`. Begin with `main`.
"""
