"""Train a small BERT to classify sentences with transformers.Trainer, as its run_glue.py does.

    python run_glue.py --output_dir glue
    torchrun --nproc_per_node 2 run_glue.py --output_dir glue

It needs no network: weights are random, and sentences are made of a few words.
"""

import argparse
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

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


def accuracy(evaluated):
    """Return the share of sentences that were classified right."""
    predictions, labels = evaluated
    return {"accuracy": float((predictions.argmax(-1) == labels).mean())}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("glue"))
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=16)
    parser.add_argument("--in_order", action="store_true", help="do not shuffle")
    args = parser.parse_args()

    set_seed(42)
    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    sentences = make_sentences(320, tokenizer)
    train_dataset, eval_dataset = sentences[:-64], sentences[-64:]

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        use_cpu=True,
        per_device_train_batch_size=args.per_device_train_batch_size,
        per_device_eval_batch_size=args.per_device_eval_batch_size,
        train_sampling_strategy="sequential" if args.in_order else "random",
        num_train_epochs=3,
        learning_rate=5e-3,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        weight_decay=0.01,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        seed=42,
        average_tokens_across_devices=False,  # BERT computes its loss without it
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model()

    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"loss {metrics['eval_loss']:.3f}, accuracy {metrics['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
