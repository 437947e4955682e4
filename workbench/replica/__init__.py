"""One rank's model, without any communication.

- `replica`: the model and its optimizer; computes gradients into flat buffers and takes steps with them.
- `backward`: the parts of a backward pass: micro-batches, gradients as they arrive, loss scaling.
- `optimizer_step`: steps with given gradients, of all parameters or of one bucket's.
- `server_copy`: a server's copy of the parameters, with an optimizer of its own.
- `packing`: parameters laid out as gradients are, so that they can be sent and averaged.
- `gradient_guard`, `gradient_report`: gradients that cannot be used, found before they are sent.
- `build`, `local_training`: a replica made of an algorithm, a problem and settings, with its minibatches, evaluation and checkpoints.

Begin with `replica`.
"""
