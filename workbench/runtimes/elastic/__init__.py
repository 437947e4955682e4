"""Elasticity: runs that lose a rank and continue, and runs that admit one.

- `policy`: which algorithm, on which transport, continues without a rank.
- `shrink`: ranks that wait for each other continue as fewer.
- `admission`: those that are there let a process in that takes the place of a rank that left.
- `grow`: the same for ranks that had shrunk.

The newcomer's side is `rank/join.py`. May import `control` and below. Begin with `policy`.
"""
