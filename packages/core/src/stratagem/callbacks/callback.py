"""Callback: the hooks of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from stratagem.errors import UserCodeError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from stratagem.module.module import Module
    from stratagem.trainer import Trainer

LOGGED: ContextVar[Callable[[], Module | None]] = ContextVar("LOGGED")
"""A function that returns the Module of the current run, which logs for callbacks.

The reference is weak, since a timer or task that is started in the run copies the context.
"""


class Callback:
    """Base class for callbacks: override the hooks to run code at certain points of a run.

    Every hook is called on every rank. Hooks that a callback does not override have no cost: the
    Trainer collects the overridden hooks once, before the loop.

    Order within one optimizer step over k micro-batches: for each micro-batch
    `on_train_batch_start`, `on_before_backward`, `on_after_backward`, and for the last one
    `on_before_optimizer_step` and `on_before_zero_grad` before its `on_train_batch_end`, which can
    still read the gradients, except under a strategy whose engine takes the steps. If the Module
    overrides a hook of `StepHooks`, `on_before_zero_grad` comes before the first backward.

    Example:
        >>> from stratagem import Callback, Trainer
        >>> class CountBatches(Callback):
        ...     batches = 0
        ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        ...         self.batches += 1
        >>> trainer = Trainer(callbacks=CountBatches(), logger=False)
        >>> any(isinstance(callback, CountBatches) for callback in trainer.callbacks)
        True
    """

    runs_after_metrics: ClassVar[bool] = False
    """Whether the callback's hooks at the end of an epoch run after the reduction of its values."""

    @property
    def state_key(self) -> str:
        """The key of the callback's state in a checkpoint; unique among a run's callbacks."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint, as weights-only-safe data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log a value, in the hooks in which the Module can log.

        Args:
            name, value, **options: the arguments of `Module.log`.

        Raises:
            UserCodeError: as in `Module.log`, or no run is active.
        """
        module = LOGGED.get(lambda: None)()
        if module is None:
            raise UserCodeError(
                f"{type(self).__name__}.log({name!r}, ...) works in a callback's hooks, while a "
                "Trainer runs: log there, or by a logger's own log_metrics"
            )
        module.log(name, value, **options)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log several values, with the options of `log`."""
        for name, value in values.items():
            self.log(name, value, **options)

    def load_remote_state(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of rank 0's process after a run in other processes.

        Unlike the state in a checkpoint, this state comes from the same program.
        """
        self.load_state_dict(state)

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called first of all hooks; `stage` is "fit", "validate", "test" or "predict".

        The data are prepared and the DataModule's `setup` has run.
        """

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called last of all hooks of a callback; the DataModule's `teardown` follows."""

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Called after the model is prepared and a checkpoint, if any, is loaded."""

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """Called when fit ends without an exception."""

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the validation batches that are run before training."""

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the validation batches that are run before training."""

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before each epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after each epoch and its validation."""

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> int | None:
        """Called before each training batch.

        If a callback's hook returns -1, the rest of the epoch is skipped.
        """

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after each training batch; `outputs` is a dict with the key "loss"."""

    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
        """Called before each backward."""

    def on_after_backward(self, trainer: Trainer, module: Module) -> None:
        """Called after each backward."""

    def on_before_optimizer_step(
        self, trainer: Trainer, module: Module, optimizer: Optimizer
    ) -> None:
        """Called after all gradients are computed, before clipping."""

    def on_before_zero_grad(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        """Called after the optimizer step, before gradients are cleared."""

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Called before validation."""

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Called after validation, when its values are available."""

    def on_validation_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last validation batch; values may still be logged."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each validation batch, with the return value of `validation_step`."""

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """Called before testing."""

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        """Called after testing, when its values are available."""

    def on_test_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last test batch; values may still be logged."""

    def on_test_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each test batch."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each test batch, with the return value of `test_step`."""

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        """Called before predicting."""

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        """Called after predicting."""

    def on_predict_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each batch to predict."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each batch to predict, with the return value of `predict_step`."""

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Called when an exception ends a run, before the exception is raised again."""

    def on_save_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Called before a checkpoint is saved; may add weights-only-safe data to it."""

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Called after a checkpoint was read, before the model and optimizer are loaded from it."""
