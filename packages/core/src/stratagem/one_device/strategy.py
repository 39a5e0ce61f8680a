"""SingleDeviceStrategy: one process, one device."""

from __future__ import annotations

from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.one_device.plugin import SINGLE_DEVICE
from stratagem.strategies import Components, Strategy


class SingleDeviceStrategy(Strategy):
    """Trains in a single process on one device.

    Args:
        device: the device, as in `torch.device`: "cpu", "cuda:1". Its type selects the accelerator
            unless an accelerator is given. None follows the options of the front end.
        **components: see `Strategy`.

    Raises:
        ConfigurationError: the value is not a device; or, from `bind`, the accelerator does not
            have this device.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.strategies import SingleDeviceStrategy
        >>> trainer = Trainer(strategy=SingleDeviceStrategy("cpu"), logger=False)
        >>> trainer.world_size, trainer.plan.accelerator.name
        (1, 'cpu')
    """

    capabilities = SINGLE_DEVICE
    _wanted: torch.device | None = None

    def __init__(self, device: str | int | torch.device | None = None, **components: Any) -> None:
        if device is None:
            super().__init__(**components)
            return
        self._wanted = wanted = _device(device)
        if components.get("accelerator") is None:
            components["accelerator"] = wanted.type
        super().__init__(**components)
        if wanted.type != "cpu" and wanted.index is not None:
            self.requested = {**self.requested, "devices": [wanted.index]}

    def bind(self, components: Components) -> None:
        """Take the components of the plan; see `Strategy.bind`."""
        super().bind(components)
        found = self.accelerator.device(components.devices[0]).type
        if self._wanted is not None and self._wanted.type != found:
            raise ConfigurationError(
                f"{type(self).__name__}(device={str(self._wanted)!r}): expected a device of the "
                f"accelerator {self.accelerator.name!r}, which are {found}: change one of the two"
            )


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device={device!r}: expected a device such as 'cpu' or 'cuda:1': {error}"
        ) from error
