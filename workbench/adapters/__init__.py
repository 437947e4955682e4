"""Adapters: other libraries keep their training loop, and the workbench averages the gradients.

- `huggingface`: `add_hook` for the `Trainer` of transformers.
- `lightning`: `HookStrategy`, and `AlgorithmStrategy` for all that a `workbench.Trainer` runs.
- `accelerate`: `register_hook` for a model that `Accelerator.prepare` returned.
- `hooks`: what these have in common.

Import the module of your library: `from workbench.adapters.lightning import HookStrategy`. Out of scope are models
whose parameters are divided among ranks: FSDP, DeepSpeed ZeRO, tensor and pipeline parallelism.

May import `runtimes` and layers below, and the library of its name. Begin with `hooks`.
"""
