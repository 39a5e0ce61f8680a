"""Supervised fine-tuning by TRL: `... FOLDER PRECISION OUT`."""

import json
import sys

from datasets import Dataset
from peft import LoraConfig
from sft_documents import documents
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

folder, precision, out = sys.argv[1:]
args = SFTConfig(
    output_dir="trl",
    seed=1,
    packing=True,
    max_length=32,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    train_sampling_strategy="sequential",
    bf16=precision == "bf16-mixed",
    use_cpu=True,
    activation_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(folder),
    args,
    train_dataset=Dataset.from_dict({"input_ids": documents()}),
    processing_class=AutoTokenizer.from_pretrained(folder),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
with open(out, "w") as file:
    json.dump(losses, file)
