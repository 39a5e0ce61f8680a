"""LightningModule: a Module by Lightning's name."""

from __future__ import annotations

from typing import Any

from stratagem.module import Module


class LightningModule(Module):
    """A Module, under the name that Lightning has for it."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    example_input_array: Any = None
    """What `forward` is given once for the table of layers; None: nothing."""
