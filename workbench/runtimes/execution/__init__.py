"""Execution: a rank's program, answered on a transport.

- `interpreter`: takes a program's requests one by one; its table `HANDLERS` answers all of them. It keeps time, counts
  bytes and writes the trace.
- `endpoint`: the communication of one program. `Caller` is what the rank's own program and a started one have in
  common; they differ in how they wait.
- `progress`: how started communication makes progress while the rank computes (`Settings.progress`).
- `tasks`, `polling`: the two ways, threads and polling from the foreground.
- `shared_state`: rank 0's parameters, buffers and extra state, on all ranks.
- `slept_compute`: forward and backward passes that sleep for the seconds of a cost model.
- `evaluation_schedule`: when an algorithm with servers is evaluated.

May import `transport` and `liveness`. Begin with `interpreter`.
"""
