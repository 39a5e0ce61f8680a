"""LightningDataModule: a DataModule by Lightning's name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from stratagem.module import DataModule
from stratagem_lightning.api.core.hparams import HyperparametersMixin
from stratagem_lightning.api.core.saving import of_file

DataModuleType = TypeVar("DataModuleType", bound="LightningDataModule")


class LightningDataModule(HyperparametersMixin, DataModule):
    """A DataModule, under the name that Lightning has for it.

    Its text says how many samples its loaders have.
    """

    name: str | None = None
    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    @classmethod
    def load_from_checkpoint(
        cls: type[DataModuleType],
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> DataModuleType:
        """Create a DataModule from a checkpoint; see `DataModule.load_from_checkpoint`.

        Args:
            checkpoint_path, **kwargs: see `DataModule.load_from_checkpoint`.
            map_location: ignored: a DataModule has no device.
            hparams_file: a YAML file with values that override the values of the checkpoint.
            weights_only: ignored: loading never executes code from a checkpoint.
        """
        return super().load_from_checkpoint(checkpoint_path, **of_file(hparams_file), **kwargs)

    def __str__(self) -> str:
        lines = []
        for name in ("train", "val", "test", "predict"):
            shown = {"val": "Validation"}.get(name, name.capitalize())
            lines.append(f"{{{shown} dataloader: {self._sizes(name)}}}")
        return os.linesep.join(lines)

    def _sizes(self, name: str) -> str:
        method = getattr(self, f"{name}_dataloader")
        if getattr(method, "__func__", None) is getattr(DataModule, f"{name}_dataloader"):
            return "None"
        try:
            loaders = method()
        except Exception:  # nothing is set up yet
            return "None"
        if loaders is None:
            return "None"
        several = loaders.values() if isinstance(loaders, dict) else loaders
        if not isinstance(loaders, (dict, list, tuple)):
            return f"size={_size(loaders)}"
        return " ; ".join(f"{i}. size={_size(one)}" for i, one in enumerate(several, start=1))


def _size(loader: Any) -> str:
    try:
        return str(len(getattr(loader, "dataset", loader)))
    except TypeError:
        return "NA"
