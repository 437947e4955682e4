"""Liveness: which ranks are alive, how long a rank waits for others, and what it reports meanwhile.

- `deadline`: a wait that ends with a result, with a peer's failure, or with `Stalled`.
- `failure_detector`: each rank writes a heartbeat file into the run's folder; peers read it and look up the process.
- `usage`: cores, memory and GPU that this process uses, for the heartbeat.
- `watchdog`: what a rank does now, and a time limit for library calls that cannot be interrupted.
- `membership`: which ranks have left a run that continues without them; all ranks agree on it.
- `rendezvous`: ranks wait until all have started, before any joins a library's group.
- `interrupts`: SIGINT at a moment when all ranks can stop.

Imports only `trace`, `errors` and `units`. Begin with `deadline`.
"""
