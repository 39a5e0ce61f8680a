"""LightningModule: a Module by Lightning's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from stratagem.errors import ConfigurationError
from stratagem.module import Module

ModuleType = TypeVar("ModuleType", bound="LightningModule")


class LightningModule(Module):
    """A Module, under the name that Lightning has for it."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    example_input_array: Any = None
    """What `forward` is given once for the table of layers; None: nothing."""

    @classmethod
    def load_from_checkpoint(
        cls: type[ModuleType],
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> ModuleType:
        """Make a model from a checkpoint, Stratagem's or Lightning's; as `Module` does.

        Args:
            checkpoint_path, map_location: as there.
            hparams_file: not here: expected None.
            strict: refuse names that do not match; None: True.
            weights_only: not needed here: nothing in a checkpoint is ever executed.
            **kwargs: arguments of `__init__`, in place of those in the checkpoint.

        Raises:
            ConfigurationError: there is an `hparams_file`.
        """
        if hparams_file is not None:
            raise ConfigurationError(
                f"hparams_file={hparams_file!r}: expected None; read it, and pass its values as "
                "arguments of load_from_checkpoint"
            )
        return super().load_from_checkpoint(
            checkpoint_path, map_location=map_location, strict=strict is not False, **kwargs
        )
