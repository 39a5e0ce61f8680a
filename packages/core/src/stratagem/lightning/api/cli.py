"""LightningCLI: with the names that Lightning's has, where they differ."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.lightning.api.trainer import Trainer
from stratagem.trainer.cli.parser import (
    SCHEDULERS as LRSchedulerTypeTuple,
)
from stratagem.trainer.cli.parser import (
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    TrainerArgumentParser,
)
from stratagem.trainer.cli.parser import (
    Scheduler as LRSchedulerTypeUnion,
)
from stratagem.trainer.cli.save_config import SaveConfigCallback
from stratagem.trainer.cli.trainer_cli import TrainerCLI, instantiate_class

_PLACES = {
    "callbacks": "lightning.pytorch.callbacks",
    "logger": "lightning.pytorch.loggers",
    "profiler": "lightning.pytorch.profilers",
}
"""Where the classes are that a Trainer's arguments take."""


def _with_places(words: Sequence[str]) -> list[str]:
    """Return words with the places of classes: of `--trainer.logger=CSVLogger`, or as two words."""
    placed, before = [], ""
    for word in words:
        option, equals, value = word.partition("=") if word[:2] == "--" else (before, "", word)
        named = re.fullmatch(r"--trainer\.(\w+)\+?", option)
        place = _PLACES.get(named[1], "") if named else ""
        if place and value[:1].isupper() and value in dir(importlib.import_module(place)):
            value = f"{place}.{value}"
        placed.append(f"{option}{equals}{value}" if word[:2] == "--" else value)
        before = word
    return placed


class LightningArgumentParser(TrainerArgumentParser):
    """A TrainerArgumentParser whose environment variables begin with PL.

    Args:
        *args, env_prefix, **options: of `stratagem.cli.TrainerArgumentParser`.
    """

    def __init__(self, *args: Any, env_prefix: str | bool = "PL", **options: Any) -> None:
        super().__init__(*args, env_prefix=env_prefix, **options)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        """Parse a command line, in which a class of Lightning's may stand by its name alone.

        Args:
            args: its words; None: those of the process.
            *more, **options: of `jsonargparse.ArgumentParser.parse_args`.
        """
        words = sys.argv[1:] if args is None else args
        return super().parse_args(_with_places(words), *more, **options)

    def add_lightning_class_args(
        self,
        lightning_class: Callable[..., Any],
        nested_key: str | None,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a Trainer, Module, DataModule or Callback; see the base class."""
        return self.add_component_args(
            lightning_class, nested_key, subclass_mode=subclass_mode, required=required
        )


class LightningCLI(TrainerCLI):
    """A TrainerCLI of Lightning's Trainer.

    Args:
        *args, trainer_class, parser_class, **options: of `stratagem.cli.TrainerCLI`.
    """

    def __init__(
        self,
        *args: Any,
        trainer_class: Callable[..., Any] = Trainer,
        parser_class: type[TrainerArgumentParser] = LightningArgumentParser,
        **options: Any,
    ) -> None:
        options = {"trainer_class": trainer_class, "parser_class": parser_class, **options}
        super().__init__(*args, **options)


ArgsType = list[str] | dict[str, Any] | None
LRSchedulerType = type[ReduceLROnPlateau] | type[Any]

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
]
