"""Processes of this machine.

- `mpi_install`: finds an MPI whose mpiexec and library belong together.
- `spawn`: ranks for one run from a shell.
- `probe_ranks`: measures messages on ranks of `spawn`.
- `fork_server`: processes forked from one that has already imported torch.

`launchers` and the command line use them. May import `supervision` and below. Begin with `spawn`.
"""
