"""Optimizers that work on the shards of a strategy."""

from stratagem_extras.optimizers.muon import Muon

__all__ = ["Muon"]
