"""Liveness: who is there, how long a rank waits for others, and what it says meanwhile.

- `deadline`: a wait that ends: with a result, with a peer's failure, or with `Stalled`.
- `failure_detector`: each rank writes a heartbeat file into the run's folder; others see by it, and by the process, whether it lives.
- `watchdog`: what a rank is doing now, and an end for library calls that nothing can interrupt.
- `membership`: for runs that continue without some ranks: who has left, agreed by all.
- `rendezvous`: ranks wait here until all have come, before any joins a library's group.
- `interrupts`: Ctrl-C at a moment at which all ranks can stop.

Imports only `trace`, `errors` and `units`. Begin with `deadline`.
"""
