"""SingleDeviceStrategy: one process, one device."""

from __future__ import annotations

from stratagem.interfaces.strategy import Strategy
from stratagem.native.strategy_specs import SINGLE_DEVICE


class SingleDeviceStrategy(Strategy):
    """Trains in one process on one device; which is one process alone.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.strategies import SingleDeviceStrategy
        >>> Trainer(strategy=SingleDeviceStrategy(), logger=False).world_size
        1
    """

    capabilities = SINGLE_DEVICE
