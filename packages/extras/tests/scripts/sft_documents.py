"""Documents, a folder of weights and a tokenizer, without downloads: `... FOLDER` writes them."""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

WORDS = 96


def documents() -> list[list[int]]:
    """Return 64 documents of 4 to 29 tokens."""
    draw = torch.Generator().manual_seed(2)
    lengths = torch.randint(4, 30, (64,), generator=draw).tolist()
    return [torch.randint(3, WORDS, (length,), generator=draw).tolist() for length in lengths]


def main(folder: str) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = models.WordLevel({str(word): word for word in range(WORDS)}, unk_token="0")
    special = {"pad_token": "0", "bos_token": "1", "eos_token": "2"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), **special)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
