"""Probe: what a check has at hand on a rank."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from stratagem.errors import ConfigurationError, RankFailedError
from stratagem.lite import Lite
from stratagem.trainer import Trainer
from stratagem_testing.strategies import models
from stratagem_testing.strategies.target import Target

PATIENCE = 15.0
"""Seconds that a rank waits for the others to end a check."""


class Probe:
    """A rank's view of a check: the strategy under test, its data, and a folder of all ranks.

    The probe does not rely on the strategy's own collectives, which may be defective.

    Args:
        target: the strategy under test.
        rank: the number of this process.
        world_size: the number of processes.
        folder: the folder of the check, the same on all ranks.
        reference: the folder where `single_device`, or the check that this check follows, has left
            files.
    """

    def __init__(
        self, target: Target, rank: int, world_size: int, folder: Path, reference: Path
    ) -> None:
        self.target = target
        self.rank = rank
        self.world_size = world_size
        self.folder = folder
        self.reference = reference

    def trainer(self, strategy: Any = None, **options: Any) -> Trainer:
        """Return a Trainer with the strategy, which writes and prints nothing of itself."""
        defaults: dict[str, Any] = {
            "accelerator": self.target.accelerator,
            "strategy": self.target.make() if strategy is None else strategy,
            "devices": self.target.devices // self.target.nodes,
            "num_nodes": self.target.nodes,
            "plugins": "single_file",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": self.folder,
        }
        return Trainer(**{**defaults, **options})

    def lite(self, **options: Any) -> Lite:
        """Return a Lite with the strategy, launched."""
        defaults: dict[str, Any] = {
            "accelerator": self.target.accelerator,
            "strategy": self.target.make(),
            "devices": self.target.devices // self.target.nodes,
            "num_nodes": self.target.nodes,
            "plugins": "single_file",
        }
        lite = Lite(**{**defaults, **options})
        lite.launch(_nothing)
        return lite

    def loader(self, samples: int, *, shuffle: bool = False) -> Any:
        """Return this rank's DataLoader; all together read batches of 8 samples."""
        return models.loader(samples, self.target.data_groups, shuffle=shuffle)

    def fit(
        self,
        learner: models.Learner,
        samples: int = 32,
        *,
        shuffle: bool = False,
        validated: int = 0,
        **options: Any,
    ) -> Trainer:
        """Train, for one epoch by default; return the Trainer.

        Args:
            learner: the model.
            samples: the number of training samples of all ranks together.
            shuffle: whether to shuffle the samples.
            validated: the number of samples of the validation after each epoch; 0: no validation.
            **options: arguments of the Trainer and of `fit`.
        """
        if not {"max_epochs", "max_steps"} & options.keys():
            options["max_epochs"] = 1
        path = options.pop("ckpt_path", None)
        trainer = self.trainer(**options)
        validation = self.loader(validated) if validated else None
        trainer.fit(learner, self.loader(samples, shuffle=shuffle), validation, ckpt_path=path)
        return trainer

    def report(self, learner: models.Learner, trainer: Trainer) -> dict[str, Any]:
        """Return the results of a training on this rank."""
        return {
            "shard": list(trainer.ranks.data_split),
            "losses": learner.losses,
            "begun": learner.begun,
            "weights": self.weights(trainer),
            "own": self.own_weights(trainer.run.require_prepared().original),
        }

    def report_of_loop(
        self, lite: Lite, net: nn.Module, model: Any, losses: list[float], seed: int = 0
    ) -> dict[str, Any]:
        """Return the results of a loop under Lite on this rank.

        Args:
            lite: the Lite of the loop.
            net: the model of the user, "dense".
            model: the model that `Lite.setup` returned.
            losses: the loss of each micro-batch.
            seed: the seed of the model.
        """
        return {
            "shard": list(lite.ranks.data_split),
            "losses": losses,
            "begun": models.flat(dict(models.build("dense", seed).named_parameters())),
            "weights": models.flat(model.state_dict()),
            "own": self.own_weights(net),
        }

    def weights(self, trainer: Trainer) -> dict[str, list[float]]:
        """Return the whole state of the model by name; of sharded ones on rank 0 only."""
        prepared = trainer.run.require_prepared()
        return models.flat(trainer.strategy.model_state(prepared))

    def own_weights(self, net: nn.Module) -> dict[str, list[float]]:
        """Return the parameters that this rank has of a user's model, where it has whole ones."""
        capabilities = self.target.capabilities()
        if capabilities.sharded_state or capabilities.parameters != "same":
            return {}
        return models.flat(dict(net.named_parameters()))

    def attempt(self, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return an action's result, with `refused`: the action's error, or None.

        The error is described by class and text; an error of another class than ConfigurationError
        also by its traceback.

        Raises:
            RankFailedError: another rank has ended, which is not a refusal.
        """
        try:
            return {"refused": None, **action()}
        except RankFailedError:
            raise
        except ConfigurationError as error:
            return {"refused": {"kind": type(error).__name__, "text": str(error)}}
        except Exception as error:
            text = f"{error}\n{traceback.format_exc()}"
            return {"refused": {"kind": type(error).__name__, "text": text}}

    def said(self, action: Callable[[], Any]) -> dict[str, str] | None:
        """Return class and text of the error that an action ends with.

        None: it ends without an error.

        Raises:
            RankFailedError: another rank has ended.
        """
        try:
            action()
        except RankFailedError:
            raise
        except Exception as error:
            return {"kind": type(error).__name__, "text": str(error)}
        return None

    def meet(self, name: str, patience: float = PATIENCE) -> None:
        """Wait for all ranks, by files.

        Raises:
            TimeoutError: a rank does not come.
        """
        (self.folder / f"{name}.{self.rank}").touch()
        deadline = time.monotonic() + patience
        waiting = [self.folder / f"{name}.{rank}" for rank in range(self.world_size)]
        while waiting := [path for path in waiting if not path.exists()]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(p.name for p in waiting)} did not come")
            time.sleep(0.002)


def _nothing(lite: Lite) -> None:
    """What a launch of ranks that are there already has left to do."""
