"""Reinforcement learning: balance a pole on a cart, by policy gradients (REINFORCE).

    python examples/reinforcement.py                        # one process
    python examples/reinforcement.py --devices 2            # two processes, each plays its episodes
    python examples/reinforcement.py --devices 2 --strategy fsdp

The environment is below: the classic cart-pole, for many episodes at once. A sample of the data set
is the seed of an episode. Ranks therefore divide the episodes as they would divide images.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer, seed_everything

LONGEST = 100


class CartPoles:
    """Carts with a pole; state: position, speed, angle, angular speed (Barto et al., 1983)."""

    def __init__(self, seeds: Tensor) -> None:
        starts = [torch.rand(4, generator=torch.Generator().manual_seed(int(s))) for s in seeds]
        self.state = 0.1 * torch.stack(starts).to(seeds.device) - 0.05
        self.up = torch.ones(len(seeds), dtype=torch.bool, device=seeds.device)

    def push(self, right: Tensor) -> Tensor:
        """Push carts to the right or left for 0.02 s; return the rewards: 1 while a pole is up."""
        _, speed, angle, turning = self.state.unbind(1)
        force = 20.0 * right - 10.0
        push = (force + 0.05 * turning**2 * angle.sin()) / 1.1
        lever = 0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1)
        spin = (9.8 * angle.sin() - angle.cos() * push) / lever
        pushed = push - 0.05 * spin * angle.cos() / 1.1
        change = torch.stack([speed, pushed, turning, spin], 1)
        self.state = self.state + 0.02 * change
        self.up = self.up & (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < 0.21)
        return self.up.float()


class Policy(Module):
    def __init__(self, lr: float = 1e-2, discount: float = 0.98) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.discount = lr, discount
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def play(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Play episodes; return log-probabilities of the pushes, and rewards: (time, episode)."""
        carts, chances, rewards = CartPoles(seeds), [], []
        for _ in range(LONGEST):
            chance = self.layers(carts.state).squeeze(1).sigmoid()
            right = chance.bernoulli()
            taken = torch.where(right.bool(), chance, 1 - chance)
            chances.append(taken.log() * carts.up)  # a cart that fell is pushed in vain
            rewards.append(carts.push(right))
        return torch.stack(chances), torch.stack(rewards)

    def training_step(self, seeds: Tensor, batch_idx: int) -> Tensor:
        chances, rewards = self.play(seeds)
        # A push is worth what follows it, later rewards less; never what came before it.
        worth, later = torch.empty_like(rewards), torch.zeros_like(rewards[0])
        for time in reversed(range(LONGEST)):
            later = worth[time] = rewards[time] + self.discount * later
        # Compared with the other episodes: with rewards that are all positive, any push looks good.
        worth = (worth - worth.mean(1, keepdim=True)) / (worth.std() + 1e-6)
        self.log("train_length", rewards.sum(0).mean(), prog_bar=True)
        return -(chances * worth).sum(0).mean()

    def validation_step(self, seeds: Tensor, batch_idx: int) -> None:
        self.log("length", self.play(seeds)[1].sum(0).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    seed_everything(1)
    seeds: Any = range(options.steps * 32 + 64)
    train = DataLoader(seeds[:-64], batch_size=32 // options.devices)
    val = DataLoader(seeds[-64:], batch_size=64)
    trainer = Trainer(
        strategy=options.strategy,
        devices=options.devices,
        max_steps=options.steps,
        gradient_clip_val=1.0,
    )
    policy = Policy()
    before = trainer.validate(policy, val, verbose=False)[0]["length"]
    trainer.fit(policy, train, val)
    after = trainer.validate(policy, val, verbose=False)[0]["length"]
    trainer.print(f"length: {before:.1f} before, {after:.1f} after, of {LONGEST}")


if __name__ == "__main__":
    main()
