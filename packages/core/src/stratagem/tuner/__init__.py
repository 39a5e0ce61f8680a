"""Tuner: finds a batch size that fits, and a learning rate to begin with."""

from stratagem.tuner.tuner import Tuner

__all__ = ["Tuner"]
