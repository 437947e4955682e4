"""Ways to sum over all ranks."""

from workbench.collectives.base import Collective, Native, flat_of, native_bytes
from workbench.collectives.linear import Linear
from workbench.collectives.ring import Ring

__all__ = ["Collective", "Linear", "Native", "Ring", "flat_of", "native_bytes"]
