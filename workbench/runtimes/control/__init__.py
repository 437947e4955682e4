"""Control: commands to a running training.

- `commands`: the file of commands in a run's folder, one JSON line a command.
- `generations`: decides what follows at the boundary of a generation: a pure function, and its table.
- `controller`: one rank's side: reads commands, agrees on them with the other ranks, carries them out.
- `reconfigure`: which settings of an algorithm may change in a running training, and how.

May import `checkpoint` and below. Begin with `generations`.
"""
