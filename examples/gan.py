"""Train a GAN: two networks, two optimizers, and steps that the Module takes itself.

    python examples/gan.py                                  # one process
    python examples/gan.py --devices 2                      # two processes
    python examples/gan.py --devices 2 --strategy fsdp

The data are points on a circle. The generator turns noise into points that the discriminator
cannot tell from them: their mean distance from the circle says how well.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer, seed_everything

NOISE = 8


def circle(count: int) -> Tensor:
    """Points on the circle of radius 1, a little blurred."""
    angles = 2 * math.pi * torch.rand(count)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.02 * torch.randn(count, 2)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
        nn.Linear(64, outputs),
    )  # fmt: skip


class GAN(Module):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        # Two losses pull in opposite directions, so no single `loss` can be returned: this Module
        # calls backward and the optimizers itself, and the strategy still does its part in each.
        self.automatic_optimization = False
        self.generator = network(NOISE, 2)
        self.discriminator = network(2, 1)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device))

        # Toggling freezes the other network, so that a backward reaches one network only.
        with self.toggled_optimizer(for_discriminator):
            scores = self.discriminator(torch.cat([real, fake.detach()]))
            labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            discriminator_loss = bce(scores, labels.to(self.device))
            for_discriminator.zero_grad()
            self.manual_backward(discriminator_loss)
            for_discriminator.step()

        with self.toggled_optimizer(for_generator):
            # "Real" is what the generator wants to hear; this loss does not vanish early on, as
            # that of `-bce(scores, 0)` would.
            generator_loss = bce(self.discriminator(fake), torch.ones_like(fake[:, :1]))
            for_generator.zero_grad()
            self.manual_backward(generator_loss)
            for_generator.step()

        losses = {"generator_loss": generator_loss, "discriminator_loss": discriminator_loss}
        self.log_dict(losses, prog_bar=True)

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        made = self.generator(batch[0])
        self.log("off_circle", (made.norm(dim=1) - 1).abs().mean())
        # A generator that has collapsed makes one point of the circle, far from the center.
        self.log("off_center", made.mean(0).norm())

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(each.parameters(), lr=self.lr, betas=(0.5, 0.999))
            for each in (self.generator, self.discriminator)
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    # A backward reaches one network only; DDP has to be told that this is meant.
    parser.add_argument("--strategy", default="ddp_find_unused_parameters_true")
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    seed_everything(1)
    train = DataLoader(TensorDataset(circle(2048)), batch_size=128 // options.devices, shuffle=True)
    noise = DataLoader(TensorDataset(torch.randn(512, NOISE)), batch_size=512)
    trainer = Trainer(strategy=options.strategy, devices=options.devices, max_epochs=options.epochs)
    model = GAN()
    before = trainer.validate(model, noise, verbose=False)[0]
    trainer.fit(model, train, noise)
    after = trainer.validate(model, noise, verbose=False)[0]
    for name in ("off_circle", "off_center"):
        trainer.print(f"{name}: {before[name]:.3f} before, {after[name]:.3f} after")


if __name__ == "__main__":
    main()
