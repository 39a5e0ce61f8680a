"""LoRA over a base in few bits: `... FOLDER STRATEGY RANKS MODE FORMAT WHAT`.

WHAT is "whole", an uninterrupted run; "first", a run that ends in the middle of an epoch, with a
checkpoint; "second", a run that resumes from it; "plain", a run that writes its base and its
adapter to FOLDER; or "read", the same run with the base read from there. Rank 0 writes WHAT.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before ZeRO-3 changes how tensors are made
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from stratagem import Callback, Trainer, seed_everything
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoint import save_pretrained
from stratagem_cuda.precision import BitsandbytesPrecision
from stratagem_extras.language import LanguageModule

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class Losses(Callback):
    """Keeps the mean by tokens of each step, over all ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        loss = trainer.callback_metrics["loss"].detach().clone()
        self.values.append(float(trainer.strategy.all_reduce(loss, reduce_op="mean")))


def base() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, pad_token_id=None))


def model(dropout: float) -> Any:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=dropout)
    return get_peft_model(base(), config)


def rows() -> Any:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 96, (32, 12), generator=draw)
    return [{"input_ids": row, "labels": row} for row in ids]


def bytes_of(module: torch.nn.Module) -> int:
    """The bytes of parameters that this rank holds."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return sum(tensor.nbytes for tensor in own)


def main(folder: Path, name: str, ranks: int, mode: str, form: str, what: str) -> None:
    losses = Losses()
    precision: Any = "32-true"
    if mode != "none":
        dtype = None if mode.startswith("int8") else torch.float32
        precision = BitsandbytesPrecision(mode, dtype=dtype)
    saver = ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_last=True)
    saves = what == "first"
    is_plain = what in ("plain", "read")
    trainer = Trainer(
        accelerator="cpu",
        strategy=name,
        devices=ranks,
        plugins=[form, *([precision] if mode != "none" else [])],
        max_epochs=2,
        max_steps=5 if saves else -1,
        callbacks=[losses, *([saver] if saves else [])],
        logger=False,
        enable_checkpointing=saves,
        enable_progress_bar=False,
        log_every_n_steps=1,
        weights=folder / "base" if what == "read" else None,
    )
    seed_everything(3)
    adapted = model(0.0 if is_plain else 0.1)
    if what == "read":
        for parameter in adapted.parameters():
            parameter.data.mul_(1 if parameter.requires_grad else 0)
    net = LanguageModule(adapted, partial(torch.optim.AdamW, lr=0.01))
    path = folder / "saved/last.ckpt" if what == "second" else None
    trainer.fit(net, DataLoader(rows(), 4 // ranks, shuffle=not is_plain), ckpt_path=path)
    if what == "plain":
        save_pretrained(trainer, folder / "adapter")
        if trainer.is_global_zero:
            base().save_pretrained(folder / "base")
    if trainer.is_global_zero:
        found = {"losses": losses.values, "bytes": bytes_of(net)}
        (folder / f"{what}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    target, name, number, mode, form, what = sys.argv[1:]
    main(Path(target), name, int(number), mode, form, what)
