"""Run by test_uneven_evaluation.py: two ranks of ddp in evaluations of unusual lengths."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from stratagem import Module, Trainer
from stratagem.errors import StratagemError
from stratagem.strategies import DDPStrategy


class Net(Module):
    """Gathers each batch; what else it does is an argument."""

    def __init__(self, act: Callable[[Any, Tensor, int], Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.metric = torchmetrics.MeanMetric()
        self.act = act
        self.at_end: Callable[[Any], Any] | None = None
        self.gathered: list[list[float]] = []

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.act is not None:
            self.act(self, batch, batch_idx)
        else:
            self.gathered.append(self.all_gather(batch).flatten().tolist())
        self.log("mean", batch.mean(), sync_dist=True, on_step=True, on_epoch=True)

    def on_test_epoch_end(self) -> None:
        if self.at_end is not None:
            self.at_end(self)


class Streamed(IterableDataset[Tensor]):
    """A stream with a length of its own on each rank."""

    def __init__(self, samples: list[list[float]], claimed: int | None) -> None:
        self.samples, self.claimed = samples, claimed

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([each]) for each in self.samples[dist.get_rank()])


class Claiming(Streamed):
    """A stream that only estimates its length."""

    def __len__(self) -> int:
        assert self.claimed is not None
        return self.claimed


class Own(Sampler[int]):
    """A sampler that divides the data itself, so that rank 1 has more."""

    num_replicas = 2

    def __len__(self) -> int:
        return (1, 3)[dist.get_rank()]

    def __iter__(self) -> Iterator[int]:
        return iter(([0], [1, 2, 3])[dist.get_rank()])


def of(samples: int) -> Dataset[Tensor]:
    return torch.arange(1.0, samples + 1.0).reshape(-1, 1)  # type: ignore[return-value]


def main() -> None:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=100), logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    found: dict[str, Any] = {}

    def case(name: str, net: Net, loaders: Any) -> None:
        begun = time.monotonic()
        try:
            told: Any = trainer.test(net, loaders, verbose=False)
        except StratagemError as error:
            told = f"{type(error).__name__}: {error}"
        found[name] = [told, net.gathered, time.monotonic() - begun]

    def stream(*samples: list[float], claimed: int | None = None) -> Any:
        kind = Streamed if claimed is None else Claiming
        return DataLoader(kind(list(samples), claimed), 1)

    case("stream", Net(), stream([1.0, 2.0, 3.0], [4.0]))
    case("claimed", Net(), stream([1.0, 2.0, 3.0], [4.0], claimed=3))
    case("one stream", Net(), stream([], [4.0, 8.0]))
    case("no stream", Net(), stream([], []))
    case("limited", Net(), DataLoader(of(9), 2))
    case("own sampler", Net(), DataLoader(of(4), 1, sampler=Own()))
    case("list", Net(), [torch.ones(1, 1)] * (2 - trainer.global_rank))
    case("two", Net(), [DataLoader(of(8), 2), DataLoader(of(1), 2)])

    def broadcast(net: Net, batch: Tensor, batch_idx: int) -> None:
        net.trainer.ranks.broadcast("text", src=1)

    case("broadcast", Net(broadcast), DataLoader(of(9), 2))

    elsewhere = torchmetrics.MeanMetric()

    def log(net: Net, batch: Tensor, batch_idx: int) -> None:
        elsewhere.update(batch)
        net.log("metric", elsewhere)

    case("elsewhere", Net(log), DataLoader(of(1), 2))

    def update(net: Net, batch: Tensor, batch_idx: int) -> None:
        net.metric(batch)
        net.log("metric", net.metric, on_step=True, on_epoch=True)
        net.log("own", batch.sum(), sync_dist=False)

    case("metric", Net(update), DataLoader(of(1), 2))
    uneven = Net()
    uneven.at_end = lambda net: net.all_gather(torch.ones(2 - net.global_rank, 1))
    case("at the end", uneven, DataLoader(of(3), 2))
    Path(f"{trainer.global_rank}.json").write_text(json.dumps(found))
    if sys.argv[1:] != ["waits"]:
        return

    groups: list[Any] = []

    def wait(net: Net, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            groups.append(dist.group.WORLD)  # of all ranks, as long as all have a batch
        dist.all_reduce(batch.clone(), group=groups[0])

    begun = time.monotonic()
    try:
        trainer.test(Net(wait), DataLoader(of(9), 2), verbose=False)
    except StratagemError as error:
        told = [f"{type(error).__name__}: {error}", time.monotonic() - begun]
        Path(f"waited{trainer.global_rank}.json").write_text(json.dumps(told))
        raise


if __name__ == "__main__":
    main()
