"""ColossalAIStrategy: a model boosted by ColossalAI's TorchDDP plugin."""

from __future__ import annotations

from typing import Any

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategies import DDPStrategy
from stratagem_colossalai.plugin import COLOSSALAI

_REFUSED = {
    "gemini": "it makes a CUDA stream when it wraps a model, also on a CPU",
    "low_level_zero": "its optimizer steps by a fused kernel that is built with CUDA",
}
"""Plugins of ColossalAI that do not run without a GPU, and why."""


class ColossalAIStrategy(DDPStrategy):
    """Lets ColossalAI's booster wrap the model, as its TorchDDP plugin does.

    Batch norm layers take their statistics over all ranks, unasked, as the plugin has it.

    Args:
        plugin: of ColossalAI's booster; "torch_ddp".
        bucket_cap_mb, broadcast_buffers, find_unused_parameters, gradient_as_bucket_view,
            static_graph, check_reduction, fp8_communication: see ColossalAI's TorchDDPPlugin.
        **components: see `ParallelStrategy`.

    Raises:
        ConfigurationError: another plugin, with the reason.
    """

    capabilities = COLOSSALAI

    def __init__(
        self,
        *,
        plugin: str = "torch_ddp",
        bucket_cap_mb: int = 25,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        check_reduction: bool = False,
        fp8_communication: bool = False,
        **components: Any,
    ) -> None:
        super().__init__(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            **components,
        )
        if plugin != "torch_ddp":
            why = _REFUSED.get(plugin, "it is not known here")
            raise ConfigurationError(
                f"plugin={plugin!r} of ColossalAI is not served: {why}; expected 'torch_ddp'. "
                "strategy='fsdp' shards parameters on any device"
            )
        self.plugin_options = {
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "check_reduction": check_reduction,
            "fp8_communication": fp8_communication,
        }

    def configure_ddp(self) -> None:
        """Boost `self.model`."""
        # Before the boost: on a CPU these layers get a forward that runs there.
        self.synchronize_batch_norm(self.model)
        kind = TorchDDPPlugin if self.accelerator.sync_batchnorm_kernels else _OnHost
        boosted, *_ = Booster(plugin=kind(**self.plugin_options)).boost(self.model)
        self.model = boosted.module


class _OnHost(TorchDDPPlugin):  # type: ignore[misc]  # untyped
    """The plugin without torch's SyncBatchNorm, which it would put in, and which needs a GPU."""

    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, ...]:
        """Wrap the model as the plugin does."""
        wrapped = TorchDDPModel(model, **self.ddp_kwargs)
        return wrapped, optimizer, criterion, dataloader, lr_scheduler
