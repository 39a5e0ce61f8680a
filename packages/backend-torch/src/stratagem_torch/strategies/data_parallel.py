"""DataParallelStrategy, for older code: one process that splits each batch over several GPUs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.errors import ConfigurationError
from stratagem.strategies import Components, SingleDeviceStrategy
from stratagem_torch.plugin import DP, why_no_dp


class DataParallelStrategy(SingleDeviceStrategy):
    """Splits each batch over several GPUs of one process, which copies the model at every step.

    Deprecated: ddp trains the same model faster. On one device the strategy runs the module itself.
    The return values of a method for the parts of a batch are concatenated along the first dim;
    scalars, such as the loss, are averaged. Several devices are untested on hardware.

    Args:
        **components: see `Strategy`.

    Raises:
        ConfigurationError: several devices are requested that are not GPUs.

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
