"""Slurm: what a job asks for, and what Slurm says of it.

- `request`: `Slurm`, a job's resources and its batch script.
- `batch_job`: the program that a batch job runs on its first node.
- `queue`: jobs submitted, watched and cancelled by Slurm's own commands.
"""
