"""ModelParallelStrategy by Lightning's names."""

from __future__ import annotations

from stratagem import strategies
from stratagem_lightning.api.instance_check import InstanceCheck, of_class

# The device mesh of a strategy before the launch.
from stratagem_lightning.api.strategies import single_device as single_device


class ModelParallelStrategy(strategies.ModelParallelStrategy, metaclass=InstanceCheck):
    """Stratagem's; `device_mesh` is an error before the launch. Arguments as there.

    Example:
        >>> isinstance(strategies.ModelParallelStrategy(), ModelParallelStrategy)
        True
    """

    is_instance = of_class(strategies.ModelParallelStrategy)
