"""A packed fine-tuning under a strategy, of all weights and of LoRA: `... OUT NAME RANKS CHUNK`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from stratagem import Callback, Trainer
from stratagem_extras.language import LanguageModule, PackedDataset, check_packing, chunk_loss

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
DRAW = torch.Generator().manual_seed(2)
LENGTHS = torch.randint(2, 12, (48,), generator=DRAW).tolist()
DOCUMENTS = [torch.randint(0, 96, (length,), generator=DRAW).tolist() for length in LENGTHS]


class Losses(Callback):
    """Keeps the mean by tokens of each validation."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.values.append(float(trainer.callback_metrics["val_loss"]))


def model(adapts: bool) -> Any:
    set_seed(1)
    made: Any = LlamaForCausalLM(
        LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, pad_token_id=None)
    )
    check_packing(made)
    if adapts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # from peft, of transformers' names
            made = get_peft_model(made, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    return made


def fit(strategy: str, ranks: int, chunk: int, adapts: bool) -> list[float]:
    trained = model(adapts)
    if chunk:
        chunk_loss(trained, chunk)
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=losses,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    rows = PackedDataset(DOCUMENTS, 16)
    module = LanguageModule(trained, partial(torch.optim.AdamW, lr=1e-2))
    trainer.fit(module, DataLoader(rows, 4 // ranks), DataLoader(rows, 4 // ranks))
    return losses.values


if __name__ == "__main__":
    out, strategy, ranks, chunk = sys.argv[1:]
    found = [fit(strategy, int(ranks), int(chunk), adapts) for adapts in (False, True)]
    if int(os.environ.get("RANK", 0)) == 0:
        Path(out).write_text(json.dumps(found))
