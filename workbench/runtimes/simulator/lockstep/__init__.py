"""Thousands of workers as one program, if all of them make the same requests.

- `lockstep`: `simulate_in_lockstep` returns the run. `Lockstep` runs one program, and keeps time as a vector over workers.
- `worker_group`: the replica and the record of all workers.
- `gradient_sum`: the sum of the workers' gradients, each added as it is computed.

May import what `simulator` may, and its `worker` and `pass_times`. Used by `simulate` alone. Begin with `lockstep`.
"""
