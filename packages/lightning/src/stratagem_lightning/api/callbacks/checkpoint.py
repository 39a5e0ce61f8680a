"""Checkpoint: the base of callbacks that save checkpoints, by Lightning's name."""

from __future__ import annotations

from stratagem.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from stratagem_lightning.api.instance_check import InstanceCheck


class Checkpoint(Callback, metaclass=InstanceCheck):
    """A callback that saves checkpoints; ModelCheckpoint and OnExceptionCheckpoint are two.

    Example:
        >>> from stratagem_lightning.pytorch.callbacks import ModelCheckpoint
        >>> isinstance(ModelCheckpoint(), Checkpoint)
        True
    """


Checkpoint.register(ModelCheckpoint)
Checkpoint.register(OnExceptionCheckpoint)
