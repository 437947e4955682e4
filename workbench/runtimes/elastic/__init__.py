"""Elasticity: runs that lose a rank and continue, and runs that admit one.

- `policy`: which algorithm, on which transport, continues without a rank.
- `shrink`: synchronous ranks continue as fewer.
- `admission`: the ranks of a run admit a process in the place of a rank that left.
- `mpi_admission`: the communicators with which they do so on MPI.
- `grow`: synchronous ranks of a run that has shrunk admit one.

The joining process runs `rank/join.py`. May import `control` and below. Begin with `policy`.
"""
