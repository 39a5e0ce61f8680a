"""Fabric's sharding strategies, which save and load by themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from stratagem import strategies
from stratagem.errors import ConfigurationError
from stratagem_lightning.api.instance_check import of_class
from stratagem_lightning.api.strategies.fsdp import FSDPStrategy as TrainersFSDPStrategy
from stratagem_lightning.api.strategies.model_parallel import (
    ModelParallelStrategy as TrainersModelParallelStrategy,
)
from stratagem_lightning.api.strategies.single_device import trainer_of
from stratagem_lightning.api.utilities.exceptions import UserTypeError

if TYPE_CHECKING:
    from stratagem_lightning.api.fabric import Fabric
    from stratagem_lightning.api.strategies.filtering import Filter

PathLike = str | os.PathLike[str]


class _SavesState:
    """What Fabric's strategies have beside: checkpoints of models in shards."""

    def save_checkpoint(
        self,
        path: PathLike,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filter | None = None,
    ) -> None:
        """Save models, optimizers and values; as `Fabric.save`, called on every rank.

        Args:
            path, state, filter: see `Fabric.save`.
            storage_options: unsupported by all formats here.

        Raises:
            UserTypeError: `storage_options` is not None.
            ConfigurationError: no Fabric has this strategy.
        """
        name = type(self).__name__
        if storage_options is not None:
            raise UserTypeError(
                f"`{name}.save_checkpoint(..., storage_options=...)` is not supported: give them "
                "to a CheckpointIO of your own"
            )
        self._fabric("save_checkpoint").save(path, state, filter=filter)

    def load_checkpoint(
        self,
        path: PathLike,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a file of `save_checkpoint`, or a file with a model's state dict, on every rank.

        Args:
            path: the path of the file.
            state: a dict that is filled in place, or a model.
            strict: see `Fabric.load`.
            weights_only: ignored: loading never executes code from a checkpoint.

        Returns:
            The entries of the file that were not loaded into `state`.

        Raises:
            ConfigurationError: `state` is missing, the path has no checkpoint, or no Fabric uses
                this strategy.
            NotImplementedError: `state` is an optimizer.
        """
        name, found = type(self).__name__, Path(path)
        if not state:
            raise ConfigurationError(
                f"Got {name}.load_checkpoint(..., state={state!r}): expected a dict with the model "
                "that is to be filled, whose shards are on all ranks"
            )
        if isinstance(state, Optimizer):
            raise NotImplementedError(
                "Loading a single optimizer object from a checkpoint is not supported: pass a dict "
                "with the model and the optimizer"
            )
        if isinstance(state, nn.Module):
            if found.is_dir():
                raise ConfigurationError(
                    f"{name}.load_checkpoint({str(path)!r}, state=<a model>): The given path must "
                    "be a single file containing the full state dict, received a folder: pass a "
                    "dict, as in state={'model': model}"
                )
            self._fabric("load_checkpoint").load_raw(path, state, strict=strict)
            return {}
        if found.is_dir() and not any(found.iterdir()):
            raise ConfigurationError(
                f"The path {str(path)!r} does not point to a valid checkpoint: the folder is empty"
            )
        return self._fabric("load_checkpoint").load(path, state, strict=strict)

    def _fabric(self, method: str) -> Fabric:
        fabric: Any = trainer_of(self)  # type: ignore[arg-type]
        if fabric is None:
            raise ConfigurationError(
                f"{type(self).__name__}.{method}() needs a Fabric: pass the strategy as "
                "Fabric(strategy=...) first"
            )
        return fabric  # type: ignore[no-any-return]


class FSDPStrategy(_SavesState, TrainersFSDPStrategy):
    """As the Trainer's, with `save_checkpoint` and `load_checkpoint`."""

    is_instance = of_class(strategies.FSDPStrategy)


class ModelParallelStrategy(_SavesState, TrainersModelParallelStrategy):
    """As the Trainer's, with `save_checkpoint` and `load_checkpoint`.

    Args:
        parallelize_fn: as there.
        **options: of `stratagem.strategies.ModelParallelStrategy`.
    """

    is_instance = of_class(strategies.ModelParallelStrategy)
