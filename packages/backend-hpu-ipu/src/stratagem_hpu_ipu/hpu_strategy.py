"""SingleHPUStrategy and HPUParallelStrategy: one Gaudi device, or several over hccl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data import map_tensors
from stratagem.errors import ConfigurationError
from stratagem.strategies import (
    Components,
    DDPStrategy,
    Optimizers,
    PreparedModel,
    Ranks,
    SingleDeviceStrategy,
    StepModule,
    Strategy,
)
from stratagem_hpu_ipu.hpu_library import load_sdk
from stratagem_hpu_ipu.hpu_plugin import HPU_PARALLEL, HPU_SINGLE
from stratagem_torch.parallel import ProcessGroupRanks


class HPUSteps(Strategy):
    """The part of a strategy that Gaudi needs: steps that end graphs, state in host memory.

    In lazy mode operations are collected, and run at a `mark_step`: after each backward, after each
    optimizer step, and before each batch of an evaluation, so that none grows into the next.
    """

    _mark_step: Callable[[], Any] | None = None
    """Ends the graph, in lazy mode; None: operations run as they come."""

    def bind(self, components: Components) -> None:
        """Set the components of the plan; see `Strategy.bind`.

        Raises:
            ConfigurationError: devices are chosen by index, and Gaudi devices have no index.
        """
        super().bind(components)
        if components.devices != tuple(range(len(components.devices))):
            asked = list(components.devices)
            raise ConfigurationError(
                f"devices={asked} chooses Gaudi devices by index, and they carry none: pass "
                f"devices={len(asked)}, and set HABANA_VISIBLE_MODULES="
                f"{','.join(map(str, asked))} to choose which"
            )

    def setup_environment(self) -> None:
        """Set up the device, and determine whether operations are collected."""
        super().setup_environment()
        core = load_sdk().core
        self._mark_step = core.mark_step if core.is_lazy() else None

    def prepare(
        self, module: nn.Module, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        """Return the model as it runs; in lazy mode, each batch of an evaluation is a graph."""
        prepared = super().prepare(module, optimizers, move_to_device=move_to_device)
        if self._mark_step is not None:
            prepared.evaluation_module = _NewGraph(prepared.evaluation_module, self._mark_step)
        return prepared

    # -- a step

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward, then the graph."""
        super().backward(prepared, loss, *args, **kwargs)
        if self._mark_step is not None:
            self._mark_step()

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step one optimizer, then run the graph."""
        result = super().optimizer_step(prepared, optimizer, closure)
        if self._mark_step is not None:
            self._mark_step()
        return result

    # -- state

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Return parameters and buffers in host memory, by their canonical names."""
        # With the parameters themselves, so that a tied one is known to be one.
        return _on_host(prepared.original.state_dict(keep_vars=True))

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state in host memory, by parameter names."""
        return _on_host(super().optimizer_state(prepared, optimizer))


class SingleHPUStrategy(HPUSteps, SingleDeviceStrategy):
    """Trains in one process on one Gaudi device.

    Contract-tested against a stub of the SDK, never run on hardware.

    Args:
        **components: see `Strategy`; `accelerator=HPUAccelerator(lazy_mode=...)` chooses the mode.

    Example:
        >>> from stratagem.strategies import SingleHPUStrategy
        >>> SingleHPUStrategy().capabilities.accelerators
        ('hpu',)
    """

    capabilities = HPU_SINGLE


class HPUParallelStrategy(HPUSteps, DDPStrategy):
    """Replicates the model over Gaudi devices, one process each, and averages gradients by hccl.

    Contract-tested against a stub of the SDK, never run on hardware.

    Args:
        **arguments: see `DDPStrategy`.

    Example:
        >>> from stratagem.strategies import HPUParallelStrategy
        >>> HPUParallelStrategy(static_graph=True).capabilities.multi_node
        True
    """

    capabilities = HPU_PARALLEL

    def bind(self, components: Components) -> None:
        """Take the components of the plan; see `ParallelStrategy.bind`."""
        if self.process_group_backend == components.accelerator.process_group_backend:
            # The accelerator's own, which torch knows once ranks have imported the SDK.
            self.process_group_backend = None
        super().bind(components)

    def make_ranks(self) -> Ranks:
        """Return the ranks by the cluster environment; see `Strategy.make_ranks`."""
        return HCCLRanks(self.cluster_environment, self.components.device_count)

    def init_process_group(self) -> None:
        """Tell the SDK which rank this is, by which it takes its device; then join the group."""
        if not dist.is_initialized():
            import habana_frameworks.torch.distributed.hccl as hccl

            hccl.initialize_distributed_hpu(
                world_size=self.ranks.world_size,
                rank=self.ranks.global_rank,
                local_rank=self.ranks.local_rank,
            )
        super().init_process_group()


class HCCLRanks(ProcessGroupRanks):
    """Ranks over hccl, which carries sizes of weights-only-safe data as 32-bit integers."""

    size_dtype: ClassVar[torch.dtype] = torch.int32


class _NewGraph(StepModule):
    """Calls a method of the model in a graph of its own."""

    def __init__(self, module: nn.Module, mark_step: Callable[[], Any]) -> None:
        super().__init__(module)
        self._mark_step = mark_step

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run the collected operations, then call the method."""
        self._mark_step()
        return self.module(method, *args, **kwargs)


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return state with its tensors copied to host memory, and one tensor as one tensor."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().cpu()
        return copies[id(tensor)]

    copied: dict[str, Any] = map_tensors(copy, dict(state))
    return copied
