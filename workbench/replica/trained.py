"""The trained model of a run: a module with the weights that the run wrote at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workbench.errors import ConfigError
from workbench.problems import get, names
from workbench.problems.base import Problem
from workbench.replica.module_state import EXTRA_STATE, pack_extra_state, unpack_extra_state
from workbench.trace.weights import AVERAGED, WEIGHTS, State, read_weights

if TYPE_CHECKING:
    from workbench.trace.run import Run


def state_of(model: nn.Module, parameters: Sequence[Tensor] = (), flat: Tensor | None = None) -> State:
    """Return copies of a module's `state_dict`, on the CPU. Extra state is packed into tensors.

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
        name: pack_extra_state(value)
        if name.endswith(EXTRA_STATE)
        else values.get(id(value), value).detach().cpu().clone().contiguous()
        for name, value in state.items()
    }


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
            raise ConfigError(
                f"run {run.id} trained {name or 'a problem'}, which the package lacks: give it, as run.model(problem)"
            )
        problem = get(name)
    with torch.random.fork_rng(devices=[]):
        model = problem.model()
    state = {name: unpack_extra_state(value) if name.endswith(EXTRA_STATE) else value for name, value in state.items()}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
        missing = [one for one in missing if not one.endswith(EXTRA_STATE)]  # runs of before 29 November 2026
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
    if (found := _kept_weights(run, file)) is not None:
        return found
    if file == AVERAGED and _kept_weights(run, WEIGHTS) is not None:
        raise ConfigError(f"run {run.id} kept no moving average: train with ema_decay=, such as 0.999")
    how = "they are written when it ends" if run.folder else "only its timing was simulated"
    raise ConfigError(f"run {run.id} ({run.info.get('status', 'unknown')}) has no weights: {how}")


def _kept_weights(run: Run, file: str) -> State | None:
    """Return the weights of a run that are in memory or in its folder; None if there are none."""
    if run.weights and file in run.weights:
        return run.weights[file]
    return None if run.folder is None else read_weights(run.folder, file)
