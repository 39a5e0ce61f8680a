"""Optimizers that work on the shards of a strategy."""

from stratagem_extras.optimizers.adamw_8bit import AdamW8bit
from stratagem_extras.optimizers.muon import Muon

__all__ = ["AdamW8bit", "Muon"]
