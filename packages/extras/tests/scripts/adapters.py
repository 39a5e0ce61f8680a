"""Adapters of PEFT under a strategy, trained, written and read: `... FOLDER NAME RANKS [KIND]`.

Each kind starts from the folder `base`. Rank 0 writes the losses of each validation, by kind, as
`NAME.json`; the adapter as `KIND of NAME`, what another Trainer reads and writes of it as
`KIND of NAME, again`, and the merged weights as `KIND of NAME, merged`.
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
import transformers
from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from stratagem import Callback, Trainer
from stratagem.checkpoint import PretrainedWeights, save_pretrained
from stratagem_extras.language import LanguageModule
from stratagem_mesh import MeshStrategy

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TARGETS = ["q_proj", "down_proj"]
KINDS: dict[str, Any] = {
    "lora": partial(LoraConfig, r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "rslora": partial(LoraConfig, r=4, target_modules=TARGETS, use_rslora=True),
    "dora": partial(LoraConfig, r=4, target_modules=TARGETS, use_dora=True),
    "ia3": partial(IA3Config, target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "vera": partial(VeraConfig, r=4, target_modules=["q_proj", "o_proj"]),
}


class Losses(Callback):
    """Keeps the mean by tokens of each validation."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.values.append(float(trainer.callback_metrics["val_loss"]))


def base() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, pad_token_id=None))


def adapted(kind: str) -> Any:
    """A model with adapters that change its output, on the weights of `base`."""
    model = base()
    torch.manual_seed(1)
    made = get_peft_model(model, KINDS[kind]())
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape)
    return made


def rows() -> Any:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 96, (16, 12), generator=draw)
    return [{"input_ids": row, "labels": row} for row in ids]


def main(folder: Path, name: str, ranks: int, kinds: list[str]) -> None:
    strategy: Any = MeshStrategy(tensor=2) if name == "mesh_tensor" else name
    options: dict[str, Any] = {"accelerator": "cpu", "strategy": strategy, "devices": ranks}
    options |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    own = 4 if name == "mesh_tensor" else 4 // ranks
    loaders = DataLoader(rows(), own), DataLoader(rows(), own)
    found: dict[str, list[float]] = {}
    for kind in kinds:
        losses = Losses()
        trainer = Trainer(max_epochs=3, num_sanity_val_steps=0, callbacks=losses, **options)
        optimizer = partial(torch.optim.AdamW, lr=1e-2)
        trainer.fit(LanguageModule(adapted(kind), optimizer), *loaders)
        written = folder / f"{kind} of {name}"
        save_pretrained(trainer, written, like=folder / "base")
        save_pretrained(trainer, folder / f"{kind} of {name}, merged", merged=True)
        weights = PretrainedWeights(folder / "base", adapter=written)
        again = Trainer(weights=weights, **options)
        torch.manual_seed(5)
        other = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, pad_token_id=None))
        module = LanguageModule(get_peft_model(other, KINDS[kind]()), optimizer)
        (tested,) = again.test(module, loaders[1], verbose=False)
        save_pretrained(again, folder / f"{kind} of {name}, again", like=folder / "base")
        found[kind] = [*losses.values, tested["test_loss"]]
    if trainer.is_global_zero:
        (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    target, name, ranks, *kinds = sys.argv[1:]
    if name == "base":
        base().save_pretrained(target)
    else:
        main(Path(target), name, int(ranks), kinds or list(KINDS))
