"""MNIST by torchvision, with the loaders of each stage."""

from __future__ import annotations

import importlib
from typing import Any

from torch.utils.data import DataLoader, random_split

from stratagem.errors import ConfigurationError
from stratagem_lightning.api.core.datamodule import LightningDataModule


def MNIST(*args: Any, **kwargs: Any) -> Any:
    """Return torchvision's dataset; see there.

    Raises:
        ConfigurationError: torchvision is not installed.
    """
    return _torchvision("datasets").MNIST(*args, **kwargs)


def _torchvision(part: str) -> Any:
    try:
        return importlib.import_module(f"torchvision.{part}")
    except ImportError as error:
        raise ConfigurationError(
            "MNIST: expected torchvision to be installed: pip install torchvision"
        ) from error


class MNISTDataModule(LightningDataModule):
    """Loaders of MNIST for each stage.

    Args:
        data_dir: folder of the files, which are downloaded if missing.
        val_split: the number of pictures of the training data for validation.
        num_workers: the number of workers of each loader.
        normalize: normalize to mean 0 and standard deviation 1.
        seed: the seed of the split.
        batch_size: samples in a batch.
    """

    name = "mnist"

    def __init__(
        self,
        data_dir: str = "./data",
        val_split: int = 5000,
        num_workers: int = 0,
        normalize: bool = False,
        seed: int = 42,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.data_dir, self.val_split, self.num_workers = data_dir, val_split, num_workers
        self.normalize, self.seed, self.batch_size = normalize, seed, batch_size

    @property
    def num_classes(self) -> int:
        """Ten digits."""
        return 10

    @property
    def default_transforms(self) -> Any:
        """Return the transform from a picture to a tensor."""
        transforms = _torchvision("transforms")
        steps = [transforms.ToTensor()]
        if self.normalize:
            steps.append(transforms.Normalize((0.1307,), (0.3081,)))
        return transforms.Compose(steps)

    def prepare_data(self) -> None:
        """Download both parts."""
        for train in (True, False):
            MNIST(self.data_dir, train=train, download=True)

    def setup(self, stage: str) -> None:
        """Divide the training data, by the seed."""
        import torch

        whole = MNIST(self.data_dir, train=True, transform=self.default_transforms)
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [len(whole) - self.val_split, self.val_split]
        self.dataset_train, self.dataset_val = random_split(whole, sizes, generator=generator)

    def train_dataloader(self) -> Any:
        return self._loader(self.dataset_train, shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader(self.dataset_val)

    def test_dataloader(self) -> Any:
        test = MNIST(self.data_dir, train=False, transform=self.default_transforms)
        return self._loader(test)

    def _loader(self, dataset: Any, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            drop_last=True,
        )
