"""The hooks that a Module and a DataModule have: the base of each does nothing.

So an override may call `super().on_train_start()`, as cooperating base classes do. A base's own
hooks are never collected (`trainer/hooks.py`), so that they cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from stratagem.data.pytree import move_to_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer


class DataHooks:
    """What happens to a batch on its way to the device; of a Module or a DataModule.

    Called for each batch in the order in which they stand here, once the strategy's ranks have
    divided the data. Where both override one, the DataModule's is called. `dataloader_idx` is the
    evaluation loader's; 0 in training.
    """

    prepare_data_per_node: bool = True
    """`prepare_data` is called on rank 0 of each node; False: on rank 0 of all only."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return what is to be moved, from what the loader yielded."""
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Return the batch on a device; for batches whose tensors are not found in them."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return what the step is given, from what is on the device by now."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Called when a run ends by an exception, before it is raised further."""


class ModuleHooks(DataHooks, nn.Module):
    """The hooks of `Callback` as a Module has them: without their first two arguments."""

    def setup(self, stage: str) -> None:
        """Called before anything else; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called after everything else."""

    def on_fit_start(self) -> None:
        """Called when the model is prepared and a checkpoint, if any, is loaded."""

    def on_fit_end(self) -> None:
        """Called when fit ends without an exception."""

    def on_sanity_check_start(self) -> None:
        """Called before the validation batches that are run before training."""

    def on_sanity_check_end(self) -> None:
        """Called after them."""

    # -- training

    def on_train_start(self) -> None:
        """Called before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before each epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after each epoch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before each training batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each training batch; `outputs` is a dict with the key "loss"."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before each backward."""

    def on_after_backward(self) -> None:
        """Called after each backward."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called when all gradients are there, before they are clipped."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called after the optimizer step, before gradients are cleared."""

    # -- validation

    def on_validation_model_zero_grad(self) -> None:
        """Called before validation within a fit: to free what gradients are kept by then."""

    def on_validation_model_eval(self) -> None:
        """Set evaluation mode; called before `on_validation_start`."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Leave evaluation mode; if overridden, in the place of what is done after validation.

        That gives every submodule the mode back that it had before.
        """
        self.train()

    def on_validation_start(self) -> None:
        """Called before validation."""

    def on_validation_end(self) -> None:
        """Called after validation, when its values are there."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch; values may still be logged."""

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each validation batch, with what `validation_step` returned."""

    # -- testing

    def on_test_model_eval(self) -> None:
        """Set evaluation mode; called before `on_test_start`."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Leave evaluation mode; if overridden, in the place of what is done after testing.

        That gives every submodule the mode back that it had before.
        """
        self.train()

    def on_test_start(self) -> None:
        """Called before testing."""

    def on_test_end(self) -> None:
        """Called after testing, when its values are there."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch; values may still be logged."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each test batch."""

    def on_test_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each test batch, with what `test_step` returned."""

    # -- predicting

    def on_predict_model_eval(self) -> None:
        """Set evaluation mode; called before `on_predict_start`."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Leave evaluation mode; if overridden, in the place of what is done after predicting.

        That gives every submodule the mode back that it had before.
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
        """Called after each batch to predict, with what `predict_step` returned."""
