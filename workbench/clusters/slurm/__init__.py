"""Slurm: requests for jobs, and the jobs' states.

- `request`: `Slurm`, a job's resources and its batch script.
- `batch_job`: the program that a batch job runs on its first node.
- `queue`: submits, watches and cancels jobs by Slurm's own commands.
- `gpus`: whether a job that asks for no GPU seems to need some.

`launchers.slurm_launcher` starts engines in such a job, and `workbench submit` a run. May import `schedulers` and
below. Begin with `request`.
"""
