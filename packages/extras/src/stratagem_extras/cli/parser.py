"""TrainerArgumentParser: arguments from the signatures of trainers, models and optimizers."""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, class_from_function, get_loader, set_loader
from torch import optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError
from stratagem.module import DataModule, Module
from stratagem.trainer import Trainer

AUTOMATIC = "AUTOMATIC"
"""As `link_to`: the model's `configure_optimizers` is made from it."""


_MOST_VALUES = 100_000
"""Values of a config, those that its aliases repeat included."""


def _check_aliases(text: str) -> None:
    """Raise if the aliases of a config expand to more values than a program could use.

    Raises:
        yaml.YAMLError: the aliases expand to too many values, or the text is not YAML.
    """
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, 1))
            continue
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.AliasEvent):
            # An alias within its own anchor has no end.
            anchor, size = None, sizes.get(event.anchor, _MOST_VALUES + 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
        if anchor is not None:
            sizes[anchor] = size
        outer, count = opened.pop()
        opened.append((outer, count + size))
        if count + size > _MOST_VALUES:
            raise yaml.YAMLError(
                f"the config has more than {_MOST_VALUES} values, most of them by aliases (*name): "
                "write fewer of them out"
            )


def _check_keys(text: str) -> None:
    """Raise if a mapping of a config has a key twice, since the first would have no effect.

    Raises:
        yaml.YAMLError: a key is repeated, or the text is not YAML.
    """
    nodes = [yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))]
    seen: set[int] = set()  # an alias is the node that it stands for
    while nodes:
        node = nodes.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            nodes += node.value
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            nodes += (key, value)
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(
                    f"the config has the key {name!r} twice in one mapping, in lines "
                    f"{lines[name]} and {line}: write its values under one of them"
                )
            lines[name] = line


_NOISE = re.compile(
    r"\s*(-\s*)?(Does not validate against any of the Union|Subtypes: \[|Given value type: |"
    r"Expected a <class 'NoneType'>)"
)
"""Lines of jsonargparse's errors that say how it has read a type hint."""
_load_yaml = get_loader("yaml")


def _load_bounded(text: str) -> Any:
    if "*" in text:
        _check_aliases(text)
    _check_keys(text)
    return _load_yaml(text)


set_loader("yaml", _load_bounded, (yaml.YAMLError,))


class ReduceLROnPlateau(optim.lr_scheduler.ReduceLROnPlateau):
    """Torch's scheduler, with the name of the value that it monitors.

    Args:
        optimizer: the optimizer of the learning rate.
        monitor: name of the logged value.
        *args, **kwargs: arguments of torch's class.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


Scheduler = LRScheduler | ReduceLROnPlateau
SCHEDULERS: tuple[type, ...] = (LRScheduler, ReduceLROnPlateau)
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""The type of a model's argument that makes an optimizer of parameters."""
LRSchedulerCallable = Callable[[Optimizer], Scheduler]
"""The type of a model's argument that makes a scheduler of an optimizer."""


