"""Every training method, one file each."""

from workbench.algorithms.layerwise import ApplyOrder, LayerwiseSGD
from workbench.algorithms.pipe import DelayedSGD, PipeSGD
from workbench.algorithms.synchronous import SynchronousSGD

__all__ = ["ApplyOrder", "DelayedSGD", "LayerwiseSGD", "PipeSGD", "SynchronousSGD"]
