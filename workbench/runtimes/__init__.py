"""Runtimes: they answer the requests of an algorithm's program.

An algorithm is a generator that yields requests (`workbench.ops`). A runtime answers them: on real ranks
(torch.distributed or MPI) or on a simulated cluster. Each folder may import only those listed above it:

- `reference`: answers every request literally, for all ranks, in one process. Read it first
- `liveness`: deadlines, failure detection, watchdog, membership
- `transport`: one rank's endpoint of a communication library: torch.distributed, MPI
- `execution`: the interpreter, which answers a program's requests on a transport
- `checkpoint`: writes, reads and restores the state of a rank
- `control`: commands to a running training: pause, stop, change settings
- `elastic`: runs that continue with fewer ranks, or admit a new one
- `rank`: one rank of a run, from its job to its record
- `simulator`: the same programs on a virtual clock, without real ranks
- `user_loop`: `Trainer` and `ddp_hook`: a training loop that the user wrote

Begin with `reference.py`, then `execution/interpreter.py`. `reference` imports no other folder.
`rank` and `simulator` do not import each other. Used by `calibration`, `clusters` and layers above, and by no
algorithm.
"""