class TrainerArgumentParser(ArgumentParser):  # type: ignore[misc]  # checked without jsonargparse
    """jsonargparse's ArgumentParser, which knows optimizers, schedulers and callbacks.

    Args:
        *args: arguments of `jsonargparse.ArgumentParser`, as `**kwargs`.
        description: the first text of `--help`.
        env_prefix: prefix of the names of environment variables.
        default_env: read environment variables: PREFIX_FIT__TRAINER__MAX_EPOCHS.
        **kwargs: see `*args`.

    Attributes:
        callback_keys: the keys of the callbacks in the config that go to the Trainer.
        optimizers, schedulers: by key in the config, the class, or a tuple of bases, and the linked
            key.
        run_arguments: the names of arguments of subcommands, for a program without subcommands.
        added_run_arguments: the run arguments that the program has not added itself.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Train a model, as a config and options say.",
        env_prefix: str | bool = "STRATAGEM",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            *args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs
        )
        self.callback_keys: list[str] = []
        self.optimizers: dict[str, tuple[Any, str]] = {}
        self.schedulers: dict[str, tuple[Any, str]] = {}
        self.run_arguments: set[str] = set()
        self.added_run_arguments: list[str] = []

    def add_run_arguments(self, names: Iterable[str]) -> None:
        """Accept arguments of subcommands, which configs saved by a subcommand contain.

        Args:
            names: the names; names that the parser has are skipped.
        """
        for name in sorted(names):
            if f"--{name}" not in self._option_string_actions:
                self.add_argument(f"--{name}", type=Any, help=SUPPRESS)
                self.added_run_arguments.append(name)

    def link_arguments(self, source: str | tuple[str, ...], *args: Any, **kwargs: Any) -> None:
        """Link arguments; see `jsonargparse.ArgumentParser.link_arguments`."""
        sources = (source,) if isinstance(source, str) else source
        self.add_run_arguments(self.run_arguments.intersection(sources))
        super().link_arguments(source, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print an error, without the lines that do not help, and end with exit code 2."""
        lines = [line for line in message.splitlines() if not _NOISE.match(line)]
        # A class is shown by its name.
        text = re.sub(r"(?:a )?<class '(?:\w+\.)*(\w+)'>", r"\1", "\n".join(lines))
        # As jsonargparse up to 4.41 has it.
        text = re.sub(r"Key ('\S+') is not expected", r"Option \1 is not accepted", text)
        super().error(text, ex)
        raise AssertionError  # `error` ends the program or raises

    def make_objects(self, config: Namespace) -> Any:
        """Return a config with objects in the place of their descriptions."""
        parser: Any = self
        # jsonargparse has renamed it in 4.49.
        make = getattr(parser, "instantiate", None) or parser.instantiate_classes
        return make(config)

    def print_usage(self, file: Any = None) -> None:
        """Print the usage, unless an error follows: that has 50 lines."""
        if file is not sys.stderr:
            super().print_usage(file)

    def add_component_args(
        self,
        component: Callable[..., Any],
        nested_key: str | None,
        *,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a Trainer, Module, DataModule or Callback.

        Args:
            component: the class, or a function that returns an instance.
            nested_key: the key of the arguments in the config; None: the top level.
            subclass_mode: accept any subclass, by `class_path`.
            required: whether a subclass must be given.

        Returns:
            The added names.

        Raises:
            ConfigurationError: the component has another type.
        """
        made = component if isinstance(component, type) else class_from_function(component)
        if not issubclass(made, (Trainer, Module, DataModule, Callback)):
            raise ConfigurationError(
                f"arguments of {component!r} cannot be added: expected a Trainer, Module, "
                "DataModule or Callback, or a function with that return type"
            )
        if issubclass(made, Callback) and nested_key:
            self.callback_keys.append(nested_key)
        if subclass_mode:
            add = self.add_subclass_arguments
            return add(made, nested_key, fail_untyped=False, required=required) or []
        return self.add_class_arguments(  # type: ignore[no-any-return]
            made,
            nested_key,
            fail_untyped=False,
            instantiate=not issubclass(made, Trainer),
            sub_configs=True,
        )

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of an optimizer; a tuple: of any subclass, by `class_path`.

        Args:
            optimizer_class: the class, or bases.
            nested_key: where they stand in the config.
            link_to: the argument that receives it; by default `configure_optimizers` is made.
        """
        self._add_of_optimizer(optimizer_class, nested_key, "params")
        self.optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: type | tuple[type, ...] = SCHEDULERS,
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of a learning rate scheduler, as `add_optimizer_args` does."""
        self._add_of_optimizer(lr_scheduler_class, nested_key, "optimizer")
        self.schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_of_optimizer(self, added: Any, nested_key: str, first: str) -> None:
        options = {"instantiate": False, "fail_untyped": False, "skip": {first}}
        if isinstance(added, tuple):
            self.add_subclass_arguments(added, nested_key, required=False, **options)
        else:
            self.add_class_arguments(added, nested_key, sub_configs=True, **options)
