"""LightningCLI: with the names that Lightning's has, where they differ."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from stratagem.launch import rank_zero_warn
from stratagem_extras.cli.parser import (
    SCHEDULERS as LRSchedulerTypeTuple,
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    Scheduler as LRSchedulerTypeUnion,
    TrainerArgumentParser,
)
from stratagem_extras.cli.save_config import SaveConfigCallback
from stratagem_extras.cli.trainer_cli import TrainerCLI, instantiate_class
from stratagem_lightning.api.trainer import Trainer
from stratagem_lightning.api.utilities.version import LIGHTNING_VERSION

_JSONARGPARSE_SIGNATURES_AVAILABLE = True  # scripts ask it before they use jsonargparse
_PLACES = {
    "callbacks": "lightning.pytorch.callbacks",
    "logger": "lightning.pytorch.loggers",
    "profiler": "lightning.pytorch.profilers",
}
"""Where the classes are that a Trainer's arguments take."""


def _placed_words(words: Sequence[str]) -> list[str]:
    """Return words with the places of classes: of `--trainer.logger=CSVLogger`, or as two words."""
    placed, before = [], ""
    for word in words:
        option, equals, value = word.partition("=") if word[:2] == "--" else (before, "", word)
        named = re.fullmatch(r"--trainer\.(\w+)\+?", option)
        value = _placed_name(value, named[1] if named else "")
        placed.append(f"{option}{equals}{value}" if word[:2] == "--" else value)
        before = word
    return placed


def _placed_name(value: str, argument: str) -> str:
    """Return the place of a class that a Trainer's argument takes; anything else as it is."""
    place = _PLACES.get(argument, "")
    there = place and value[:1].isupper() and value in dir(importlib.import_module(place))
    return f"{place}.{value}" if there else value


def _placed(config: Any) -> Any:
    """Return a config in which short class names of Trainer arguments are import paths.

    Args:
        config: a complete config, or the config of a subcommand or a Trainer.
    """
    if not isinstance(config, Mapping):
        return config
    placed = {}
    for key, value in config.items():
        within = key == "trainer" or key in TrainerCLI.subcommands()
        placed[key] = _placed(value) if within else _placed_value(value, key)
    return placed


def _placed_value(value: Any, argument: str) -> Any:
    if isinstance(value, list):
        return [_placed_value(one, argument) for one in value]
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        return {**value, "class_path": _placed_name(value["class_path"], argument)}
    return _placed_name(value, argument) if isinstance(value, str) else value


def _load(text: str) -> Any:
    return _placed(get_loader("yaml")(text))


_MODE = "lightning"
"""jsonargparse's name for YAML in which classes of Lightning's may stand by their names alone."""
set_loader(_MODE, _load, (yaml.YAMLError,))


class LightningArgumentParser(TrainerArgumentParser):
    """A TrainerArgumentParser with the prefix PL for environment variables.

    Class names of a Trainer's callbacks, logger and profiler may be short:
    `--trainer.logger=CSVLogger`, or `class_path: EarlyStopping` in a file.

    Args:
        *args, env_prefix, **options: see `stratagem.cli.TrainerArgumentParser`.
    """

    def __init__(self, *args: Any, env_prefix: str | bool = "PL", **options: Any) -> None:
        super().__init__(*args, **{"env_prefix": env_prefix, "parser_mode": _MODE, **options})
        self.dump_header = [f"lightning.pytorch=={LIGHTNING_VERSION}"]

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        """Parse a command line, in which names of Lightning's classes may be short.

        Args:
            args: the arguments; None for the arguments of the process.
            *more, **options: see `jsonargparse.ArgumentParser.parse_args`.
        """
        words = sys.argv[1:] if args is None else args
        return super().parse_args(_placed_words(words), *more, **options)

    def parse_object(self, cfg_obj: Any, *more: Any, **options: Any) -> Any:
        """Parse a config that is a dict, in which a class may stand by its name alone too.

        Args:
            cfg_obj: the config.
            *more, **options: of `jsonargparse.ArgumentParser.parse_object`.
        """
        return super().parse_object(_placed(cfg_obj), *more, **options)

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
        options["trainer_defaults"] = _placed(options.get("trainer_defaults") or {})
        super().__init__(*args, **options)

    def parse_arguments(self, parser: TrainerArgumentParser, args: Any) -> None:
        """Parse the arguments; warn if the arguments of the process are ignored.

        Args:
            parser: reads them.
            args: a list of words, or a config; None: the process's arguments.
        """
        if args is not None and sys.argv[1:]:
            rank_zero_warn(
                f"LightningCLI's args parameter takes the place of the command line, which is not "
                f"read: {' '.join(sys.argv[1:])}"
            )
        super().parse_arguments(parser, args)


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
