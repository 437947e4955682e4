"""Batch schedulers: jobs, and how PBS, LSF, SGE and HTCondor write and name them.

- `job`: what all schedulers have: `Scheduler`, a job's state, and the commands that are run.
- `dialects`: one table of PBS, LSF, SGE and HTCondor.
- `request`: `BatchJob`, a job's resources and its script.

`launchers.batch_launcher` starts engines in such a job. Slurm has its own folder `slurm`, because it has more options.
May import `local` and below. Begin with `dialects`.
"""
