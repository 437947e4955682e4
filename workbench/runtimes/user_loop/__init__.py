"""Training loops that the user wrote.

- `trainer`: `Trainer`, which runs any algorithm inside the user's own loop.
- `loop_checkpoints`: the parts of a `Trainer`: batch weights, the record, checkpoints, and the model as it would be at
  the end.
- `ddp_hook`: collectives and codecs as communication hooks of torch's DistributedDataParallel; `ddp_loop` is a plain
  DDP loop.
- `stop_request`: whether a loop should stop, because its batch job is near the time limit.
- `record`: records a loop without the package. `torch_events` are its hooks in torch, and `loop_phases` makes spans of
  them. `record_command` is its part in the ranks of `workbench record`, whose PYTHONPATH begins with the folder
  at_startup.
- `peers`, `monitored_barrier`, `process_end`: failures of ranks without a run folder: mismatched calls, and ended
  processes.

May import all of `runtimes`. Begin with `trainer`.
"""
