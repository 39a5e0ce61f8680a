"""Weights in Hugging Face's layout: safetensors, read into shards and written from them."""

from __future__ import annotations

from stratagem_extras.pretrained.load import PretrainedWeights as PretrainedWeights
from stratagem_extras.pretrained.save import save_pretrained as save_pretrained
