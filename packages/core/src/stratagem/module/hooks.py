"""The hooks of a Module and a DataModule; the base classes' own hooks do nothing.

So an override may call `super().on_train_start()`, as cooperating base classes do. The Trainer
collects only overridden hooks (`trainer/hooks.py`), so the others cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from stratagem.data.pytree import move_to_device

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer


class DataHooks:
    """The methods of a Module or a DataModule that return the loaders and move a batch to a device.

    The Trainer calls the hooks of the transfer for each batch, in the order of their definition,
    after the data was split over the ranks. If both the Module and the DataModule override one, the
    DataModule's is called. `dataloader_idx` is the index of the evaluation loader, and 0 in
    training.
    """

    prepare_data_per_node: bool = True
    """If True, `prepare_data` is called on rank 0 of each node; if False, only on global rank 0."""

    def prepare_data(self) -> None:
        """Download data and write it to disk; called on rank 0 of each node; other ranks wait."""

    def train_dataloader(self) -> Any:
        """Return the loader for training."""
        return None

    def val_dataloader(self) -> Any:
        """Return the loader, or a list of loaders, for validation."""
        return None

    def test_dataloader(self) -> Any:
        """Return the loader, or a list of loaders, for testing."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the loader, or a list of loaders, for predicting."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Transform a batch from the loader, before it is moved to the device."""
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch to the device; override it for types that Stratagem cannot move."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Transform a batch on the device, before it is passed to the step."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Called when a run fails with an exception, before the exception is raised again."""


class ModuleHooks(DataHooks, nn.Module):
    """The hooks of `Callback` for a Module, without their first two arguments."""

    def setup(self, stage: str) -> None:
        """Called first in each run; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called last in each run."""

    def on_fit_start(self) -> None:
        """Called after the model is prepared and the checkpoint, if any, is loaded."""

    def on_fit_end(self) -> None:
        """Called when fit ends without an exception."""

    def on_sanity_check_start(self) -> None:
        """Called before the sanity check, which runs validation batches before training."""

    def on_sanity_check_end(self) -> None:
        """Called after the sanity check."""

    # -- training

    def on_train_start(self) -> None:
        """Called before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before each epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after each epoch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before each training batch.

        If the hook returns -1, the rest of the epoch is skipped.
        """

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each training batch; `outputs` is a dict with the key "loss"."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before each backward pass."""

    def on_after_backward(self) -> None:
        """Called after each backward pass."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after the last backward pass of a step, before gradients are clipped."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called after the optimizer step, before gradients are cleared."""

    # -- validation

    def on_validation_model_zero_grad(self) -> None:
        """Called before validation within a fit; an override can free gradients here."""

    def on_validation_model_eval(self) -> None:
        """Set evaluation mode; called before `on_validation_start`."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Leave evaluation mode; called after validation, only if overridden.

        By default, the Trainer restores the mode that each submodule had before.
        """
        self.train()

    def on_validation_start(self) -> None:
        """Called before validation."""

    def on_validation_end(self) -> None:
        """Called after validation, when its metrics are available."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch; may still log values."""

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each validation batch; `outputs` is the result of `validation_step`."""

    # -- testing

    def on_test_model_eval(self) -> None:
        """Set evaluation mode; called before `on_test_start`."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Leave evaluation mode; called after testing, only if overridden.

        By default, the Trainer restores the mode that each submodule had before.
        """
        self.train()

    def on_test_start(self) -> None:
        """Called before testing."""

    def on_test_end(self) -> None:
        """Called after testing, when its metrics are available."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch; may still log values."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each test batch."""

    def on_test_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each test batch; `outputs` is the result of `test_step`."""

    # -- predicting

    def on_predict_model_eval(self) -> None:
        """Set evaluation mode; called before `on_predict_start`."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Leave evaluation mode; called after predicting, only if overridden.

        By default, the Trainer restores the mode that each submodule had before.
        """
        self.train()

    def on_predict_start(self) -> None:
        """Called before predicting."""

    def on_predict_end(self) -> None:
        """Called after predicting."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each batch to predict."""

    def on_predict_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each batch to predict; `outputs` is the result of `predict_step`."""
