"""Train a GPT from scratch, one character at a time, then let it write.

    python examples/gpt.py                                  # one process
    python examples/gpt.py --devices 2                      # two processes
    python examples/gpt.py --devices 2 --strategy fsdp      # parameters sharded over both

The text is a file of Python's standard library, so nothing is downloaded. The model is GPT-2's,
made small. More of everything (--width 384 --layers 6 --steps 5000, on a GPU) writes better Python.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer, seed_everything

TEXT = Path(argparse.__file__).read_text()
CHARACTERS = sorted(set(TEXT))
TOKENS = torch.tensor([CHARACTERS.index(character) for character in TEXT])
CONTEXT = 64


class Block(nn.Module):
    """Attention and a feed-forward network; each adds to its input, which it first normalizes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        self.feed = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.feed(self.norms[1](x))
        return out


class GPT(Module):
    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.tokens, self.places = (
            nn.Embedding(len(CHARACTERS), width),
            nn.Embedding(CONTEXT, width),
        )
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS)))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.head(self.blocks(self.tokens(tokens) + self.places(places)))
        return scores

    def loss(self, batch: tuple[Tensor]) -> Tensor:
        # Each character is predicted from those before it: one window is CONTEXT lessons.
        scores, wanted = self(batch[0][:, :-1]), batch[0][:, 1:]
        return cross_entropy(scores.flatten(0, 1), wanted.flatten())

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> str:
        tokens = batch[0]
        for _ in range(120):
            scores = self(tokens[:, -CONTEXT:])[:, -1] / 0.8  # below 1: fewer surprises
            tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1)], dim=1)
        return "".join(CHARACTERS[token] for token in tokens[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Weight decay is for matrices: a bias or a norm's scale has no reason to be small.
        matrices = {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": 0.1}
        others = {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([matrices, others], lr=self.lr, betas=(0.9, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"devices": 1, "steps": 100, "width": 64, "layers": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", default="auto")
    options = parser.parse_args()
    seed_everything(1)
    # Windows of CONTEXT characters and the one after them; the end of the text is kept to judge by.
    windows = TOKENS.unfold(0, CONTEXT + 1, CONTEXT // 4)
    cut = len(windows) * 9 // 10
    train = DataLoader(TensorDataset(windows[:cut]), batch_size=32, shuffle=True)
    val = DataLoader(TensorDataset(windows[cut + 4 :]), batch_size=64)
    trainer = Trainer(strategy=options.strategy, devices=options.devices, max_steps=options.steps)
    model = GPT(options.width, options.layers)
    before = trainer.validate(model, val, verbose=False)[0]["val_loss"]
    trainer.fit(model, train, val)
    after = trainer.validate(model, val, verbose=False)[0]["val_loss"]
    trainer.print(f"val_loss: {before:.3f} before, {after:.3f} after")
    trainer.print(*trainer.predict(model, DataLoader(TensorDataset(TOKENS[:1, None]))))


if __name__ == "__main__":
    main()
