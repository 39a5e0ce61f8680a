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
ZERO = {"zero_optimization": {"stage": 2}}
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


def fit(module: Net, strategy: Any, ranks: int, **options: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data: Any = batches()
    trainer.fit(module, DataLoader(data, batch_size=None))
    return trainer


def trained(strategy: Any, ranks: int, accumulate: int) -> list[float]:
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.3}
    trainer = fit(Net(), strategy, ranks, **options)
    assert torch.isfinite(trainer.callback_metrics["loss_epoch"])
    trainer.save_checkpoint("trainer.ckpt")
    return weights_in("trainer.ckpt", trainer.strategy, "state_dict")


def weights_in(path: str, strategy: Any, key: str) -> list[float]:
    """Return the weights in a file or a directory; called on every rank."""
    if Path(path).is_dir():
        if strategy.is_global_zero:
            consolidate_checkpoint(path, f"one.{path}")
        path = f"one.{path}"
    strategy.barrier()
    return flat(torch.load(path, weights_only=True)[key])


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
    return weights_in("lite.ckpt", lite.strategy, "net")


def stepped(strategy: Any, ranks: int, accumulate: int) -> list[float]:
    lite = Lite(accelerator="cpu", strategy=strategy, devices=ranks)
    lite.launch()
    net = Net()
    model, _ = lite.setup(net, net.configure_optimizers())

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, labels = batch
        return cross_entropy(model(tokens), labels.flatten(), ignore_index=IGNORED)

    data: Any = batches()
    loader = lite.setup_dataloaders(DataLoader(data, batch_size=None))
    clip = {} if lite.plan.capabilities.engine_clips else {"max_norm": 0.3}
    for _ in range(EPOCHS):
        own = iter(loader)
        while step := list(islice(own, accumulate)):
            lite.step(model, step, loss, weights=[*map(net.loss_weight, step)], **clip)
    lite.save("step.ckpt", {"net": model})
    return weights_in("step.ckpt", lite.strategy, "net")


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
    if strategy == "deepspeed_stage_2":  # it clips in its own step
        from stratagem.strategies import DeepSpeedStrategy

        made = DeepSpeedStrategy(config={**ZERO, "gradient_clipping": 0.3})
    else:
        found["lite"] = looped(made, ranks, accumulate)
    found["step"] = stepped(made, ranks, accumulate)
    Path("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
