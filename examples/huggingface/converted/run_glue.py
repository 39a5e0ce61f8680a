"""Train a small BERT to classify sentences with stratagem.Trainer, as ../original does.

    python run_glue.py --output_dir glue
    python run_glue.py --output_dir glue --strategy fsdp --devices 2

It needs no network: weights are random, and sentences are made of a few words.
"""

import argparse
import math
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    get_scheduler,
)
from transformers.trainer_pt_utils import get_parameter_names

from stratagem import Module, Trainer, seed_everything
from stratagem.callbacks import ModelCheckpoint

GOOD = ["good", "great", "fine", "lovely", "bright", "clever", "warm"]
BAD = ["bad", "awful", "poor", "ugly", "dull", "silly", "cold"]
OTHER = ["the", "a", "film", "book", "song", "was", "is", "and", "with", "very", "it", "this"]


def make_tokenizer():
    """Return a tokenizer whose tokens are the words."""
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_sentences(count, tokenizer):
    """Return tokenized sentences; those of label 1 have more good words than bad ones."""
    draw = random.Random(0)
    sentences = []
    for _ in range(count):
        label = draw.randrange(2)
        more, fewer = (GOOD, BAD) if label else (BAD, GOOD)
        words = draw.choices(more, k=3) + draw.choices(fewer, k=1)
        words += draw.choices(OTHER, k=draw.randrange(12))
        draw.shuffle(words)
        sentences.append({**tokenizer(" ".join(words)), "label": label})
    return sentences


class Classifier(Module):
    """The model, with its steps and its optimizer."""

    def __init__(self, vocab_size):
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=2,
        )
        self.model = AutoModelForSequenceClassification.from_config(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        hits = outputs.logits.argmax(-1) == batch["labels"]
        self.log_dict({"eval_loss": outputs.loss, "eval_accuracy": hits.float().mean()})

    def configure_optimizers(self):
        named = dict(self.model.named_parameters())
        decayed = set(get_parameter_names(self.model, [torch.nn.LayerNorm], ["bias", "norm"]))
        groups = [
            {"params": [named[n] for n in named if n in decayed], "weight_decay": 0.01},
            {"params": [named[n] for n in named if n not in decayed], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=5e-3, fused=True)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_scheduler("cosine", optimizer, math.ceil(0.1 * steps), steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("glue"))
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=16)
    parser.add_argument("--in_order", action="store_true", help="do not shuffle")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    seed_everything(42)
    tokenizer = make_tokenizer()
    model = Classifier(len(tokenizer))
    sentences = make_sentences(320, tokenizer)
    train_dataset, eval_dataset = sentences[:-64], sentences[-64:]

    collator = DataCollatorWithPadding(tokenizer)
    train_loader = DataLoader(
        train_dataset,
        batch_size=args.per_device_train_batch_size,
        shuffle=not args.in_order,
        collate_fn=collator,
    )
    eval_loader = DataLoader(
        eval_dataset, batch_size=args.per_device_eval_batch_size, collate_fn=collator
    )
    best = ModelCheckpoint(args.output_dir, monitor="eval_accuracy", mode="max")
    trainer = Trainer(
        strategy=args.strategy,
        devices=args.devices,
        accelerator="cpu",
        max_epochs=3,
        gradient_clip_val=1.0,
        callbacks=[best],
        default_root_dir=args.output_dir,
    )
    trainer.fit(model, train_loader, eval_loader)

    metrics = trainer.validate(model, eval_loader, ckpt_path="best", verbose=False)[0]
    trainer.print(f"loss {metrics['eval_loss']:.3f}, accuracy {metrics['eval_accuracy']:.3f}")
    # Whole weights on rank 0, whatever the strategy.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model.model, options=options)
    model.model.save_pretrained(
        args.output_dir, state_dict=state, is_main_process=trainer.is_global_zero
    )


if __name__ == "__main__":
    main()
