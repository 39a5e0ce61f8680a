"""The conversion of a loader's batch for the step, with the user's hooks, and BatchFeed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stratagem.errors import UserCodeError
from stratagem.trainer.hooks import is_users

if TYPE_CHECKING:
    from stratagem.interfaces.strategy import Strategy
    from stratagem.module.datamodule import DataModule
    from stratagem.module.module import Module
    from stratagem.trainer.loaders.train_loader import TrainLoader
    from stratagem.trainer.metrics.metrics import Metrics


def batch_converter(
    strategy: Strategy, module: Module, datamodule: DataModule | None, dataloader_idx: int = 0
) -> Callable[[Any], Any] | None:
    """Return the function that converts a loader's batch for the step, if any is needed.

    Call it once for a loop. Without overridden hooks, it returns the strategy's own conversion.

    Args:
        strategy: the strategy, which moves a batch to the device, in the precision's dtype.
        module, datamodule: the owners of the hooks; the DataModule's hooks take precedence.
        dataloader_idx: the loader's index for the hooks.
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
        # It replaces the accelerator's transfer, but not the precision's conversion.
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


IndexedBatch = tuple[Any, int, int]
"""A batch, its number, and the index of its loader."""


class BatchFeed:
    """Passes each batch to a step: validation, testing, predicting, and training without gradients.

    The loop iterates over it. For each item it calls the hooks of the batch's start, `run`, and
    the hooks of the batch's end with `last`.

    Args:
        batches: the batches.
        takes: the number of arguments that the step takes, of (batch, batch_idx, dataloader_idx).

    Attributes:
        last: the latest batch; (None, 0, 0) before the first.

    Example:
        >>> feed = BatchFeed(iter([("a", 0, 0), ("b", 1, 0)]), 2)
        >>> [feed.run(lambda batch, batch_idx: f"{batch}{batch_idx}") for _ in feed]
        ['a0', 'b1']
    """

    def __init__(self, batches: Iterator[IndexedBatch], takes: int) -> None:
        self._batches = batches
        self._takes = takes
        self.last: IndexedBatch = (None, 0, 0)

    def __iter__(self) -> Iterator[IndexedBatch]:
        """Yield the arguments for the hooks of each batch's start."""
        for batch in self._batches:
            self.last = batch
            yield batch

    def run(self, step: Callable[..., Any]) -> Any:
        """Call the step with the current batch; return its result.

        Raises:
            EndOfEpoch: if no batch is left for this call.
        """
        return step(*self.last[: self._takes])


def refuse_dataloader_iter(step: Callable[..., Any]) -> None:
    """Raise if a step takes `dataloader_iter` instead of a batch.

    Raises:
        UserCodeError: the step takes it.

    Example:
        >>> refuse_dataloader_iter(lambda batch, batch_idx: None)
    """
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise UserCodeError(
            f"{step.__qualname__} takes dataloader_iter, which only the Trainer of "
            "stratagem-lightning passes: take batch and batch_idx instead, or "
            "`pip install stratagem-lightning` and start the script by "
            "`stratagem run --as-lightning`"
        )


def training_batches(
    loader: TrainLoader, convert: Callable[[Any], Any] | None, metrics: Metrics, done: int = 0
) -> Iterator[IndexedBatch]:
    """Yield the training batches of the epoch in the form for `training_step`.

    Args:
        loader: in an epoch.
        convert: makes the step's batch of the loader's.
        metrics: reads the size of each batch.
        done: batches of the epoch before the first.
    """
    for number, (batch,) in enumerate(loader.steps(1), start=done):
        if convert is not None:
            batch = convert(batch)
        metrics.batch = batch
        yield batch, number, 0
