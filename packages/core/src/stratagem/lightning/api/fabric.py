"""Fabric: Lite by Lightning's name."""

from __future__ import annotations

from typing import Any

from stratagem.lite.dataloader import LiteDataLoader
from stratagem.lite.lite import Lite, PathLike
from stratagem.lite.module import LiteModule
from stratagem.lite.optimizer import LiteOptimizer


def is_wrapped(obj: object) -> bool:
    """Whether an object is what `setup` or `setup_dataloaders` returned."""
    return isinstance(obj, (LiteModule, LiteOptimizer, LiteDataLoader))


class Fabric(Lite):
    """Lite, with the arguments and methods that Fabric has beside."""

    @property
    def logger(self) -> Any:
        """The first logger.

        Raises:
            IndexError: there is none.
        """
        return self.loggers[0]

    def init_module(self, empty_init: bool | None = None) -> Any:
        """Return a context in which to build a model.

        Args:
            empty_init: not needed here: what a sharding strategy builds is sharded at once, with
                the values that the constructor draws.
        """
        return super().init_module()

    def load(
        self,
        path: PathLike,
        state: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint; as `Lite.load`.

        Args:
            path, state, strict: as there.
            weights_only: not needed here: nothing in a checkpoint is ever executed.
        """
        return super().load(path, state, strict=strict)
