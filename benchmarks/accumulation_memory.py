"""Memory that gradient accumulation takes: a step over 64 batches of 10 MB beside one over 1.

    python benchmarks/accumulation_memory.py [--accumulate 1 64] [--mb 10]

Each variant runs in a process of its own, on the CPU with one thread, with a linear model of 8
outputs. Printed is the largest memory (ru_maxrss) of the process during training above that before
the first batch was made. The loader of "iterable" has no length that can be relied on, so that the
batches of a step are read before it.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

STEPS = 3


class Batches(Dataset[Tensor]):
    """Batches that are made when they are read."""

    def __init__(self, count: int, megabytes: float) -> None:
        self.count = count
        self.rows = int(megabytes * 2**20 / (4 * 1024))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.rows, 1024), float(index))


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return (self.batches[index] for index in range(len(self.batches)))


def peak() -> float:
    """Return this process's largest memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def raw(loader: DataLoader[Tensor], accumulate: int) -> None:
    model = nn.Linear(1024, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for index, batch in enumerate(loader, 1):
        (model(batch).mean() / accumulate).backward()
        if index % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def trainer(loader: DataLoader[Tensor], accumulate: int) -> None:
    from stratagem import Module, Trainer

    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1024, 8)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Net(), loader)


def measure(variant: str, accumulate: int, megabytes: int) -> float:
    """In a process of its own: train, and return the memory above the start in MB."""
    import stratagem.trainer.trainer  # noqa: F401 - what it takes itself is no part of a step

    torch.set_num_threads(1)
    run = raw if variant == "raw PyTorch" else trainer
    # What a first step loads (torch._dynamo, kernels), with batches of next to nothing.
    run(DataLoader(Batches(2, 0.02), batch_size=None), 2)
    batches = Batches(STEPS * accumulate, megabytes)
    data = Stream(batches) if variant == "Trainer, iterable" else batches
    before = peak()
    run(DataLoader(data, batch_size=None), accumulate)
    return peak() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--mb", type=int, default=10, help="size of a batch")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(measure(arguments.measure, arguments.accumulate[0], arguments.mb))
        return
    counts = arguments.accumulate
    print("| MB above the start, batches in a step | " + " | ".join(map(str, counts)) + " |")
    print("|---" * (len(counts) + 1) + "|")
    for variant in ("raw PyTorch", "Trainer", "Trainer, iterable"):
        cells = []
        for count in counts:
            command = [sys.executable, __file__, "--measure", variant, "--mb", str(arguments.mb)]
            done = subprocess.run(
                [*command, "--accumulate", str(count)], capture_output=True, text=True, check=True
            )
            cells.append(f"{float(done.stdout.split()[-1]):.0f}")
        print(f"| {variant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
