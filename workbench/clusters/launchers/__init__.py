"""Launchers: what starts a cluster's engines.

`base.Launcher` is the interface. `mpi` (mpiexec, and emulated networks), `processes` (no MPI), `ssh` and
`slurm_launcher` implement it. `choose` makes one from the argument `launcher=`. May import `slurm`, `local` and
below. Begin with `base`.
"""
