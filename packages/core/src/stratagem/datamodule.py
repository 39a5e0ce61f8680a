"""DataModule: everything about the data of a run in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.callbacks.module_hooks import DataHooks

if TYPE_CHECKING:
    from stratagem.trainer import Trainer


class DataModule(DataHooks):
    """Prepares data and makes the loaders; a copy belongs to no Trainer.

    Call sequence:
        1. `prepare_data` on rank 0 of each node only: download, write to disk. Assign nothing.
        2. `setup(stage)` on every rank: read, split.
        3. The loader methods, on every rank, when they are needed.
        4. `on_before_batch_transfer`, `transfer_batch_to_device` and `on_after_batch_transfer` for
           each batch.
        5. `teardown(stage)` on every rank; `on_exception` where the run has failed.

    Example:
        >>> import torch
        >>> from stratagem import DataModule
        >>> class Ones(DataModule):
        ...     def train_dataloader(self):
        ...         return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
        >>> len(Ones().train_dataloader())
        2
    """

    trainer: Trainer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}

    def prepare_data(self) -> None:
        """Download and write to disk; on rank 0 of each node, before the others go on."""

    def setup(self, stage: str) -> None:
        """Read and split; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Release what `setup` took."""

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

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold; plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
