"""TrainerCLI: a Trainer, a Module and a DataModule made from a command line, and run."""

from __future__ import annotations

import argparse
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, Namespace, class_from_function
from torch.optim import Optimizer

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError
from stratagem.module import DataModule, Module
from stratagem.rng import seed_everything
from stratagem.runtime import as_list
from stratagem.trainer import Trainer
from stratagem_extras.cli.parser import (
    AUTOMATIC,
    SCHEDULERS,
    ReduceLROnPlateau,
    Scheduler,
    TrainerArgumentParser,
)
from stratagem_extras.cli.save_config import WITH_NONE, SaveConfigCallback

_NOT_ASKED = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
"""Arguments of `fit` and its kin that are made, and not given on a command line."""


class TrainerCLI:
    """Creates the run that a command line and config files describe, and executes it.

    `python main.py fit --config run.yaml --trainer.max_epochs 3 --model.width 8`: later values
    override earlier values, options override files. `--print_config` prints the config, `--help`
    and `--model.help CLASS` the options. A config names classes by import path (`class_path:
    my_package.MyModel`). The classes are imported; other text of a config is never evaluated.

    Call sequence, each to be overridden:
        1. `add_arguments_to_parser(parser)`: more arguments, links between them.
        2. `before_instantiate_classes`, `instantiate_classes`, `after_instantiate_classes`.
        3. `before_fit`, `fit` in place of the Trainer's, `after_fit`, if defined; the same for
           `validate`, `test` and `predict`.

    Args:
        model_class: a Module, or a function that returns a Module; None: any Module, by
            `class_path`.
        datamodule_class: the same for a DataModule.
        save_config_callback: saves the config beside the checkpoints; None: the config is not
            saved.
        save_config_kwargs: the arguments of `save_config_callback`.
        trainer_class: a Trainer, or a function that returns a Trainer.
        trainer_defaults: defaults of the Trainer's arguments; callbacks given here, as objects or
            as configs, are always added.
        seed_everything_default: the seed; True: a random seed; False: no seed.
        parser_kwargs: arguments of `jsonargparse.ArgumentParser`, such as `default_env`; arguments
            for a subcommand under its name.
        parser_class: the class of the parsers.
        subclass_mode_model, subclass_mode_data: accept subclasses of the given class.
        args: a list of texts, or a dict; None: the process's arguments.
        run: run the subcommand; False: only create trainer, model and datamodule. The arguments of
            the subcommands, such as `ckpt_path`, are in `config` then, if given.
        auto_configure_optimizers: let `--optimizer` and `--lr_scheduler` define
            `configure_optimizers`.

    Attributes:
        parser, config, config_init: the parser, the parsed config, and the config with its objects.
        trainer, model, datamodule: the objects.
        subcommand: the subcommand; None: `run=False`.

    Raises:
        ConfigurationError: more than one optimizer is given for `configure_optimizers`.
        SystemExit: the command line is wrong (exit code 2), or asks for help.

    Example:
        >>> from stratagem.cli import TrainerCLI                               # doctest: +SKIP
        >>> cli = TrainerCLI(MyModel, args=["--model.width=8"], run=False)     # doctest: +SKIP
        >>> cli.trainer.fit(cli.model)                                         # doctest: +SKIP
    """

    def __init__(
        self,
        model_class: type[Module] | Callable[..., Module] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: Mapping[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: Mapping[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: Mapping[str, Any] | None = None,
        parser_class: type[TrainerArgumentParser] = TrainerArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: list[str] | Mapping[str, Any] | None = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
    ) -> None:
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = dict(save_config_kwargs or {})
        self.trainer_class = trainer_class
        self.trainer_defaults = dict(trainer_defaults or {})
        self.seed_everything_default = seed_everything_default
        self.parser_class = parser_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self.auto_configure_optimizers = auto_configure_optimizers
        self.subcommand: str | None = None
        self._subparsers: dict[str, TrainerArgumentParser] = {}
        self._arguments_of: dict[str, list[str]] = {}

        self.setup_parser(run, dict(parser_kwargs or {}))
        self.parse_arguments(self.parser, args)
        if run:
            self.subcommand = self.config["subcommand"]
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # -- the parser

    def init_parser(self, **kwargs: Any) -> TrainerArgumentParser:
        """Return a parser that takes config files."""
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c", "--config", action=ActionConfigFile, help="a config file; several are merged"
        )
        return parser

    def setup_parser(self, add_subcommands: bool, parser_kwargs: dict[str, Any]) -> None:
        """Make the parser, with a subcommand for each of the Trainer's runs or without any."""
        names = self.subcommands()
        own = {name: value for name, value in parser_kwargs.items() if name not in names}
        self.parser = self.init_parser(**own)
        given = self.trainer_class
        trainer = given if isinstance(given, type) else class_from_function(given)
        if not add_subcommands:
            for name, skipped in names.items():
                own_names = inspect.signature(getattr(trainer, name)).parameters.keys()
                self.parser.run_arguments |= own_names - skipped - {"self"}
            self._add_arguments(self.parser)
            self.parser.add_run_arguments(self.parser.run_arguments)
            return
        added = self.parser.add_subcommands()
        for name, skipped in names.items():
            about = (getattr(trainer, name).__doc__ or "").strip().partition("\n")[0]
            options = {"description": about, **parser_kwargs.get(name, {})}
            parser = self._subparsers[name] = self.init_parser(**options)
            # First, so that others may be linked to them.
            self._arguments_of[name] = parser.add_method_arguments(trainer, name, skip=skipped)
            self._add_arguments(parser)
            added.add_subcommand(name, parser, help=about)

    def _add_arguments(self, parser: TrainerArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.schedulers:
                parser.add_lr_scheduler_args()
        self.link_optimizers_and_lr_schedulers(parser)

    def add_default_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add `--seed_everything`."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="the seed; true: that of STRATAGEM_SEED, or 0; false: none",
        )

    def add_core_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add the arguments of Trainer, Module and DataModule."""
        parser.add_component_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": value for name, value in self.trainer_defaults.items()}
        defaults.pop("trainer.callbacks", None)
        parser.set_defaults(defaults)
        parser.add_component_args(
            self.model_class or Module, "model", subclass_mode=self.subclass_mode_model
        )
        parser.add_component_args(
            self.datamodule_class or DataModule,
            "data",
            subclass_mode=self.subclass_mode_data,
            # A model may have loaders of its own.
            required=self.datamodule_class is not None,
        )

    def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Override to add arguments, or to link some: `parser.link_arguments(source, target)`."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the Trainer's methods that are subcommands, with arguments that are left out."""
        return {
            name: _NOT_ASKED & inspect.signature(getattr(Trainer, name)).parameters.keys()
            for name in ("fit", "validate", "test", "predict")
        }

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: TrainerArgumentParser) -> None:
        """Pass optimizers and schedulers to the arguments that are linked to them."""
        for key, (added, link_to) in {**parser.optimizers, **parser.schedulers}.items():
            if link_to == AUTOMATIC:
                continue
            if isinstance(added, tuple):
                parser.link_arguments(key, link_to)
            else:
                described = functools.partial(_described, added)
                parser.link_arguments(key, link_to, compute_fn=described)

    def parse_arguments(
        self, parser: TrainerArgumentParser, args: list[str] | Mapping[str, Any] | None
    ) -> None:
        """Read the arguments into `config`."""
        if isinstance(args, (Mapping, argparse.Namespace)):
            self.config = parser.parse_object(_plain(args))
        else:
            self.config = parser.parse_args(args)
        for name in parser.added_run_arguments:
            if self.config.get(name) is None:
                self.config.pop(name, None)

    def _parser(self) -> TrainerArgumentParser:
        return self.parser if self.subcommand is None else self._subparsers[self.subcommand]

    def _of_subcommand(self, config: Any) -> Any:
        return config if self.subcommand is None else config[self.subcommand]

    def _get(self, config: Any, key: str) -> Any:
        return self._of_subcommand(config).get(key)

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is not False:
            chosen = seed_everything(None if seed is True else seed, workers=True)
            self._of_subcommand(self.config)["seed_everything"] = chosen

    # -- the objects

    def before_instantiate_classes(self) -> None:
        """Override to do something once the config is read."""

    def instantiate_classes(self) -> None:
        """Make datamodule, model and trainer."""
        self.config_init = self.parser.make_objects(self.config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._make_configure_optimizers()
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Override to do something once the objects are there."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return a Trainer with the config's arguments, updated by `kwargs`."""
        options = {**(self._get(self.config_init, "trainer") or {}), **kwargs}
        if "callbacks" not in options:
            warnings.warn(
                f"The `{self.trainer_class.__name__}` class does not expose the `callbacks` "
                "argument, so those of the config, and the one that saves it, are left out",
                stacklevel=2,
            )
            return self.trainer_class(**options)
        callbacks: list[Callback] = as_list(options["callbacks"])
        callbacks += [self._get(self.config_init, key) for key in self._parser().callback_keys]
        callbacks += [
            instantiate_class((), one) if isinstance(one, Mapping) else one
            for one in as_list(self.trainer_defaults.get("callbacks"))
        ]
        if self.save_config_callback is not None and not options.get("fast_dev_run"):
            callbacks.append(
                self.save_config_callback(
                    self._parser(), self._of_subcommand(self.config), **self.save_config_kwargs
                )
            )
        return self.trainer_class(**{**options, "callbacks": callbacks})

    # -- optimizers

    @staticmethod
    def configure_optimizers(
        module: Module, optimizer: Optimizer, lr_scheduler: Scheduler | None = None
    ) -> Any:
        """Return the value for the model's `configure_optimizers`; may be overridden."""
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            scheduler = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}
        return [optimizer], [lr_scheduler]

    def _make_configure_optimizers(self) -> None:
        """Give the model a `configure_optimizers` of the optimizer that the config names."""
        if not self.auto_configure_optimizers:
            return
        parser = self._parser()
        optimizers = _automatic(parser.optimizers, (Optimizer,))
        schedulers = _automatic(parser.schedulers, SCHEDULERS)
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise ConfigurationError(
                f"{type(self).__name__} makes configure_optimizers of one optimizer and one "
                f"scheduler; expected at most one of each that is AUTOMATIC, received "
                f"{', '.join([*optimizers, *schedulers])}: give the others link_to=, and write "
                "configure_optimizers in the model"
            )
        described = [self._described_in_config(k, parser.optimizers) for k in optimizers]
        if not described or described[0] is None:
            return
        of_scheduler = [self._described_in_config(k, parser.schedulers) for k in schedulers]
        if self.model.defines("configure_optimizers"):
            warnings.warn(
                f"`{type(self.model).__name__}.configure_optimizers` will be overridden by "
                f"`{type(self).__name__}.configure_optimizers`, which takes the optimizer of the "
                "command line: leave one of the two out",
                stacklevel=3,
            )
        optimizer = instantiate_class(self.model.parameters(), described[0])
        scheduler = None
        if of_scheduler and of_scheduler[0] is not None:
            scheduler = instantiate_class(optimizer, of_scheduler[0])
        made = functools.partial(
            self.configure_optimizers, optimizer=optimizer, lr_scheduler=scheduler
        )
        self.model.configure_optimizers = MethodType(made, self.model)

    def _described_in_config(self, key: str, added: Mapping[str, tuple[Any, str]]) -> Any:
        """Return what the config says of an optimizer or scheduler; None: nothing."""
        described = self._get(self.config_init, key)
        made = added[key][0]
        if not described:
            return None
        return described if isinstance(made, tuple) else _described(made, described)

    # -- the run

    def _run_subcommand(self, name: str) -> None:
        options = self.config_init[name]
        arguments = {key: options.get(key) for key in self._arguments_of[name]}
        arguments["model"] = self.model
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        _call_if_there(self, f"before_{name}")
        getattr(self, name, getattr(self.trainer, name))(**arguments)
        _call_if_there(self, f"after_{name}")

    @property
    def config_dump(self) -> dict[str, Any]:
        """The config as weights-only-safe data."""
        text = self._parser().dump(
            self._of_subcommand(self.config), *WITH_NONE, skip_link_targets=False
        )
        plain: dict[str, Any] = yaml.safe_load(text)
        return plain


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Return an object that a config describes.

    Args:
        args: the first positional arguments, one value or a tuple of values.
        init: `class_path` (the import path of the class) and `init_args`.
    """
    import importlib

    module, _, name = init["class_path"].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    first = args if isinstance(args, tuple) else (args,)
    return found(*first, **(init.get("init_args") or {}))


def _plain(config: Any) -> Any:
    """Return a config of namespaces, argparse's or jsonargparse's, as one of dicts."""
    if isinstance(config, argparse.Namespace):
        config = vars(config)
    if isinstance(config, Mapping):
        return {key: _plain(value) for key, value in config.items()}
    return config


def _described(made: type, init_args: Any) -> dict[str, Any]:
    """Return the arguments of a class as a config describes an object of it."""
    plain = init_args.as_dict() if isinstance(init_args, Namespace) else init_args
    return {"class_path": f"{made.__module__}.{made.__qualname__}", "init_args": plain}


def _automatic(added: Mapping[str, tuple[Any, str]], bases: tuple[type, ...]) -> list[str]:
    return [
        key
        for key, (made, link_to) in added.items()
        if link_to == AUTOMATIC
        and any(issubclass(each, bases) for each in (made if isinstance(made, tuple) else (made,)))
    ]


def _call_if_there(owner: object, name: str) -> None:
    method = getattr(owner, name, None)
    if callable(method):
        method()


def run_program(arguments: list[str]) -> None:
    """Run `stratagem fit` and its kin; unnamed config files may come first."""
    import sys

    command, *rest = arguments
    files = 0
    while files < len(rest) and not rest[files].startswith("-"):
        files += 1
    named = [f"--config={file}" for file in rest[:files]]
    # The user's own modules are found in the current folder, as by `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    TrainerCLI(
        args=[command, *named, *rest[files:]],
        parser_kwargs={"prog": "stratagem", "default_env": True},
    )
