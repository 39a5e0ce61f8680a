"""Tuner: finds a batch size that fits, and a learning rate to begin with."""

from stratagem_extras.tuner.finders import BatchSizeFinder, LearningRateFinder
from stratagem_extras.tuner.tuner import Tuner

__all__ = ["BatchSizeFinder", "LearningRateFinder", "Tuner"]
