"""Checkpoints: the state that ranks save so that a run can be resumed.

- `rank_state`: one rank's state as a tree of tensors and plain values, and back.
- `files`: the files of a checkpoint in a run's folder: for each rank a file and a record that makes it complete.
- `reader`: writes and loads a rank's file. A damaged file raises an error; it never gives a wrong number.
- `replicated`: state that is equal on all ranks is written once.
- `staging`, `writer`: copy the state at a step's end, and write the copy while training continues.
- `restore`: the ranks of a new run agree on a checkpoint and load it.

May import `execution`, `transport` and `liveness`. Begin with `rank_state`.
"""
