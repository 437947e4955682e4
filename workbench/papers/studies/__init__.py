"""What the notebooks of papers compute. A notebook chooses the cases, calls a module here, reports findings and draws.

Begin with `training`, the one function by which all others train, then read `paired_runs`.

Trainings on real ranks, or simulated with real gradients:

- `training`: one training, simulated or on ranks; the cost of its compute.
- `paired_runs`: several algorithms with the same seeds; speeds, accuracies and their differences, seed by seed.
- `repetitions`: one algorithm with several seeds; accuracies, steps to a target, staleness.
- `learning_curves`: losses and errors against seconds, and seconds to a target.
- `all_cores`: independent simulations on all cores, with the results of a loop.
- `tuning`: a grid of learning rates and momenta.
- `stale_updates`: updates to a loss for each staleness.
- `gossip_curves`: gossip and sums by step, on shuffled and on skewed data; theory of the distance of replicas.
- `equal_time`: a generative model for the same virtual time with one worker, backups or asynchronous workers.

Seconds of steps and sums on real ranks:

- `wires`: where the ranks run, and a network whose gradient takes a given time there.
- `ratio_sweep`: speed-ups over SGD at several ratios of communication to compute.
- `breakdown`: the parts of a step and of a sum.
- `compare_with_ddp`: step times and parameters next to those of torch's DistributedDataParallel.
- `codec_times`: the seconds of a codec.
- `predictions`: the record of predicted and measured steps.

Simulations of time, without gradient values:

- `simulated_steps`: steps of a problem by its shapes.
- `shapes`: large networks by their shapes.
- `sums`: the time and the error of one sum.
- `timing_model`: the timing model of Pipe-SGD.
- `stragglers`: distributions of delays and of staleness.
- `waiting`: when ranks end their steps if they wait for all others, for their neighbours, or for none.
- `gathering`: delayed gradients at parameter servers and at a ring.
- `backup_rule`: the rule for the number of backup workers.

Theory that training can check:

- `quadratic`: the largest stable step size for a delay.
- `regret`: the regret of convex training with late gradients.

A module may import the rest of `papers`, lower layers, and other modules here. It reports no finding and draws no
figure.
"""
