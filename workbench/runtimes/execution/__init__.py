"""Execution: a rank's program, answered on a transport.

- `interpreter`: takes a program's requests one by one and answers them; keeps time, counts bytes, writes the trace.
- `endpoint`: the communication requests of one program; `interpreter` and started sub-programs each have one.
- `progress`: how started communication makes progress while the rank computes (`Settings.progress`).
- `tasks`, `polling`: the two ways, threads and polling from the foreground.
- `evaluation_schedule`: when an algorithm with servers is evaluated.

May import `transport` and `liveness`. Begin with `interpreter`.
"""
