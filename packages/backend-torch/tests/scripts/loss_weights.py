"""Trains with losses that are means over different numbers of tokens; writes the weights.

python loss_weights.py STRATEGY RANKS ACCUMULATE
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from stratagem import Lite, Module, Trainer
from stratagem.checkpoint import consolidate_checkpoint
from stratagem.strategies import ModelParallelStrategy

EPOCHS, BATCHES, WORDS = 2, 12, 7
IGNORED = -100


def batches() -> list[tuple[Tensor, Tensor]]:
    """Batches with 0 to 10 valid tokens; two neighbours have none."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(BATCHES):
        tokens = torch.randint(WORDS, (2, 5), generator=generator)
        labels = tokens.roll(1, 0).clone()
        valid = torch.rand(labels.shape, generator=generator) < index / BATCHES
        found.append((tokens, labels.where(valid, torch.tensor(IGNORED))))
    found[5] = (found[5][0], torch.full_like(found[5][1], IGNORED))
    return found


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        # A copy: FSDP2 warns about views.
        return self.head(self.words(tokens.flatten()).tanh()).clone()

    def loss_weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != IGNORED).sum()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = cross_entropy(self(tokens), labels.flatten(), ignore_index=IGNORED)
        self.log("loss", loss, on_epoch=True, batch_size=int((labels != IGNORED).sum()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def in_pairs(model: nn.Module, mesh: Any) -> None:
    """Divide the layer at the end over the ranks of a tensor-parallel pair."""
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tensor_parallel"], plan)


def flat(state: dict[str, Any]) -> list[float]:
    return [number for name in sorted(state) for number in state[name].flatten().tolist()]


def reference(parts: int, accumulate: int) -> list[float]:
    """Train one process on the mean over all tokens of each step."""
    net = Net()
    optimizer, size = net.configure_optimizers(), parts * accumulate
    for _ in range(EPOCHS):
        for first in range(0, BATCHES, size):
            tokens, labels = map(torch.cat, zip(*batches()[first : first + size], strict=True))
            loss = cross_entropy(net(tokens), labels.flatten(), ignore_index=IGNORED)
            loss.nan_to_num().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return flat(net.state_dict())


def trained(strategy: Any, ranks: int, accumulate: int) -> list[float]:
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = batches()
    trainer.fit(Net(), DataLoader(data, batch_size=None))
    assert torch.isfinite(trainer.callback_metrics["loss_epoch"])
    trainer.save_checkpoint("trainer.ckpt")
    if trainer.is_global_zero and Path("trainer.ckpt").is_dir():
        consolidate_checkpoint("trainer.ckpt", "one.ckpt")
    trainer.strategy.barrier()
    file = "one.ckpt" if Path("one.ckpt").exists() else "trainer.ckpt"
    return flat(torch.load(file, weights_only=True)["state_dict"])


def looped(strategy: Any, ranks: int, accumulate: int) -> list[float]:
    lite = Lite(accelerator="cpu", strategy=strategy, devices=ranks)
    lite.launch()
    net = Net()
    model, optimizer = lite.setup(net, net.configure_optimizers())
    data: Any = batches()
    loader = lite.setup_dataloaders(DataLoader(data, batch_size=None))
    for _ in range(EPOCHS):
        own = iter(loader)
        while step := list(islice(own, accumulate)):
            factors = lite.loss_factors([int(net.loss_weight(batch)) for batch in step])
            for index, ((tokens, labels), factor) in enumerate(zip(step, factors, strict=True), 1):
                with lite.no_backward_sync(model, enabled=index < len(step)):
                    loss = cross_entropy(model(tokens), labels.flatten(), ignore_index=IGNORED)
                    lite.backward(loss.nan_to_num() * factor)
            lite.clip_gradients(model, optimizer, max_norm=0.3)
            optimizer.step()
            optimizer.zero_grad()
    lite.save("lite.ckpt", {"net": model})
    return flat(torch.load("lite.ckpt", weights_only=True)["net"])


def main(strategy: str, ranks: int, accumulate: int) -> None:
    made: Any = strategy
    parts = ranks
    if strategy == "model_parallel":
        parts = ranks // 2
        made = ModelParallelStrategy(tensor_parallel_size=2, parallelize_fn=in_pairs)
    found = {
        "reference": reference(parts, accumulate),
        "trainer": trained(made, ranks, accumulate),
    }
    if not strategy.startswith("deepspeed"):  # it clips in its own step
        found["lite"] = looped(made, ranks, accumulate)
    Path("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
