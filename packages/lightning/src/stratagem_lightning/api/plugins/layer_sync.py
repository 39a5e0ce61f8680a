"""LayerSync and TorchSyncBatchNorm: plugins by which Lightning synchronizes batch norm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stratagem.errors import ConfigurationError
from stratagem.runtime import as_list


class LayerSync(ABC):
    """Wraps layers of a model so that ranks synchronize what these compute."""

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Return the model with synchronized layers."""

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Return the model as it was before `apply`."""


class TorchSyncBatchNorm(LayerSync):
    """`Trainer(plugins=TorchSyncBatchNorm())` is short for `Trainer(sync_batchnorm=True)`.

    Example:
        >>> from torch import nn
        >>> plugin = TorchSyncBatchNorm()
        >>> plugin.apply(nn.Sequential(nn.BatchNorm1d(2)))[0].__class__.__name__
        'SyncBatchNorm'
    """

    def apply(self, model: nn.Module) -> nn.Module:
        """Return the model with `torch.nn.SyncBatchNorm` for its layers of batch norm."""
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        converted: nn.Module = convert(model)
        return converted

    def revert(self, model: nn.Module) -> nn.Module:
        """Return the model with layers of batch norm that do not communicate.

        They have the same parameters and statistics, and take inputs of any number of dimensions.
        """
        for name, child in model.named_children():
            setattr(model, name, self.revert(child))
        if not isinstance(model, nn.SyncBatchNorm):
            return model
        plain = _BatchNormOfAnyInput(model.num_features)
        vars(plain).update(vars(model))
        return plain


class _BatchNormOfAnyInput(_BatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        """Accept each number of dimensions: the layer's first class is not known."""


def expand_layer_sync(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments with `sync_batchnorm` for a TorchSyncBatchNorm in `plugins`.

    Raises:
        ConfigurationError: the plugin is another LayerSync.
    """
    plugins = as_list(options.get("plugins"))
    ours = [plugin for plugin in plugins if isinstance(plugin, LayerSync)]
    if not ours:
        return dict(options)
    if any(not isinstance(plugin, TorchSyncBatchNorm) for plugin in ours):
        if options.get("sync_batchnorm"):
            raise ConfigurationError(
                "You set `Trainer(sync_batchnorm=True)` and provided a `LayerSync` plugin, but "
                "this is not allowed: leave one of the two out"
            )
        raise ConfigurationError(
            f"plugins has {ours[0]!r}: expected TorchSyncBatchNorm() of the LayerSync plugins; "
            "replace the layers in the model's configure_model"
        )
    others = [plugin for plugin in plugins if plugin not in ours]
    return {**options, "plugins": others or None, "sync_batchnorm": True}
