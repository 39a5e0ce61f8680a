"""OnExceptionCheckpoint: a checkpoint of a run that an error ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stratagem import storage
from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_warn

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class OnExceptionCheckpoint(Callback):
    """Saves a checkpoint when an error, or Ctrl-C, ends a fit in one process.

    With several ranks no checkpoint is saved, as with `ModelCheckpoint(save_on_exception=True)`,
    and a warning says so: ranks save together, and the other ranks do not stop at the same place.
    With a ModelCheckpoint, SIGTERM saves a checkpoint of all ranks.

    Args:
        dirpath: the folder of the checkpoint.
        filename: the name of the checkpoint, without an extension.

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

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Warn if nothing can be saved."""
        if trainer.world_size > 1:
            rank_zero_warn(
                f"OnExceptionCheckpoint saves nothing with {trainer.world_size} ranks: when an "
                "error or Ctrl-C ends one, the others are elsewhere. With a ModelCheckpoint, "
                "SIGTERM saves in any case; its train_time_interval limits what an error costs"
            )

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Save, in a fit of one process."""
        run = trainer.run
        if run.stage == "fit" and run.prepared is not None and trainer.world_size == 1:
            trainer.save_checkpoint(self.ckpt_path)
