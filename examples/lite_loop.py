"""A training loop of your own with Lite: any strategy, and the loop stays as you wrote it.

    python examples/lite_loop.py                            # one process
    python examples/lite_loop.py --devices 2                # two processes
    python examples/lite_loop.py --devices 2 --strategy fsdp
    python examples/lite_loop.py --epochs 12                # goes on from the checkpoint

Six calls are all that differs from plain PyTorch; each is marked below with (n).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, seed_everything


def loaders() -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data, cut = (images / 16).float(), 1400
    train = TensorDataset(data[:cut], labels[:cut])
    val = TensorDataset(data[cut:], labels[cut:])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--checkpoint", type=Path, default=Path("lite_loop.ckpt"))
    options = parser.parse_args()

    # (1) Starts the other processes: from here on, every rank runs this script.
    lite = Lite(strategy=options.strategy, devices=options.devices)
    lite.launch()
    seed_everything(1)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # (2) Moves the model to the device and wraps it, as the strategy wants it.
    model, optimizer = lite.setup(model, optimizer)
    # (3) Each rank reads its part, on its device.
    train, val = lite.setup_dataloaders(*loaders())

    state = {"model": model, "optimizer": optimizer, "train": train, "epoch": 0}
    if options.checkpoint.exists():
        # (4) Fills the objects in `state`, and the random numbers: the run goes on bit for bit.
        lite.load(options.checkpoint, state)
        lite.print(f"resumed after epoch {state['epoch'] - 1}")

    for epoch in range(state["epoch"], options.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            lite.backward(loss)  # (5) Instead of loss.backward(): scales, and averages over ranks.
            optimizer.step()

        model.eval()
        right = total = 0
        for images, labels in val:
            with torch.no_grad():
                scores = model(images)
            # (6) Of all ranks, without the samples that were repeated to fill a rank's last batch.
            scores, labels = lite.gather_for_metrics((scores, labels))
            right += int((scores.argmax(1) == labels).sum())
            total += len(labels)
        lite.print(f"epoch {epoch}: loss {loss.item():.3f}, val_acc {right / total:.3f}")
        # Every rank calls it, since under some strategies each has a part of the model.
        lite.save(options.checkpoint, {**state, "epoch": epoch + 1})


if __name__ == "__main__":
    main()
