"""Training loops that the user wrote.

- `trainer`: `Trainer`, which runs any algorithm inside the user's own `for`.
- `loop_checkpoints`: what a `Trainer` records and keeps: batch weights, losses, checkpoints.
- `ddp_hook`: collectives and codecs as communication hooks of torch's DistributedDataParallel; `ddp_loop` is a plain DDP loop.
- `peers`, `monitored_barrier`, `process_end`: failures of ranks that have no run folder: who called what, and who has ended.

May import all of `runtimes`. Begin with `trainer`.
"""
