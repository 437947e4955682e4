"""ipyparallel's controller and engines: the processes of a `Cluster`.

- `engines`: starts them, watches them, detaches from them, attaches to them, and ends them.
- `engine_process`: an engine's process; ipyparallel's own with a faster start.
- `kernel`: what runs an engine's requests, and when an interrupt may end one.
- `engine_server`: imports what engines need once, and forks them; `forked_engine` is what the launcher starts instead.
- `remote`: the functions that run on engines. `execute` runs code there and forwards its output.
- `world`: checks that the engines are ranks of one world.
- `options`, `event_loop`: ipyparallel's configuration, and the thread on which its launchers run.

May import `launchers` and below. Begin with `engines`.
"""
