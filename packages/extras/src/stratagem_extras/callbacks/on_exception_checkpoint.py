"""OnExceptionCheckpoint: a checkpoint of a run that an error ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stratagem import storage
from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class OnExceptionCheckpoint(Callback):
    """Saves a checkpoint when an error, or Ctrl-C, ends a fit.

    Several ranks save together, which they can only where all of them have ended by Ctrl-C: one
    that fails alone would wait for the others, which still train. There the last checkpoint of a
    ModelCheckpoint is what is left.

    Args:
        dirpath: where to.
        filename: of the checkpoint, without an ending.

    Raises:
        ConfigurationError: the name is empty.

    Example:
        >>> from stratagem.callbacks import OnExceptionCheckpoint
        >>> OnExceptionCheckpoint("kept", filename="failed").ckpt_path
        'kept/failed.ckpt'
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        if not filename:
            raise ConfigurationError(
                "OnExceptionCheckpoint(filename=''): expected the name of a file"
            )
        self.dirpath = storage.parse_user_path(dirpath)
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        """Where it goes."""
        return str(storage.join(self.dirpath, f"{self.filename}{self.FILE_EXTENSION}"))

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Save, where all ranks can."""
        together = trainer.world_size == 1 or isinstance(exception, KeyboardInterrupt)
        if trainer.run.stage == "fit" and trainer.run.prepared is not None and together:
            trainer.save_checkpoint(self.ckpt_path)
