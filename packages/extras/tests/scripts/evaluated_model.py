# A tiny Llama, and a Module with it, for test_evaluate.py.
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stratagem import Module


def make_model(size=16):
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=size,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def make_larger():
    return make_model(32)


class WithModel(Module):
    def __init__(self):
        super().__init__()
        self.policy = make_model()


class WithTwo(Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = make_model(), make_model()


def fail():
    raise ValueError("no such file")


def make_adapted():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"]))
