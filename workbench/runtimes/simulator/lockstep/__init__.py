"""Thousands of workers as one program, where all of them ask for the same.

- `lockstep`: asks one program and keeps time as a vector over workers.
- `worker_group`: the replica and the record that stand for all workers.
- `gradient_sum`: the sum of the workers' gradients, each added as it is computed.
"""
