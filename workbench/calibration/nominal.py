"""What compute costs on a device that is not here: operations counted on the model's shapes, at a rate that is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from workbench.calibration.parts import Shapes
from workbench.costs import Compute, Stragglers
from workbench.errors import ConfigError
from workbench.problems.base import Problem

SAMPLES = 2  # of the batch that is counted


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Operations of a model on one sample, and the shapes of its parameters.

    Attributes:
        forward: floating-point operations of forward, a sample; a multiplication with its addition counts as two.
        backward: of backward; where the first layer's input needs no gradient, less than twice as many.
        shares: of each parameter in order of registration, what part of forward is spent where it is used.
    """

    name: str
    shapes: Shapes
    forward: float
    backward: float
    shares: tuple[float, ...]

    def compute(
        self, batch_size: float, flops_per_s: float, *, update_bytes_per_s: float = 0.0, stragglers: tuple[Stragglers, ...] = ()
    ) -> Compute:
        """Seconds of a minibatch at that rate.

        Args:
            flops_per_s: what the device computes of these operations in a second, the batch being large enough.
            update_bytes_per_s: at which the update passes over the parameters; 0: it takes no time.
        """
        if not flops_per_s > 0 or not batch_size > 0:
            raise ConfigError(f"flops_per_s={flops_per_s}, batch_size={batch_size}: both above 0")
        return Compute(
            forward_s=self.forward * batch_size / flops_per_s,
            backward_s=self.backward * batch_size / flops_per_s,
            update_s=self.shapes.num_bytes / update_bytes_per_s if update_bytes_per_s else 0.0,
            stragglers=stragglers,
            forward_shares=self.shares,
            backward_shares=self.shares,
        )

    def problem(self) -> Problem:
        """The same shapes without values or data, for simulations that only keep time."""
        return self.shapes.problem(10**9)


def count_operations(name: str, image: tuple[int, int, int] = (3, 224, 224), classes: int = 1000) -> Counted:
    """Count the operations of one of torchvision's networks; nothing is computed and no memory is taken.

    Only products of matrices and convolutions are counted. What they take falls on the parameters of their module by elements;
    modules that have parameters and none of these (batch norm) take a share of 0.

    Raises:
        ConfigError: no such network, or torchvision is missing.
    """
    from workbench.problems.torchvision_door import torchvision

    models = torchvision().models
    if name not in models.list_models():
        raise ConfigError(f"model {name!r}: torchvision has none of that name; alexnet, googlenet and resnet50 are some")
    extra = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        model = models.get_model(name, weights=None, num_classes=classes, **extra).train()
        batch = torch.empty(SAMPLES, *image)
    return counted(model, batch, name)


def counted(model: nn.Module, batch: torch.Tensor, name: str = "model") -> Counted:
    """The same of any module, on the meta device or not, called with this batch.

    >>> found = counted(nn.Linear(3, 2), torch.zeros(4, 3))
    >>> found.forward, found.backward, found.shares  # 3 x 2 products and sums; backward to the weights alone
    (12.0, 12.0, (0.75, 0.25))
    """
    parameters = [(key, param) for key, param in model.named_parameters() if param.requires_grad]
    with FlopCounterMode(display=False) as counter:
        output = model(batch)
        forward = {module: sum(found.values()) for module, found in counter.get_flop_counts().items()}
        output.sum().backward()
    total, root = counter.get_total_flops(), type(model).__name__
    of_module = {
        key: [index for index, (other, _) in enumerate(parameters) if other.rpartition(".")[0] == key] for key, _ in model.named_modules()
    }
    spent = [0.0] * len(parameters)
    for key, indices in of_module.items():
        flops = forward.get(f"{root}.{key}" if key else root, 0)
        numel = sum(parameters[index][1].numel() for index in indices)
        for index in indices:
            spent[index] += flops * parameters[index][1].numel() / numel
    samples, all_spent = len(batch), sum(spent)
    if not all_spent:
        raise ConfigError(f"{name}: no product of matrices or convolution was counted")
    return Counted(
        name=name,
        shapes=Shapes(parameters=tuple((key, tuple(param.shape)) for key, param in parameters), batch_size=1),
        forward=forward["Global"] / samples,
        backward=(total - forward["Global"]) / samples,
        shares=tuple(value / all_spent for value in spent),
    )
