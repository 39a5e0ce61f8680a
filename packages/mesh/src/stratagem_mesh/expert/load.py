"""ExpertLoad: how evenly a router uses its experts, in the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class ExpertLoad(Callback):
    """Logs the load of the busiest expert of each layer, divided by the mean load.

    The load of an expert is the number of tokens that it received in a step, from all ranks. 1.0
    means that experts are used evenly. Values are named `expert_load/NAME`, after the module of the
    experts. The host does not wait for the device.

    Raises:
        ConfigurationError: when a fit begins, no experts are divided.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem_mesh import ExpertLoad, MeshStrategy
        >>> strategy = MeshStrategy(expert=2)
        >>> trainer = Trainer(devices=2, strategy=strategy, callbacks=ExpertLoad(), logger=False)
        >>> any(isinstance(each, ExpertLoad) for each in trainer.callbacks)
        True
    """

    def __init__(self) -> None:
        self._step = 0

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Refuse a strategy that divides no experts."""
        if getattr(trainer.strategy, "expert", 1) == 1:
            raise ConfigurationError(
                "ExpertLoad logs the load of experts that ranks divide, received "
                f"{type(trainer.strategy).__name__} without expert=: pass MeshStrategy(expert=2), "
                "or leave the callback out"
            )
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the load of the step that has ended."""
        strategy: Any = trainer.strategy
        of_rank = strategy.expert_load
        if trainer.global_step == self._step or not of_rank:
            return
        self._step = trainer.global_step
        total = trainer.ranks.all_reduce(torch.cat([*of_rank.values()]), "sum").float()
        loads = torch.split(total, [len(load) for load in of_rank.values()])
        for name, load in zip(of_rank, loads, strict=True):
            self.log(f"expert_load/{name}", load.max() / load.mean())
