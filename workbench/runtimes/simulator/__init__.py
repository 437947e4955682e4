"""The simulator: programs on a virtual clock, with real gradients or with timing alone.

A simulated process is one program of one worker; `process` asks it for requests and answers them in virtual time. `simulate` is the
public function. `simulation` holds the workers, the clock and the network; `fabric`, `fair_sharing` and `mailboxes` are the network;
`compute` and `communication` answer requests; `worker` is what a worker holds; `comm_schedule` repeats a collective whose messages are
known; `failures`, `checkpoints`, `course`, `recorded_answers` and `replay` are for runs that lose workers, stop, or are run again.
`lockstep/` computes all workers of a symmetric algorithm at once.

May import `control` and below, and `costs`. Begin with `simulation`.
"""
