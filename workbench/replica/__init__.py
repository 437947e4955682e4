"""One rank's model, without communication.

- `replica`: the model and its optimizer; computes gradients into flat buffers and takes steps with them.
- `backward`: the parts of a backward pass: micro-batches, gradients as they arrive, loss scaling.
- `module_state`: a module's state that is no parameter: buffers and extra state.
- `optimizer_step`: steps with given gradients, of all parameters or of one bucket's.
- `server_copy`: a server's copy of the parameters, with its own optimizer.
- `served_optimizer`: a user's optimizer on servers: its copy, and the settings that gradients bring.
- `packing`: parameters laid out as gradients are, so that they can be sent and averaged.
- `gradient_guard`: bad gradients, found before they are sent.
- `local_training`: one rank's part of a run: replica, minibatches, evaluation, rows of metrics.
- `trained`: the trained model of a run, written at its end and read back.

May import `problems`, `program`, `settings` and layers below, and no runtime. Used by `costs`, `runtimes` and
layers above. Begin with `replica`.
"""
