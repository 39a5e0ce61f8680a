"""Supervised fine-tuning by Stratagem: `... FOLDER PRECISION OUT`."""

import json
import sys
from functools import partial

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from sft_documents import documents
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, set_seed
from trl.data_utils import pack_dataset

from stratagem import Callback, Trainer
from stratagem_extras.language import LanguageModule, PackedDataset

folder, precision, out = sys.argv[1:]


def in_order_of_trl():
    """Yield the documents in the order of TRL's rows, which begin with the longest document."""
    for row in pack_dataset(Dataset.from_dict({"input_ids": documents()}), 32, "bfd"):
        tokens = iter(row["input_ids"])
        for length in row["seq_lengths"]:
            yield [next(tokens) for _ in range(length)]


class Losses(Callback):
    """Keeps the mean over the labels of each step."""

    def __init__(self):
        self.kept, self.sums = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        count = float(module.loss_weight(batch))
        self.sums.append((float(trainer.callback_metrics["loss"]) * count, count))
        if not trainer.is_within_step:
            loss, labels = map(sum, zip(*self.sums, strict=True))
            self.kept.append(loss / labels)
            self.sums.clear()


set_seed(1)
model = get_peft_model(
    AutoModelForCausalLM.from_pretrained(folder),
    LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
)
losses = Losses()
trainer = Trainer(
    accelerator="cpu",
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    precision=precision,
    callbacks=losses,
    logger=False,
    enable_checkpointing=False,
)
module = LanguageModule(model, partial(AdamW, lr=1e-2, weight_decay=0.0), packed=True)
trainer.fit(module, DataLoader(PackedDataset(list(in_order_of_trl()), 32), batch_size=2))
with open(out, "w") as file:
    json.dump(losses.kept, file)
