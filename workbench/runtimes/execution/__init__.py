"""Execution: a rank's program, answered on a transport.

- `interpreter`: takes a program's requests one by one; its table `HANDLERS` answers all of them. It keeps time, counts
  bytes and writes the trace.
- `caller`: what the rank's own program and a started program have in common, and where they differ: how they wait.
- `endpoint`: the communication of one program; `interpreter` and started sub-programs each have one.
- `progress`: how started communication makes progress while the rank computes (`Settings.progress`).
- `tasks`, `polling`: the two ways, threads and polling from the foreground.
- `evaluation_schedule`: when an algorithm with servers is evaluated.

May import `transport` and `liveness`. Begin with `interpreter`.
"""
