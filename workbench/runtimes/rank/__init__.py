"""One rank of a run, from its job to its record.

- `main`: joins the library, builds the replica, trains, and reports a failure to the other ranks.
- `training_loop`: the loop around a rank's programs; it carries out what `control/generations.py` decides.
- `async_evaluations`, `pending_evaluations`: parameters of asynchronous ranks are kept in files and evaluated after the
  run.
- `join`: `main` for a process that takes the place of a rank that left.
- `spare`: a spare process of an MPI run waits for such a place.
- `callback_thread`: calls the callbacks of a run on rank 0.
- `consistency`, `fingerprint`: what must be equal on all ranks, compared before the first step.
- `replica_check`: compares replicas during the run.
- `rehearsal`: before the first step, a checkpoint is written and read back, and the free space compared with what is needed.

May import everything in `runtimes` but `simulator` and `user_loop`. Begin with `main`.
"""
