"""Trainer: fit, validate, test and predict with any strategy."""

from stratagem.trainer.trainer import Trainer

__all__ = ["Trainer"]
