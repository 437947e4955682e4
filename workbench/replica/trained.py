"""The trained model of a run: its weights are written at the end of the run, and read back into a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from workbench.errors import ConfigError
from workbench.problems import get, names
from workbench.problems.base import Problem

if TYPE_CHECKING:
    from workbench.trace.run import Run

State = dict[str, Tensor]
WEIGHTS, AVERAGED = "model.safetensors", "model-average.safetensors"
OLD_WEIGHTS = "model.pt"  # of runs before the 26th of November 2026


def state_of(model: nn.Module, parameters: Sequence[nn.Parameter] = (), flat: Tensor | None = None) -> State:
    """Return copies of the tensors of a module's `state_dict`, on the CPU.

    Args:
        model: the module.
        parameters: parameters whose values are replaced.
        flat: their values, one after the other, 1-D.
    """
    values: dict[int, Tensor] = {}
    if flat is not None:
        parts = torch.split(flat, [parameter.numel() for parameter in parameters])
        values = {
            id(parameter): part.reshape(parameter.shape).to(parameter.dtype)
            for parameter, part in zip(parameters, parts, strict=True)
        }
    state = model.state_dict(keep_vars=True)
    return {
        name: values.get(id(value), value).detach().cpu().clone().contiguous()
        for name, value in state.items()
        if isinstance(value, Tensor)  # not a module's extra state
    }


def write_weights(folder: Path, weights: Mapping[str, State]) -> None:
    """Write the weights of a run into its folder: file -> state."""
    from safetensors.torch import save_file

    for file, state in weights.items():
        save_file(state, folder / file)


def trained_model(run: Run, problem: Problem | None = None, *, average: bool = False) -> nn.Module:
    """Return the trained model of a run that has ended, in evaluation mode, on the CPU.

    Its weights are those that the run's last evaluation used. They are in `model.safetensors` in the run's folder.

    Args:
        run: the run, stored or simulated.
        problem: the problem that was trained. None: the problem of this package with the run's name.
        average: whether to return the moving average of the weights (`Settings(ema_decay=...)`).

    Raises:
        ConfigError: the run has no weights, or the problem is unknown or has another model.
    """
    state = _weights_of(run, AVERAGED if average else WEIGHTS)
    if problem is None:
        name = str(run.info.get("problem", {}).get("name", ""))
        if name not in names():
            raise ConfigError(f"run {run.id} trained {name or 'a problem'} of your own: give it, as run.model(problem)")
        problem = get(name)
    with torch.random.fork_rng(devices=[]):
        model = problem.model()
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
        missing = [one for one in missing if not one.endswith("_extra_state")]
        if missing or unexpected:
            raise RuntimeError(f"missing {missing}, unexpected {unexpected}")
    except RuntimeError as error:
        raise ConfigError(
            f"the weights of run {run.id} are not those of problem {problem.name}: give the problem that was trained, "
            f"with its options, as run.model(problem) ({error})"
        ) from None
    return model.eval()


def _weights_of(run: Run, file: str) -> State:
    """Return the weights of a run."""
    if run.weights is not None and file in run.weights:
        return cast(State, dict(run.weights[file]))
    if run.folder is not None and (run.folder / file).exists():
        from safetensors.torch import load_file

        return cast(State, load_file(run.folder / file))
    if run.folder is not None and file == WEIGHTS and (run.folder / OLD_WEIGHTS).exists():
        return cast(State, torch.load(run.folder / OLD_WEIGHTS, weights_only=True, map_location="cpu"))
    if file == AVERAGED and (run.weights or (run.folder is not None and (run.folder / WEIGHTS).exists())):
        raise ConfigError(f"run {run.id} kept no moving average: train with ema_decay=, such as 0.999")
    status: Any = run.info.get("status", "unknown")
    how = (
        "it was simulated for its timing only, or loaded without its folder"
        if run.folder is None
        else "they are written when it ends"
    )
    raise ConfigError(f"run {run.id} ({status}) has no weights: {how}")
