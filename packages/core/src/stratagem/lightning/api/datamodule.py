"""LightningDataModule: a DataModule by Lightning's name."""

from __future__ import annotations

from stratagem.datamodule import DataModule


class LightningDataModule(DataModule):
    """A DataModule, under the name that Lightning has for it."""
