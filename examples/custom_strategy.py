"""A strategy of your own: ranks train alone and average their weights now and then (local SGD).

    python examples/custom_strategy.py                      # two processes
    python examples/custom_strategy.py --every 1            # an average after each step
    python examples/custom_strategy.py --strategy ddp       # another strategy, the same script

A name makes it a strategy like any other: Trainer, Lite, checkpoints and errors know it. To publish
one with tests, begin with `stratagem new-backend my_strategy` (docs/extend/write-a-strategy.md).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, random_split

from stratagem import Module, StrategyRegistry, Trainer, seed_everything
from stratagem.strategies import Capabilities, ParallelStrategy, PreparedModel

Batch = tuple[Tensor, ...]


class LocalSGDStrategy(ParallelStrategy):
    """One replica on each rank; `ParallelStrategy` starts the processes and joins them.

    Args:
        every: optimizer steps between two averages.
    """

    # Said in advance, so that a run that cannot work is refused before a process starts.
    capabilities = Capabilities.parallel(parameters="drift")

    def __init__(self, *, every: int = 8, **components: Any) -> None:
        super().__init__(**components)
        self.every = every

    def wrap(self, module: nn.Module) -> nn.Module:
        """Begin with the same weights everywhere."""
        module.load_state_dict(self.ranks.broadcast(module.state_dict()))
        return module

    def optimizer_step(self, prepared: PreparedModel, optimizer: Optimizer, *closure: Any) -> Any:
        """Step with this rank's gradients; no rank waits for another, but for every n-th step."""
        result = super().optimizer_step(prepared, optimizer, *closure)
        steps = prepared.strategy_data.setdefault("steps", Counter())
        steps[optimizer] += 1
        if steps[optimizer] % self.every == 0:
            self.average(held_by(prepared))
        return result

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        """Evaluate the average, then give each rank its own weights back."""
        own = [(each, each.detach().clone()) for each in held_by(prepared)]
        self.average(held_by(prepared))
        try:
            yield
        finally:
            with torch.no_grad():
                for each, before in own:
                    each.copy_(before)

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Save the average, and go on from it: a resumed run begins there, too."""
        self.average(held_by(prepared))
        return super().model_state(prepared)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Save the average of what the ranks' optimizers hold, such as momentum."""
        states = optimizer.state.values()
        self.average(v for state in states for v in state.values() if isinstance(v, Tensor))
        return super().optimizer_state(prepared, optimizer)

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Save when the next average is due."""
        return {"steps": [prepared.strategy_data.get("steps", {}).get(o, 0) for o in optimizers]}

    def load_state(self, prepared: PreparedModel, optimizers: Any, state: Any) -> None:
        """Restore when the next average is due."""
        prepared.strategy_data["steps"] = Counter(
            dict(zip(optimizers, state["steps"], strict=True))
        )

    @torch.no_grad()
    def average(self, values: Iterable[Tensor]) -> None:
        """Give all ranks the mean of their values; of whole numbers, rank 0's."""
        for value in values:
            is_number = value.is_floating_point() or value.is_complex()
            value.copy_((self.ranks.all_reduce if is_number else self.ranks.broadcast)(value))


def held_by(prepared: PreparedModel) -> list[Tensor]:
    return [*prepared.original.parameters(), *prepared.original.buffers()]


class Classifier(Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_acc", (self.layers(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"devices": 2, "epochs": 6, "every": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", default="local_sgd")
    options = parser.parse_args()
    StrategyRegistry.register("local_sgd", LocalSGDStrategy, every=options.every)
    seed_everything(1)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = TensorDataset((images / 16).float(), labels)
    train, val = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    judge = DataLoader(val, batch_size=64)
    trainer = Trainer(strategy=options.strategy, devices=options.devices, max_epochs=options.epochs)
    trainer.fit(model := Classifier(), DataLoader(train, batch_size=16, shuffle=True), judge)
    found = trainer.validate(model, judge, verbose=False)[0]
    trainer.print(f"{options.strategy}: val_acc: {found['val_acc']:.3f}")


if __name__ == "__main__":
    main()
