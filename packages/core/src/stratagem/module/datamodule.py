"""DataModule: everything about the data of a run in one place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from stratagem.discovery.absent import find_or_explain
from stratagem.module.hooks import DataHooks
from stratagem.module.hyperparameters import (
    HyperParametersMixin,
    accepted_by,
    arguments_from,
    read_checkpoint,
)

if TYPE_CHECKING:
    from stratagem.trainer import Trainer

DataModuleType = TypeVar("DataModuleType", bound="DataModule")


class DataModule(HyperParametersMixin, DataHooks):
    """Base class of data modules, which prepare data and create the loaders of a run.

    Call sequence:
        1. `prepare_data` on rank 0 of each node only: download, write to disk. It must not set
           attributes, since other ranks would not have them.
        2. `setup(stage)` on every rank: read and split the data.
        3. The loader methods, on every rank, when they are needed.
        4. `on_before_batch_transfer`, `transfer_batch_to_device` and `on_after_batch_transfer` for
           each batch.
        5. `teardown(stage)` on every rank; `on_exception` if the run failed.

    Copies and pickles of a DataModule are not attached to a Trainer.

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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return find_or_explain(self, name)

    def setup(self, stage: str) -> None:
        """Read and split the data; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Release the resources that `setup` acquired."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, as weights-only-safe data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a `state_dict`."""

    # -- alternative constructors

    @classmethod
    def load_from_checkpoint(
        cls: type[DataModuleType], checkpoint_path: str | Path, **kwargs: Any
    ) -> DataModuleType:
        """Create a DataModule from a Trainer's checkpoint, with its hyperparameters and state.

        Args:
            checkpoint_path: a Trainer's checkpoint, as a local path or a URL.
            **kwargs: arguments of `__init__`; these replace saved hyperparameters.

        Raises:
            CheckpointNotFoundError: if the path does not exist.
            CheckpointCorruptError: if the file is damaged.
            CheckpointMismatchError: if the checkpoint does not fit the class.
        """
        from stratagem.errors import naming

        checkpoint = read_checkpoint(checkpoint_path)
        with naming(checkpoint_path):
            module = cls(**arguments_from(cls, checkpoint, "datamodule_", kwargs))
        if "datamodule" in checkpoint:
            module.load_state_dict(checkpoint["datamodule"])
        return module

    @classmethod
    def from_datasets(
        cls: type[DataModuleType],
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> DataModuleType:
        """Create a DataModule from datasets.

        Args:
            train_dataset, val_dataset, test_dataset, predict_dataset: a dataset, or a list or dict
                of datasets, with a loader for each. None: no loader.
            batch_size, num_workers: options of every loader. The training loader shuffles map-style
                datasets.
            **kwargs: arguments of `__init__`.

        Example:
            >>> from stratagem import DataModule
            >>> data = DataModule.from_datasets(train_dataset=range(8), batch_size=4)
            >>> len(data.train_dataloader())
            2
        """
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        module = cls(**accepted_by(cls, sizes), **kwargs)
        datasets = {
            "train": train_dataset,
            "val": val_dataset,
            "test": test_dataset,
            "predict": predict_dataset,
        }
        for name, data in datasets.items():
            if data is not None:
                loaders = partial(_loaders_of, data, shuffles=name == "train", **sizes)
                setattr(module, f"{name}_dataloader", loaders)
        return module


def _loaders_of(data: Any, *, shuffles: bool, **options: Any) -> Any:
    if isinstance(data, Mapping):
        return {n: _loaders_of(one, shuffles=shuffles, **options) for n, one in data.items()}
    if isinstance(data, (list, tuple)):
        return [_loaders_of(one, shuffles=shuffles, **options) for one in data]
    shuffles = shuffles and not isinstance(data, IterableDataset)
    return DataLoader(data, shuffle=shuffles, **options)
