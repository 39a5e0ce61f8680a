"""Train a small GPT-2 on the bytes of a text with transformers.Trainer, as its run_clm.py does.

    python run_clm.py --output_dir clm
    torchrun --nproc_per_node 2 run_clm.py --output_dir clm

It needs no network: the weights are random, and a token is a byte.
"""

import argparse
import math
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

BLOCK = 64


def read_blocks(path):
    """Return the text in blocks of equal length, the labels beside the inputs."""
    tokens = list(path.read_bytes())
    starts = range(0, len(tokens) - BLOCK + 1, BLOCK)
    return [
        {"input_ids": tokens[start : start + BLOCK], "labels": tokens[start : start + BLOCK]}
        for start in starts
    ]


def accuracy(evaluated):
    """Return the share of tokens that were predicted right."""
    predictions, labels = evaluated
    return {"accuracy": float((predictions[:, :-1] == labels[:, 1:]).mean())}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train_file", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--output_dir", type=Path, default=Path("clm"))
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--in_order", action="store_true", help="do not shuffle")
    args = parser.parse_args()

    set_seed(42)
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
    model = AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"  # else the Trainer counts a label too many in each block
    blocks = read_blocks(args.train_file)
    train_dataset, eval_dataset = blocks[:-16], blocks[-16:]

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        use_cpu=True,
        per_device_train_batch_size=args.per_device_train_batch_size,
        per_device_eval_batch_size=args.per_device_eval_batch_size,
        gradient_accumulation_steps=2,
        dataloader_drop_last=True,
        train_sampling_strategy="sequential" if args.in_order else "random",
        num_train_epochs=2,
        learning_rate=5e-3,
        lr_scheduler_type="linear",
        warmup_steps=4,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="epoch",
        save_steps=5,
        save_total_limit=2,
        seed=42,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()

    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        perplexity = math.exp(metrics["eval_loss"])
        print(f"perplexity {perplexity:.3f}, accuracy {metrics['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
