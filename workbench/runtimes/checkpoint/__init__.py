"""Checkpoints: what a rank keeps, so that a run can be resumed.

- `rank_state`: one rank's state as a tree of tensors and plain values, and a program begun again from it.
- `files`: the files of a checkpoint in a run's folder: a file a rank, and a record that makes it complete.
- `reader`: loads such a file and checks all of it, since a damaged file must be an error and never a wrong number.
- `replicated`: what all ranks hold equally is written once.
- `staging`, `writer`: copies the state at a step's end, and writes it while training continues.
- `restore`: the ranks of a new run agree on a checkpoint and load it.

May import `execution`, `transport` and `liveness`. Begin with `rank_state`.
"""
