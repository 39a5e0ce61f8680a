"""XLA's strategies: one program a step, on one device or divided over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError
from stratagem.strategies import Optimizers, PreparedModel, Strategy, TrainStep
from stratagem_xla.host import on_host, put_on_device
from stratagem_xla.library import check_no_spmd, import_torch_xla, start_spmd
from stratagem_xla.plugin import SINGLE, SPMD
from stratagem_xla.sharding import Blocks, blocks_of, check_mesh, divide_output, divided


class _XLAStrategy(Strategy):
    """Trains by programs that PyTorch/XLA records and compiles, one for each optimizer step.

    Operations on XLA tensors are recorded; `torch_xla.sync()` compiles what was recorded and
    starts it, and a program that was compiled before starts at once. It comes after each optimizer
    step and after each forward without gradients. Whatever reads a value before (`.item()`,
    `print`) cuts the step into two programs and waits for the first.
    """

    _syncs_steps = True

    def check_activation_checkpointing(self, choice: Any) -> None:
        """Refuse it: the compiler would merge the second computation with the first.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            f"activation_checkpointing={choice!r}: the XLA compiler merges a second computation of "
            "activations with the first, so that it saves nothing: leave it out, or use "
            "torch_xla.utils.checkpoint in the model"
        )

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        """Take the step, then start the program: gradients are gone then, and are no result."""
        self._syncs_steps = False
        try:
            super().finish_step(prepared, step)
        finally:
            self._syncs_steps = True
        import_torch_xla().sync()

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step one optimizer; in a loop of the user's own, start the program too."""
        result = super().optimizer_step(prepared, optimizer, closure)
        if self._syncs_steps:
            import_torch_xla().sync()
        return result

    def prepare(
        self, module: nn.Module, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        prepared = super().prepare(module, optimizers, move_to_device=move_to_device)
        prepared.evaluation_module = _Synced(prepared.evaluation_module)
        return prepared

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Return parameters and buffers by their canonical names, in host memory."""
        state: dict[str, Any] = on_host(dict(prepared.original.state_dict(keep_vars=True)))
        return state

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = on_host(super().optimizer_state(prepared, optimizer))
        return state


class _Synced(nn.Module):
    """Starts the program of each forward; without it an evaluation would be recorded as one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        import_torch_xla().sync()
        return output


class SingleXLAStrategy(_XLAStrategy):
    """Trains in one process on one XLA device.

    Args:
        **components: see `Strategy`.

    Example:
        >>> from stratagem_xla.strategy import SingleXLAStrategy
        >>> SingleXLAStrategy().capabilities.many_devices
        False
    """

    capabilities = SINGLE

    def setup_environment(self) -> None:
        check_no_spmd()
        super().setup_environment()


class XLAStrategy(_XLAStrategy):
    """Trains in one process on all XLA devices of this host, each with a part of every batch.

    The compiler divides one program over the devices (SPMD). User code therefore sees the global
    batch, as on one device, and so do its results (losses, batch norm's statistics); results differ
    from one device's by rounding only. Parameters are on every device. Tensors of a batch are
    divided if the number of devices divides their first dim; other tensors are on every device.

    The strategy drives the devices of one host, and rejects a slice of several hosts.

    Args:
        debug: let PyTorch/XLA print compilations and their causes (PT_XLA_DEBUG_LEVEL=2), to
            stderr.
        **components: see `Strategy`.

    Raises:
        ConfigurationError: from the launch on: a device was used without SPMD in this process, or
            the devices are spread over several hosts.

    Example:
        >>> from stratagem_xla.strategy import XLAStrategy
        >>> XLAStrategy(debug=True).debug
        True
    """

    capabilities = SPMD

    def __init__(self, *, debug: bool = False, **components: Any) -> None:
        super().__init__(**components)
        self.debug = debug

    def setup_environment(self) -> None:
        if self.debug:
            os.environ.setdefault("PT_XLA_DEBUG_LEVEL", "2")  # read when torch_xla is imported
        start_spmd()
        super().setup_environment()
        check_mesh(planned=len(self.components.devices))


class XLAFSDPStrategy(XLAStrategy):
    """Trains as `XLAStrategy`, with parameters and optimizer state divided too.

    Each parameter is divided along its longest dim, as in torch_xla's SpmdFullyShardedDataParallel;
    the compiler gathers it at its use, and places gradients. The model is not wrapped, so that
    names stay.

    Args:
        blocks: the modules that the compiler gathers and frees one after the other: classes of
            modules, or a function of a module; None: the elements of ModuleLists and Sequentials.
        debug, **components: see `XLAStrategy`.

    Example:
        >>> from torch import nn
        >>> from stratagem_xla.strategy import XLAFSDPStrategy
        >>> XLAFSDPStrategy(blocks=nn.TransformerEncoderLayer).debug
        False
    """

    def __init__(
        self,
        *,
        blocks: Blocks = None,
        debug: bool = False,
        **components: Any,
    ) -> None:
        super().__init__(debug=debug, **components)
        self.blocks = blocks

    def wrap(self, module: nn.Module) -> nn.Module:
        """Divide the parameters, and let each block's outputs be divided by samples."""
        for parameter in module.parameters():
            divided(parameter, longest=True)
        for block in blocks_of(module, self.blocks):
            divide_output(block)
        return module

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        super().load_model_state(prepared, state, strict=strict)
        put_on_device(prepared.original.state_dict(keep_vars=True))

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        super().load_optimizer_state(prepared, optimizer, state)
        # The compiler shards new state like its parameter; loaded state is unsharded.
        for parameter, entry in optimizer.state.items():
            # An optimizer may keep state under other keys than parameters.
            for value in entry.values() if isinstance(parameter, Tensor) else ():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    divided(value, longest=True)
        put_on_device(list(optimizer.state.values()))
