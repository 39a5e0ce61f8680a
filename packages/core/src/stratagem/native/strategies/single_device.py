"""The strategies of one process: SingleDeviceStrategy, and DataParallelStrategy for older code."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.errors import ConfigurationError
from stratagem.native.plugin import DP, SINGLE_DEVICE, why_no_dp
from stratagem.strategies import Components, Strategy


class SingleDeviceStrategy(Strategy):
    """Trains in one process on one device; which is one process alone.

    Args:
        device: which one, as in `torch.device`: "cpu", "cuda:1"; its type is the accelerator where
            none is named. None: as the front end says.
        **components: see `Strategy`.

    Raises:
        ConfigurationError: it is no device; or, from `bind`, it is none of the accelerator's.

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


class DataParallelStrategy(SingleDeviceStrategy):
    """Splits each batch over several GPUs of one process, which copies the model at every step.

    Deprecated: ddp does the same faster. On one device it is the plain module. What a method
    returns for the parts of a batch is joined along the first dim; scalars, such as the loss, are
    averaged. Several devices were never tried on hardware.

    Args:
        **components: see `Strategy`.

    Raises:
        ConfigurationError: several devices were asked for that are no GPUs.

    Example:
        >>> import warnings
        >>> from stratagem.strategies import DataParallelStrategy
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     strategy = DataParallelStrategy()
        >>> strategy.capabilities.one_process
        True
    """

    capabilities = DP

    def __init__(self, **components: Any) -> None:
        super().__init__(**components)
        warnings.warn(
            "strategy='dp' (DataParallel) is deprecated: it copies the model at every step. Use "
            "strategy='ddp', which trains alike with one process a device",
            FutureWarning,
            stacklevel=2,
        )

    def bind(self, components: Components) -> None:
        """Take the components of the plan; see `Strategy.bind`."""
        super().bind(components)
        accelerator = components.accelerator
        kernels = accelerator.data_parallel_kernels
        why = why_no_dp(accelerator.name, len(components.devices), has_kernels=kernels)
        if why:
            raise ConfigurationError(why)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module, wrapped in DataParallel for several devices."""
        if len(self.components.devices) == 1:
            return module
        return _DataParallel(module, device_ids=list(self.components.devices))

    def synchronize_batch_norm(self, module: nn.Module) -> None:
        """Refuse several devices: DataParallel takes statistics on each."""
        if len(self.components.devices) > 1:
            raise ConfigurationError(
                "sync_batchnorm=True with strategy='dp': DataParallel takes batch statistics on "
                "each device alone; use strategy='ddp'"
            )


class _DataParallel(nn.DataParallel[nn.Module]):
    """DataParallel whose replicas may return scalars, in dicts and sequences too."""

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Combine the outputs of the replicas into one output."""
        first = outputs[0]
        if isinstance(first, Tensor) and first.dim() == 0:
            return torch.stack([output.to(output_device) for output in outputs]).mean()
        if isinstance(first, dict):
            return {key: self.gather([o[key] for o in outputs], output_device) for key in first}
        if isinstance(first, (list, tuple)):
            parts = zip(*outputs, strict=True)
            return type(first)([self.gather(list(part), output_device) for part in parts])
        if not isinstance(first, Tensor):
            return first
        return super().gather(outputs, output_device)
