"""Small models and data, with which bugs are reported and tests written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from stratagem_lightning.api.core.datamodule import LightningDataModule
from stratagem_lightning.api.core.module import LightningModule

_FEATURES = 32
_SAMPLES = 64


class RandomDataset(Dataset[Tensor]):
    """Normally distributed samples.

    Args:
        size: features of each.
        length: how many.
    """

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(RandomDataset):
    """Such samples as `a`, with `b`, which is `a` and 2."""

    def __getitem__(self, index: int) -> Any:
        a = self.data[index]
        return {"a": a, "b": a + 2}


class RandomIterableDataset(IterableDataset[Tensor]):
    """Normally distributed samples without a length.

    Args:
        size: features of each.
        count: how many.
    """

    def __init__(self, size: int, count: int) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """The same, with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """A layer whose target output is ones, with every step and loader.

    Example:
        >>> from stratagem_lightning.api.demos.boring_classes import BoringModel
        >>> from stratagem_lightning.api.trainer import Trainer
        >>> options = dict(enable_progress_bar=False, enable_model_summary=False)
        >>> trainer = Trainer(accelerator="cpu", fast_dev_run=True, **options)
        >>> trainer.fit(BoringModel())
        >>> trainer.global_step
        1
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_FEATURES, 2)

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output: (batch, 2)."""
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared distance to the labels, or to ones."""
        return functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def _loader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(_FEATURES, _SAMPLES))

    def train_dataloader(self) -> Any:
        return self._loader()

    def val_dataloader(self) -> Any:
        return self._loader()

    def test_dataloader(self) -> Any:
        return self._loader()

    def predict_dataloader(self) -> Any:
        return self._loader()


class ManualOptimBoringModel(BoringModel):
    """The same by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class BoringDataModule(LightningDataModule):
    """A random dataset, with a quarter of the samples for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full: Any = self.make()

    def make(self) -> Any:
        """Return the whole dataset."""
        return RandomDataset(_FEATURES, _SAMPLES * 4)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.random_train = Subset(self.random_full, range(_SAMPLES))
        if stage in ("fit", "validate"):
            self.random_val = Subset(self.random_full, range(_SAMPLES, _SAMPLES * 2))
        if stage == "test":
            self.random_test = Subset(self.random_full, range(_SAMPLES * 2, _SAMPLES * 3))
        if stage == "predict":
            self.random_predict = Subset(self.random_full, range(_SAMPLES * 3, _SAMPLES * 4))

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class BoringDataModuleNoLen(LightningDataModule):
    """Random samples of a dataset without a length, for each stage."""

    def setup(self, stage: str) -> None:
        dataset = RandomIterableDataset(_FEATURES, _SAMPLES)
        if stage == "fit":
            self.random_train = dataset
        if stage in ("fit", "validate"):
            self.random_val = dataset
        if stage == "test":
            self.random_test = dataset
        if stage == "predict":
            self.random_predict = dataset

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class IterableBoringDataModule(LightningDataModule):
    """Two loaders for each stage: one of a dataset with a length, one without."""

    def setup(self, stage: str) -> None:
        sizes = {"train": 16, "val": 32, "test": 64, "predict": 64}
        stages = {"fit": ("train", "val"), "validate": ("val",)}.get(stage, (stage,))
        self.datasets = {
            name: [RandomDataset(4, sizes[name]), RandomIterableDataset(4, sizes[name])]
            for name in stages
        }

    def _loaders(self, name: str) -> list[DataLoader[Any]]:
        return [DataLoader(dataset) for dataset in self.datasets[name]]

    def train_dataloader(self) -> Any:
        return self._loaders("train")

    def val_dataloader(self) -> Any:
        return self._loaders("val")

    def test_dataloader(self) -> Any:
        return self._loaders("test")

    def predict_dataloader(self) -> Any:
        return self._loaders("predict")


class DemoModel(LightningModule):
    """A layer for MNIST's pictures.

    Args:
        out_dim: outputs.
        learning_rate: of Adam.
    """

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(_FEATURES, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return activations: (batch, out_dim)."""
        return torch.relu(self.l1(x.flatten(1)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Net(nn.Module):
    """A small convolutional network for MNIST's pictures; log probabilities of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.25), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return log probabilities: (batch, 10), of pictures: (batch, 1, 28, 28)."""
        return functional.log_softmax(self.classifier(self.features(x).flatten(1)), dim=1)
