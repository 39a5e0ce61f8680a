"""AsyncCheckpointIO by Lightning's argument."""

from __future__ import annotations

from stratagem import checkpoint
from stratagem_lightning.api.instance_check import InstanceCheck, of_class


class AsyncCheckpointIO(checkpoint.AsyncCheckpointIO, metaclass=InstanceCheck):
    """Saves in the background, in another format; as `stratagem.checkpoint.AsyncCheckpointIO`.

    Args:
        checkpoint_io: the format; None: a single file.
    """

    is_instance = of_class(checkpoint.AsyncCheckpointIO)

    def __init__(self, checkpoint_io: checkpoint.CheckpointIO | None = None) -> None:
        super().__init__("single_file" if checkpoint_io is None else checkpoint_io)

    @property
    def checkpoint_io(self) -> checkpoint.CheckpointIO:
        """The format."""
        return self.inner
