"""Train a diffusion model (DDPM) to draw two half-moons out of noise.

    python examples/diffusion.py                            # one process
    python examples/diffusion.py --devices 2                # two processes
    python examples/diffusion.py --devices 2 --strategy fsdp

The data are scikit-learn's moons. A network learns which noise was added to a point; from pure
noise it then takes its guess away, a little at a time (Ho et al., NeurIPS 2020).
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer, seed_everything

TIMES = 50


def moons(count: int, seed: int) -> Tensor:
    points, _ = make_moons(count, noise=0.03, random_state=seed)
    return torch.tensor(points, dtype=torch.float32) - torch.tensor([0.5, 0.25])


class Diffusion(Module):
    def __init__(self, width: int = 128, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.time = nn.Embedding(TIMES, width)
        self.point = nn.Linear(2, width)
        self.layers = nn.Sequential(
            nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, 2),
        )  # fmt: skip
        beta = torch.linspace(1e-4, 0.15, TIMES)
        # Buffers move to the device with the model. No checkpoint needs these: they are constants.
        self.register_buffer("beta", beta, persistent=False)
        self.register_buffer("kept", (1 - beta).cumprod(0), persistent=False)

    def forward(self, points: Tensor, times: Tensor) -> Tensor:
        noise: Tensor = self.layers(self.point(points) + self.time(times))
        return noise

    def loss(self, points: Tensor) -> Tensor:
        times = torch.randint(TIMES, (len(points),), device=self.device)
        noise = torch.randn_like(points)
        # Any number of steps of noise is one step of more noise: no loop while training.
        kept = self.kept[times, None]  # type: ignore[index]  # a buffer
        return mse_loss(self(kept.sqrt() * points + (1 - kept).sqrt() * noise, times), noise)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]))

    def test_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        """How far drawn points are from the nearest of the data."""
        drawn = self.draw(len(batch[0]))
        self.log("distance", torch.cdist(drawn, batch[0]).min(1).values.mean())

    def draw(self, count: int) -> Tensor:
        points = torch.randn(count, 2, device=self.device)
        for time in reversed(range(TIMES)):
            beta, kept = self.beta[time], self.kept[time]  # type: ignore[index]  # buffers
            noise = self(points, torch.full((count,), time, device=self.device))
            points = (points - beta / (1 - kept).sqrt() * noise) / (1 - beta).sqrt()
            if time:  # the last step is the answer
                points = points + beta.sqrt() * torch.randn_like(points)
        return points

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=25)
    options = parser.parse_args()
    seed_everything(1)
    train = DataLoader(TensorDataset(moons(4096, seed=1)), batch_size=256, shuffle=True)
    val = DataLoader(TensorDataset(moons(1024, seed=2)), batch_size=1024)
    trainer = Trainer(strategy=options.strategy, devices=options.devices, max_epochs=options.epochs)
    model = Diffusion()
    before = trainer.validate(model, val, verbose=False) + trainer.test(model, val, verbose=False)
    trainer.fit(model, train, val)
    after = trainer.validate(model, val, verbose=False) + trainer.test(model, val, verbose=False)
    trainer.print(f"val_loss: {before[0]['val_loss']:.3f} before, {after[0]['val_loss']:.3f} after")
    trainer.print(f"distance: {before[1]['distance']:.3f} before, {after[1]['distance']:.3f} after")


if __name__ == "__main__":
    main()
