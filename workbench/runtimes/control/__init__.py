"""Control: commands to a running training.

- `commands`: the file of commands in a run's folder, one JSON line a command.
- `generations`: a pure function, and its table, which decide what follows at the boundary of a generation.
- `controller`: on each rank, reads commands, agrees on them with the other ranks, and carries them out.
- `reconfigure`: which settings of an algorithm may change in a running training, and how.
- `job`: the batch job that this process runs in.

May import `checkpoint` and below. Begin with `generations`.
"""
