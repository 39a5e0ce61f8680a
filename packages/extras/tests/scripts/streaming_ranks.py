"""A run on a stream: `streaming_ranks.py OUT STRATEGY RANKS STEPS WORKERS CKPT`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from stratagem import Callback, Module, Trainer
from stratagem.strategies import MeshStrategy
from stratagem_extras.language import MixedDataset, PackedStream, StreamLoader

warnings.filterwarnings("error", message=".*read twice.*")

PLAN = {"head": "colwise_gather_output"}
STRATEGIES: dict[str, Any] = {"mesh, tensor": MeshStrategy(tensor=2, tensor_plan=PLAN)}
BATCH = 4


def stream() -> PackedStream:
    texts = [[number] * (1 + number * 7 % 5) for number in range(120)]
    return PackedStream(MixedDataset({"a": (texts[:80], 0.7), "b": (texts[80:], 0.3)}, seed=2), 8)


class Model(Module):
    """Predicts the next token; the loss is a mean over labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.head = torch.nn.Embedding(120, 8), torch.nn.Linear(8, 120)
        self.rows: list[Any] = []

    def loss_weight(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"] != -100).sum()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.rows.append(batch["input_ids"].tolist())
        logits = self.head(self.words(batch["input_ids"]))
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Write(Callback):
    """Writes what each rank has read, and the weights of rank 0."""

    def __init__(self, out: str) -> None:
        self.out = out

    def on_train_end(self, trainer: Any, module: Any) -> None:
        state = module.state_dict()
        whole = [
            getattr(value, "full_tensor", lambda value=value: value)() for value in state.values()
        ]
        weights = torch.cat([value.detach().flatten() for value in whole]).tolist()
        found = {"rows": module.rows, "weights": weights}
        Path(f"{self.out}-{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    out, strategy, ranks, steps, workers, resume = sys.argv[1:]
    trainer = Trainer(
        accelerator="cpu",
        strategy=STRATEGIES.get(strategy, strategy),
        devices=int(ranks),
        max_epochs=1,
        max_steps=int(steps),
        callbacks=Write(out),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    parts = 1 if strategy == "mesh, tensor" else int(ranks)
    loader = StreamLoader(stream(), BATCH // parts, num_workers=int(workers))
    trainer.fit(Model(), loader, ckpt_path=resume or None)
    trainer.save_checkpoint(f"{out}.ckpt")
