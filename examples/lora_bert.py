"""Fine-tune BERT with LoRA: the pretrained weights stay frozen, small matrices beside them train.

    pip install transformers peft
    python examples/lora_bert.py                            # one process
    python examples/lora_bert.py --devices 2                # two processes
    python examples/lora_bert.py --devices 2 --strategy fsdp

BERT is made here, tiny and with random weights, so nothing is downloaded. For the real one, use
`BertForSequenceClassification.from_pretrained("bert-base-uncased")` and its tokenizer.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from stratagem import Module, Trainer, seed_everything

WORDS, LENGTH = 20, 8
Batch = tuple[Tensor, Tensor]


def sentences(count: int, seed: int) -> TensorDataset:
    """Random sentences; the label says whether the first word is of the second half of WORDS."""
    tokens = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = (tokens[:, 0] >= WORDS // 2).long()
    return TensorDataset(tokens, labels)


def tiny_bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=2,
        initializer_range=0.2,  # of the size of trained weights
    )
    return BertForSequenceClassification(config)


class Classifier(Module):
    def __init__(self, rank: int = 8, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        # peft freezes everything, then adds the matrices. The classifier is new: it trains in full.
        lora = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=["query", "value", "dense"],
            modules_to_save=["classifier"],
        )
        self.bert = get_peft_model(tiny_bert(), lora)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss: Tensor = self.bert(input_ids=tokens, labels=labels).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, labels = batch
        output = self.bert(input_ids=tokens, labels=labels)
        self.log("val_loss", output.loss)
        self.log("val_acc", (output.logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Only what trains gets optimizer state: Adam's two copies of a large model are its cost.
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    seed_everything(1)
    train = DataLoader(sentences(1024, seed=1), batch_size=32 // options.devices, shuffle=True)
    val = DataLoader(sentences(512, seed=2), batch_size=128)
    model = Classifier()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trainer = Trainer(strategy=options.strategy, devices=options.devices, max_epochs=options.epochs)
    trainer.print(f"{trained} of {sum(p.numel() for p in model.parameters())} parameters train")
    before = trainer.validate(model, val, verbose=False)[0]
    trainer.fit(model, train, val)
    after = trainer.validate(model, val, verbose=False)[0]
    for name in ("val_loss", "val_acc"):
        trainer.print(f"{name}: {before[name]:.3f} before, {after[name]:.3f} after")


if __name__ == "__main__":
    main()
