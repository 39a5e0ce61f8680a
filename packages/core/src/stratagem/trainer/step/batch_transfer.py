"""From a loader's batch to the step's: the strategy's conversion, the user's hooks around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.trainer.hooks import is_users

if TYPE_CHECKING:
    from stratagem.interfaces.strategy import Strategy
    from stratagem.module.datamodule import DataModule
    from stratagem.module.module import Module


def batch_converter(
    strategy: Strategy, module: Module, datamodule: DataModule | None, dataloader_idx: int = 0
) -> Callable[[Any], Any] | None:
    """Return what makes the step's batch of the loader's, or None: nothing to do.

    Looked up once for a loop. Where nobody overrides a hook that is the strategy's own conversion.

    Args:
        strategy: moves a batch to the device, in the precision's dtype.
        module, datamodule: whose hooks are called; the DataModule's first.
        dataloader_idx: handed to the hooks.
    """

    def hook(name: str) -> Callable[..., Any] | None:
        owners = (owner for owner in (datamodule, module) if is_users(owner, name))
        return next((getattr(owner, name) for owner in owners), None)

    convert = strategy.input_converter()
    before, after = hook("on_before_batch_transfer"), hook("on_after_batch_transfer")
    transfer = hook("transfer_batch_to_device")
    if before is None and transfer is None and after is None:
        return convert
    if transfer is not None:
        # It takes the place of the accelerator's, not of the precision's.
        convert = strategy.precision.input_converter()

    def convert_with_hooks(batch: Any) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        if transfer is not None:
            batch = transfer(batch, strategy.device, dataloader_idx)
        if convert is not None:
            batch = convert(batch)
        return batch if after is None else after(batch, dataloader_idx)

    return convert_with_hooks
