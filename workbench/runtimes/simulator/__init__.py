"""The simulator: programs on a virtual clock, with real gradients or with timing alone.

A simulated process is one program of one worker. It yields requests; handlers answer them in virtual time.

- `simulate` is the public function. `simulation` runs one simulation, and `HANDLERS` there names the handler of each
  request. It carries out what `control/generations.py` decides. `checkpoints` and `evaluations` carry out two of its
  instructions.
- `state` holds the cluster and its processes, and the loop that runs a process from one request to the next.
- `compute`, `communication` and `background` are the handlers. Each imports `state`; none imports `simulation`.
- `fabric` and `fair_sharing` are the clock and the network. `pass_times` has the times of workers' passes.
- `worker` is the state of a worker. `comm_schedule` repeats a collective whose messages are known.
- `failures`, `recorded_answers` and `replay` are for runs that lose workers or are run again.
- `lockstep` is a folder: it computes all workers of a symmetric algorithm at once.

May import `control` and below, and `costs`. Begin with `state`, then `simulation`.
"""
