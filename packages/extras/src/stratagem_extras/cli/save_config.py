"""SaveConfigCallback: the config of a run, beside its checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem import storage
from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


WITH_NONE = ("parser_mode", False)
"""The format, and whether to skip None, which jsonargparse calls skip_none or skip_unset."""


class SaveConfigCallback(Callback):
    """Writes the config to the folder of the logs, which contains the checkpoints too, once.

    An existing file of that name is kept. If its text differs, the config is written to
    `config-v1.yaml`, and so on.

    Args:
        parser: creates the text.
        config: the parsed config.
        config_filename: name of the file.
        overwrite: replace an existing file.
        multifile: write parts that came from separate files to separate files again.
        save_to_log_dir: False: only `save_config` is called.

    Raises:
        ConfigurationError: no config would be saved.
    """

    def __init__(
        self,
        parser: Any,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        overridden = type(self).save_config is not SaveConfigCallback.save_config
        if not save_to_log_dir and not overridden:
            raise ConfigurationError(
                "`save_to_log_dir=False` only makes sense if you override save_config: do so, or "
                "leave save_to_log_dir as it is"
            )

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Write the config, on rank 0."""
        if self.already_saved:
            return
        self.already_saved = True
        if not trainer.is_global_zero:
            return
        if self.save_to_log_dir:
            self._write(storage.to_location(trainer.log_dir))
        self.save_config(trainer, module, stage)

    def save_config(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Override to store the config elsewhere as well, such as in a logger; on rank 0."""

    def _write(self, folder: storage.Location) -> None:
        text = self.parser.dump(self.config, *WITH_NONE)
        stem, dot, ending = self.config_filename.rpartition(".")
        number, path = 0, storage.join(folder, self.config_filename)
        while storage.exists(path) and not self.overwrite:
            if storage.read(path) == text.encode():
                return
            number += 1
            path = storage.join(folder, f"{stem}-v{number}{dot}{ending}")
        if self.multifile and not storage.is_url(path):
            storage.try_folder(folder)
            self.parser.save(
                self.config, str(path), *WITH_NONE, overwrite=self.overwrite, multifile=True
            )
        else:
            storage.write(path, text.encode())
