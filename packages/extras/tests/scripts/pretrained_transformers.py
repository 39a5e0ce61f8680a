"""A folder of transformers into each strategy and out again: `... STRATEGY FOLDER`, on two ranks.

The folder has a folder for each model. Rank 0 writes `found.json` with what differs, by model.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before ZeRO-3 changes how tensors are made
import transformers
from transformers.initialization import no_init_weights

from stratagem import Module, Trainer
from stratagem.checkpoint import save_pretrained

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=4),
}


class Language(Module):
    def __init__(self, config: Any, is_cut: bool) -> None:
        super().__init__()
        self.config, self.is_cut = config, is_cut
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            # Initialization of an embedding's padding row fails on the parts of ZeRO-3.
            values = no_init_weights() if self.is_cut else nullcontext()
            with values:
                self.net = transformers.AutoModelForCausalLM.from_config(self.config)
            self.net.tie_weights()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(input_ids=batch, labels=batch).loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.0)


def write(folder: Path) -> None:
    """Write a folder for each model, as transformers does."""
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / name, max_shard_size="20KB")


def differences(folder: Path, other: Path) -> list[str]:
    """Return the names of the tensors that differ between two folders, read by transformers."""
    one, two = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (folder, other)
    )
    return [name for name in one | two if not torch.equal(one[name], two[name])]


def strategy_of(name: str) -> Any:
    if name.startswith("mesh"):
        from stratagem.strategies import MeshStrategy

        return MeshStrategy(tensor=2)
    return name


def main(strategy: str, folder: Path) -> None:
    if strategy == "write":
        write(folder)
        return
    found: dict[str, Any] = {}
    data = torch.utils.data.DataLoader(torch.arange(32).reshape(4, 8), 2)
    devices = 1 if strategy == "single_device" else 2
    for name, config in CONFIGS.items():
        options: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
        options |= {"enable_checkpointing": False, "max_steps": 1}
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy_of(strategy),
            weights=folder / name,
            **options,
        )
        model = Language(config, strategy == "deepspeed_stage_3")
        trainer.fit(model, data)
        out = folder / f"{name} from {strategy}"
        save_pretrained(trainer, out, like=folder / name, max_shard_size="30KB")
        bare = folder / f"{name} from {strategy}, bare"
        save_pretrained(trainer, bare)
        if trainer.is_global_zero:
            found[name] = {
                "like": differences(folder / name, out),
                "bare": differences(folder / name, bare),
                "files": sorted(path.name for path in out.iterdir()),
            }
        trainer.strategy.ranks.barrier()
    if trainer.is_global_zero:
        (folder / f"{strategy}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]))
