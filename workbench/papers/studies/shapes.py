"""Networks by their shapes: bytes of each tensor, operations of each layer, and simulated steps without gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from workbench import problems
from workbench.analysis.summary import mean_step_s
from workbench.costs import AnyNetwork, Compute, Stragglers, count_compute
from workbench.gradients import Layout, build_layout, trainable
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run

SIDE, INCEPTION_SIDE = 224, 299  # pixels of an image
GPT2 = "gpt2-"


class BucketSeconds(NamedTuple):
    """Seconds of a step of layer-wise SGD: forward, and backward, sum and update of each bucket."""

    forward_s: float
    backward_s: list[float]
    sums_s: list[float]
    updates_s: list[float]

    @property
    def compute_s(self) -> float:
        return self.forward_s + sum(self.backward_s) + sum(self.updates_s)

    @property
    def window_s(self) -> float:
        """Backward after its first bucket: what layer-wise SGD can hide."""
        return sum(self.backward_s[1:])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A network without values.

    Attributes:
        name: its name.
        problem: the network with synthetic data.
        timed: the same network with 10^9 samples and no test data, for simulations of time.
        weights: name and shape of each parameter.
        operations: forward and backward of one sample on a device of one operation per second.
    """

    name: str
    problem: Problem
    timed: Problem
    weights: list[tuple[str, nn.Parameter]]
    operations: Compute

    @classmethod
    def get(cls, name: str) -> Shape:
        """Return a network of torchvision with 1000 classes, or `gpt2-SIZE`.

        >>> alexnet = Shape.get("alexnet")
        >>> round(alexnet.num_bytes / 1e6), round(alexnet.linear_share(), 2)
        (244, 0.96)
        """
        if name.startswith(GPT2):
            problem = problems.gpt2_synthetic(name.removeprefix(GPT2))
        else:
            side = INCEPTION_SIDE if name == "inception_v3" else SIDE
            images: dict[str, Any] = {"image": (3, side, side), "classes": 1000, "samples": 8}
            problem = problems.get("resnet18-synthetic", model_name=name, **images)
        with torch.device("meta"):
            weights = trainable(problem.model())
        timed = replace(problem, train=range(10**9), test=None, correct=None)
        operations = count_compute(problem, 1, flops_per_s=1.0)
        return cls(name=name, problem=problem, timed=timed, weights=weights, operations=operations)

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradient."""
        return sum(4 * weight.numel() for _, weight in self.weights)

    def layout(self, bucket_bytes: float = 0) -> Layout:
        """Return the buckets of its gradient; one for each parameter if `bucket_bytes` is 0."""
        return build_layout(self.weights, bucket_bytes)

    def linear_share(self) -> float:
        """Return the share of the bytes in fully connected layers, including those of a transformer."""
        with torch.device("meta"):
            model = self.problem.model()
        layers = (module for module in model.modules() if isinstance(module, nn.Linear | nn.MultiheadAttention))
        numels = {id(weight): weight.numel() for layer in layers for weight in layer.parameters()}
        return 4 * sum(numels.values()) / self.num_bytes

    def bytes_after_convolutions(self) -> float:
        """Return the share of the bytes after the weights of the last convolution."""
        numels = [weight.numel() for _, weight in self.weights]
        last = max(at for at, (_, weight) in enumerate(self.weights) if weight.dim() == 4)
        return sum(numels[last + 1 :]) / sum(numels)

    def compute(
        self,
        samples: float,
        flops_per_s: float,
        *,
        update_bytes_per_s: float = math.inf,
        stragglers: tuple[Stragglers, ...] = (),
    ) -> Compute:
        """Return the compute of a worker.

        Args:
            samples: of the worker in a step.
            flops_per_s: operations per second of its device.
            update_bytes_per_s: bytes of parameters that it updates per second.
            stragglers: distributions of its time.
        """
        return replace(
            self.operations,
            forward_s=self.operations.forward_s * samples / flops_per_s,
            backward_s=self.operations.backward_s * samples / flops_per_s,
            update_s=self.num_bytes / update_bytes_per_s,
            stragglers=stragglers,
        )

    def ready(self, compute: Compute) -> dict[float, float]:
        """Return completed share of backward -> share of the gradient's bytes that is ready."""
        layout = self.layout()
        numels = [sum(slot.numel for slot in bucket.slots) for bucket in layout.buckets]
        shares = np.cumsum(numels) / layout.parameter_numel
        return {0.0: 0.0} | dict(zip(compute.ready_shares(layout), shares.tolist(), strict=True))

    def bucket_seconds(
        self, compute: Compute, network: AnyNetwork, workers: int, bucket_bytes: float = 0
    ) -> BucketSeconds:
        """Return the parts of a step, the bucket of the last layers first, as `theory.layerwise` takes them."""
        layout = self.layout(bucket_bytes)
        backward = np.diff((0.0, *compute.ready_shares(layout))) * compute.backward_s
        sums = [network.all_reduce_s(layout.bucket_bytes(number), workers) for number in range(len(layout.buckets))]
        updates = [compute.update_s * (bucket.stop - bucket.start) / layout.numel for bucket in layout.buckets]
        return BucketSeconds(compute.forward_s, backward.tolist(), sums, updates)

    def simulate(
        self, algorithm: Algorithm, *, workers: int, network: AnyNetwork, compute: Compute, steps: int, **settings: Any
    ) -> Run:
        """Simulate steps, without gradients. By default the run has no trace."""
        how: dict[str, Any] = {"timing_only": True, "batch_size": 1, "trace_steps": 0, **settings}
        return simulate(algorithm, self.timed, workers=workers, network=network, compute=compute, steps=steps, **how)

    def step_s(self, algorithm: Algorithm, *, skip: int, **how: Any) -> float:
        """Return the mean seconds of a simulated step after the first `skip` + 1. See `simulate`."""
        return mean_step_s(self.simulate(algorithm, **how), skip)


def equal_layers(count: int, numel: int) -> Shape:
    """Return a network of equal layers with `numel` parameters together, for simulations of sums alone.

    >>> equal_layers(4, 400).num_bytes
    1600
    """
    weights = [nn.Parameter(torch.empty(numel // count, device="meta")) for _ in range(count)]

    def no_loss(*_: Any) -> Tensor:
        return torch.tensor(0.0)

    problem = Problem(model=lambda: nn.ParameterList(weights), loss=no_loss, train=range(10**9))
    named = [(str(number), weight) for number, weight in enumerate(weights)]
    nothing = Compute(forward_s=0.0, backward_s=0.0)
    return Shape(name=f"{count} layers", problem=problem, timed=problem, weights=named, operations=nothing)
