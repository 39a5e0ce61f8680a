"""The data, models and callbacks of drawn configurations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from case import Case
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchmetrics import MeanMetric
from torchmetrics.aggregation import RunningMean

from stratagem import Callback, Module
from stratagem.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from stratagem.data import CombinedLoader

BATCH = 2
WIDTH = 4


class Samples(Dataset[Tensor]):
    """Samples with noise from three sources of random numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return torch.full((WIDTH,), index / self.size) + 0.1 * noise


class OwnOrder(Sampler[int]):
    """Draws an epoch's order at once, from a generator of its own or Python's."""

    def __init__(self, size: int, numbers: random.Random | None) -> None:
        self.size, self.numbers = size, numbers

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        (self.numbers or random).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.size


class Stateful(IterableDataset[Tensor]):
    """Draws its samples; goes on by its own state."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.position = self.loaded = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.loaded = self.loaded, 0
        while self.position < self.size:
            self.position += 1
            yield torch.full((WIDTH,), self.position / self.size) + 0.1 * torch.rand(())

    def __len__(self) -> int:
        return self.size

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]


def training_data(case: Case) -> Any:
    """Return loaders of `case.batches` batches on each rank."""
    size = BATCH * case.batches - case.short
    whole = size * case.ranks
    samples = Samples(whole)
    generator = torch.Generator().manual_seed(5)

    def loader(**options: Any) -> DataLoader[Any]:
        return DataLoader(samples, **{"batch_size": BATCH, **options})

    match case.data:
        case "workers":
            return loader(shuffle=True, num_workers=1)
        case "generator":
            return loader(shuffle=True, generator=generator)
        case "weighted":
            weights = list(range(1, whole + 1))
            return loader(sampler=WeightedRandomSampler(weights, whole))
        case "replacement":
            return loader(sampler=RandomSampler(samples, replacement=True, generator=generator))
        case "batch sampler":
            batches = BatchSampler(RandomSampler(samples), BATCH, drop_last=False)
            return DataLoader(samples, batch_sampler=batches)
        case "in order":
            return loader()
        case "own sampler":
            return loader(sampler=OwnOrder(whole, None))
        case "own generator":
            return loader(sampler=OwnOrder(whole, random.Random(5)))
        case "stateful":
            return DataLoader(Stateful(size), batch_size=BATCH)
        case "two loaders" if case.front == "trainer":
            return CombinedLoader([loader(shuffle=True), loader()], "max_size")
    return loader(shuffle=True)


class Net(Module):
    """Logs in many ways, and draws random numbers in training and validation."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(6) if case.batch_norm else nn.LayerNorm(6)
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 6), norm, nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(6, 1)
        self.metric, self.running = MeanMetric(), RunningMean(window=3)
        self.numbers = torch.Generator().manual_seed(11)
        self.case = case
        self.automatic_optimization = case.optimizer != "manual"
        self.losses: list[str] = []
        self.epochs: list[Any] = []

    def forward(self, samples: Tensor) -> Tensor:
        output: Tensor = self.head(self.backbone(samples))
        return output

    def loss(self, batch: Any) -> Tensor:
        samples = torch.cat(list(batch)) if isinstance(batch, (list, tuple)) else batch
        samples = samples.to(self.head.weight.dtype)
        own = float(torch.rand((), generator=self.numbers))
        noise = random.random() + float(np.random.rand()) + own
        error: Tensor = self(samples).float() - 1
        return error.square().mean() + 0.01 * noise

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.automatic_optimization:
            optimizers = self.optimizers()
            for optimizer in optimizers:
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
        else:
            loss = self.loss(batch)
        self.losses.append(float(loss.detach()).hex())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", loss, on_step=False, on_epoch=True, batch_size=BATCH)
        self.log("sum", float(loss.detach()), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("max", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("own", loss, on_step=False, on_epoch=True, sync_dist=False)
        self.metric.update(loss.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.running.update(loss.detach())
        self.log("running", self.running.compute())
        self.trainer.should_stop |= self.global_step + 1 == self.case.stops_at
        return loss if self.automatic_optimization else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch) + torch.rand(())
        self.log("val", loss, sync_dist=True)
        self.log("of_batch", loss, on_step=True, on_epoch=False)

    def on_train_epoch_end(self) -> None:
        values = self.trainer.callback_metrics
        self.epochs.append(
            [self.global_step, {name: float(value).hex() for name, value in sorted(values.items())}]
        )

    def configure_optimizers(self) -> Any:
        return optimizers_of(self.case, self)


def optimizers_of(case: Case, net: nn.Module) -> Any:
    """Return optimizers and schedulers."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    if "finetuning" in case.callbacks:
        parameters = list(net.head.parameters())  # type: ignore[union-attr]
    match case.optimizer:
        case "manual":
            both = (net.backbone, net.head)
            made = [torch.optim.SGD(part.parameters(), 0.05, 0.9) for part in both]  # type: ignore[union-attr]
            return made, [scheduler_of(case, optimizer) for optimizer in made][
                : 0 if case.scheduler == "none" else None
            ]
        case "lbfgs":
            optimizer: Any = torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
        case "sgd":
            optimizer = torch.optim.SGD(parameters, 0.05, 0.9)
        case "groups":
            half = len(parameters) // 2
            groups: Any = [{"params": parameters[:half], "lr": 0.02}, {"params": parameters[half:]}]
            optimizer = torch.optim.AdamW(groups, lr=0.01)
        case _:
            optimizer = torch.optim.Adam(parameters, lr=0.02)
    return [optimizer], [] if case.scheduler == "none" else [scheduler_of(case, optimizer)]


def scheduler_of(case: Case, optimizer: Any) -> dict[str, Any]:
    """Return the configuration of a scheduler."""
    by_steps: dict[str, Any] = {"interval": "step", "frequency": case.frequency}
    match case.scheduler:
        case "by steps":
            return {"scheduler": lr_scheduler.StepLR(optimizer, 3, 0.8), **by_steps}
        case "one cycle":
            cycle = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
            return {"scheduler": cycle, "interval": "step"}
        case "cosine":
            return {"scheduler": lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)}
        case "sequential":
            first = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
            parts = [first, lr_scheduler.ExponentialLR(optimizer, 0.9)]
            return {"scheduler": lr_scheduler.SequentialLR(optimizer, parts, [4]), **by_steps}
        case "plateau" | "plateau by steps":
            plateau = lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=0.02, factor=0.7
            )
            steps = by_steps if case.scheduler == "plateau by steps" else {}
            # A value of the epoch is there from its end on.
            return {"scheduler": plateau, "monitor": case.monitor, "strict": False, **steps}
    return {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.7)}


def callbacks_of(case: Case, folder: Path) -> list[Callback]:
    """Return the built-in callbacks of the case."""
    makers: dict[str, Any] = {
        "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
        "ema": lambda: EMAWeightAveraging(decay=0.7),
        "swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=2),
        "finetuning": lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False),
        "pruning": lambda: ModelPruning("l1_unstructured", amount=0.2),
        "early": lambda: EarlyStopping(case.monitor, patience=1, strict=False),
        "learning rates": LearningRateMonitor,
        "timer": lambda: Timer("00:01:00:00"),
        "device": DeviceStatsMonitor,
        "throughput": lambda: ThroughputMonitor(batch_size_fn=lambda batch: BATCH, window_size=3),
        "exception": lambda: OnExceptionCheckpoint(folder / "failed"),
        "lambda": lambda: LambdaCallback(
            on_train_batch_end=lambda trainer, module, *_: module.log("drawn", torch.rand(()))
        ),
    }
    best = ModelCheckpoint(folder / "best", monitor=case.monitor, filename="{step}", **case.best)
    return [*(makers[name]() for name in case.callbacks), best]
