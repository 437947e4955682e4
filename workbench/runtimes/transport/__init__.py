"""Transports: one rank's endpoint of a communication library.

`base.Transport` is the port: sums, sends, receives, barriers and texts, on 1-D contiguous tensors. Two libraries
implement it: `torch_distributed` (gloo, NCCL) with `torch_handles` and `torch_groups`, and `mpi` (mpi4py) with
`mpi_requests`, `mpi_arrivals`, `mpi_fault_tolerant` and `mpi_finalize`.

Built on the port:

- `mailbox`: receives from any rank, and messages to the rank itself.
- `framing`: headers of messages with a stamp.
- `fault_tolerant`: messages when a peer may leave.
- `measure_link`: latency and bandwidth before a run.

May import `liveness`. Begin with `base`.
"""
