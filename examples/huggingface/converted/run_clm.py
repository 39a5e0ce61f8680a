"""Train a small GPT-2 on the bytes of a text with stratagem.Trainer, as ../original does.

    python run_clm.py --output_dir clm
    python run_clm.py --output_dir clm --strategy fsdp --devices 2

It needs no network: the weights are random, and a token is a byte.
"""

import argparse
import math
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    default_data_collator,
    get_scheduler,
)
from transformers.trainer_pt_utils import get_parameter_names

from stratagem import Module, Trainer, seed_everything
from stratagem.callbacks import ModelCheckpoint

BLOCK = 64


def read_blocks(path):
    """Return the text in blocks of equal length, the labels beside the inputs."""
    tokens = list(path.read_bytes())
    starts = range(0, len(tokens) - BLOCK + 1, BLOCK)
    return [
        {"input_ids": tokens[start : start + BLOCK], "labels": tokens[start : start + BLOCK]}
        for start in starts
    ]


class LanguageModel(Module):
    """The model, with its steps and its optimizer."""

    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=256,
            n_positions=BLOCK,
            n_embd=64,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = AutoModelForCausalLM.from_config(config)
        self.model.loss_type = "ForCausalLM"

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        hits = outputs.logits.argmax(-1)[:, :-1] == batch["labels"][:, 1:]
        self.log_dict({"eval_loss": outputs.loss, "eval_accuracy": hits.float().mean()})

    def configure_optimizers(self):
        decayed = set(get_parameter_names(self.model, [torch.nn.LayerNorm], ["bias"]))
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [named[n] for n in named if n in decayed], "weight_decay": 0.1},
            {"params": [named[n] for n in named if n not in decayed], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=5e-3, fused=True)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train_file", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--output_dir", type=Path, default=Path("clm"))
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--in_order", action="store_true", help="do not shuffle")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    seed_everything(42)
    model = LanguageModel()
    blocks = read_blocks(args.train_file)
    train_dataset, eval_dataset = blocks[:-16], blocks[-16:]

    train_loader = DataLoader(
        train_dataset,
        batch_size=args.per_device_train_batch_size,
        shuffle=not args.in_order,
        collate_fn=default_data_collator,
        drop_last=True,
    )
    eval_loader = DataLoader(
        eval_dataset,
        batch_size=args.per_device_eval_batch_size,
        collate_fn=default_data_collator,
    )
    trainer = Trainer(
        strategy=args.strategy,
        devices=args.devices,
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(args.output_dir, every_n_train_steps=5, save_top_k=2)],
        default_root_dir=args.output_dir,
    )
    trainer.fit(model, train_loader, eval_loader, ckpt_path=args.resume_from_checkpoint)

    metrics = trainer.validate(model, eval_loader, verbose=False)[0]
    perplexity = math.exp(metrics["eval_loss"])
    trainer.print(f"perplexity {perplexity:.3f}, accuracy {metrics['eval_accuracy']:.3f}")
    # Whole weights on rank 0, whatever the strategy.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model.model, options=options)
    model.model.save_pretrained(
        args.output_dir, state_dict=state, is_main_process=trainer.is_global_zero
    )


if __name__ == "__main__":
    main()
