"""Launchers: what starts a cluster's engines.

`base.Launcher` is the interface. `mpi` (mpiexec, and emulated networks), `processes` (no MPI), `ssh`, `slurm_launcher`
and `batch_launcher` (PBS, LSF, SGE, HTCondor) implement it. The last two share `job_launcher`. `choose` makes one from
the argument `launcher=`. May import `slurm`, `schedulers`, `local` and below. Begin with `base`.
"""
