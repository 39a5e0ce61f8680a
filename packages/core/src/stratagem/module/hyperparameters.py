"""HyperParameters: the arguments of an object's `__init__`, as checkpoints hold them."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from importlib import import_module
from operator import getitem
from pathlib import Path
from types import FrameType
from typing import Any

from stratagem.errors import CheckpointMismatchError, UserCodeError
from stratagem.state.safe_data import find_offending_value


class HyperParameters(dict[str, Any]):
    """A dict of hyperparameters, whose items are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"hparams has no attribute {name!r}; there are {', '.join(self) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperParametersMixin:
    """Mixin that records the arguments of `__init__` as hyperparameters.

    Example:
        >>> from stratagem.module.hyperparameters import HyperParametersMixin
        >>> class Model(HyperParametersMixin):
        ...     def __init__(self, width=4):
        ...         self.save_hyperparameters()
        >>> Model(width=8).hparams.width
        8

    Attributes:
        CHECKPOINT_HYPER_PARAMS_KEY, CHECKPOINT_HYPER_PARAMS_NAME, CHECKPOINT_HYPER_PARAMS_TYPE: the
            entries of a checkpoint with the hyperparameters, the name of their argument, and their
            class.
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    @property
    def hparams(self) -> HyperParameters:
        """The hyperparameters that `save_hyperparameters` recorded."""
        kept: HyperParameters = self.__dict__.setdefault("_hparams", HyperParameters())
        return kept

    @property
    def hparams_initial(self) -> HyperParameters:
        """The hyperparameters at the time of `save_hyperparameters`, which loggers receive."""
        kept: HyperParameters = self.__dict__.setdefault("_hparams_initial", HyperParameters())
        return HyperParameters(kept)

    @property
    def hparams_name(self) -> str:
        """The name of the `__init__` argument that held all of them as one dict, else ""."""
        name: str = self.__dict__.get("_hparams_name", "")
        return name

    def remove_ignored_hparams(self, ignore_list: Sequence[str]) -> None:
        """Remove hyperparameters that the `__init__` of a base class has recorded."""
        for name in ignore_list:
            self.hparams.pop(name, None)

    def save_hyperparameters(
        self,
        *names: str | Mapping[str, Any] | Namespace,
        ignore: str | Sequence[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Record the arguments of the calling `__init__` in `hparams` and in checkpoints.

        In the `__init__` of a base class, this also records the arguments of the subclass's
        `__init__`. Values that cannot be loaded without executing code, such as modules and
        functions, are in `hparams`, but not in checkpoints, and a warning names them. Pass these to
        `load_from_checkpoint`. OmegaConf configs are saved with their interpolations resolved, and
        loaded as configs.

        Args:
            *names: the arguments to record. Default: all. Or pass one dict, argparse.Namespace or
                config, to record its entries.
            ignore: the arguments to leave out.
            frame: the frame of the `__init__`. Default: the caller's.
            logger: if True, also send the hyperparameters to the loggers.

        Raises:
            UserCodeError: if a name is not an argument of `__init__`.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        first = names[0] if len(names) == 1 else None
        if frame is None and (here := inspect.currentframe()) is not None:
            frame = here.f_back
        kept = arguments_of_init(self, frame)
        if isinstance(first, (Mapping, Namespace)):
            self.__dict__["_hparams_name"] = next((k for k, v in kept.items() if v is first), "")
            kept = dict(vars(first) if isinstance(first, Namespace) else first)
            wanted = set(kept)
        else:
            wanted = set(map(str, names)) or set(kept)
            if strangers := [name for name in names if name not in kept]:
                raise UserCodeError(
                    f"save_hyperparameters({', '.join(map(repr, names))}): {strangers[0]!r} is no "
                    f"argument of {type(self).__name__}.__init__; expected names of its arguments "
                    f"({', '.join(kept) or 'it has none'}), or one dict or argparse.Namespace"
                )
        found = {k: v for k, v in kept.items() if k in wanted and k not in ignored}
        for name in ignored:
            self.hparams.pop(name, None)
        if _is_config(first) and not ignored and not self.hparams:
            self.__dict__["_hparams"] = first
        else:
            self.hparams.update(found)
        self.__dict__["_hparams_initial"] = HyperParameters(self.hparams if logger else {})


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return a Trainer's checkpoint, from a local path or a URL.

    Raises:
        CheckpointNotFoundError: if the path does not exist.
        CheckpointCorruptError: if the file is damaged.
        CheckpointMismatchError: if the file is not a Trainer's checkpoint.
    """
    from stratagem.checkpoint import SingleFileCheckpointIO
    from stratagem.checkpoint.trainer_format import check_trainer_checkpoint
    from stratagem.storage import paths

    return check_trainer_checkpoint(
        SingleFileCheckpointIO().load_checkpoint(paths.parse_user_path(path)), path
    )


def arguments_from(
    cls: Callable[..., Any], checkpoint: Mapping[str, Any], prefix: str, passed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the `__init__` arguments for a class, from a checkpoint's hyperparameters.

    Args:
        cls: the class.
        checkpoint: a Trainer's checkpoint.
        prefix: the prefix of the checkpoint's keys: "" for a Module, "datamodule_" for a
            DataModule.
        passed: the user's arguments, which take precedence.

    Raises:
        CheckpointMismatchError: if a required argument is neither saved nor passed.
    """
    saved = _with_configs(
        checkpoint.get(f"{prefix}hyper_parameters", {}),
        checkpoint.get(f"{prefix}hparams_configs", []),
    )
    holder = checkpoint.get(f"{prefix}hparams_name", "")
    accepted = inspect.signature(cls).parameters
    within = holder if holder in accepted and holder not in passed else ""
    together = {**saved, **passed}
    of_holder = _config(together) if _is_config(saved) else HyperParameters(together)
    arguments = accepted_by(cls, {within: of_holder} if within else together)
    missing = [
        name
        for name, p in accepted.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing := [name for name in missing if name not in arguments]:
        raise CheckpointMismatchError(
            f"the checkpoint holds no value of {', '.join(missing)}, which "
            f"{cls.__name__} needs: pass them to load_from_checkpoint, as in {missing[0]}=..., "
            "or let __init__ call self.save_hyperparameters()"
        )
    return arguments


def accepted_by(cls: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a class accepts by name."""
    accepted = inspect.signature(cls).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    return {name: v for name, v in arguments.items() if everything or name in accepted}


def arguments_of_init(module: object, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments of the running `__init__` methods of `module`."""
    kept: dict[str, Any] = {}
    while frame is not None and any(value is module for value in frame.f_locals.values()):
        for owner in type(module).__mro__:
            init = inspect.unwrap(vars(owner).get("__init__", object.__init__))
            if getattr(init, "__code__", None) is not frame.f_code:
                continue
            for parameter in list(inspect.signature(init).parameters.values())[1:]:
                if parameter.kind is parameter.VAR_KEYWORD:
                    kept.update(frame.f_locals.get(parameter.name, {}))
                elif parameter.kind is not parameter.VAR_POSITIONAL:
                    # The method may have deleted an argument.
                    kept.update({k: v for k, v in frame.f_locals.items() if k == parameter.name})
        frame = frame.f_back
    return kept


def savable(
    parameters: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str], list[list[Any]]]:
    """Split hyperparameters by whether a checkpoint can store them.

    Returns:
        The hyperparameters that a checkpoint can store; the reason for each other hyperparameter,
        by name; and the positions of OmegaConf configs, each a list of keys and indices.

    Example:
        >>> savable({"lr": 0.1, "activation": abs})[0]
        {'lr': 0.1}
    """
    places: list[list[Any]] = []
    with suppress(RecursionError):  # a value contains itself; find_offending_value reports it
        parameters = _without_configs(parameters, (), places)
    reasons = {name: find_offending_value(value) for name, value in parameters.items()}
    kept = {name: value for name, value in parameters.items() if not reasons[name]}
    places = [place for place in places if not place or place[0] in kept]
    return kept, {name: reason for name, reason in reasons.items() if reason}, places


def _is_config(value: object) -> bool:
    return type(value).__module__.startswith("omegaconf.")


def _without_configs(value: Any, place: tuple[Any, ...], places: list[list[Any]]) -> Any:
    """Replace OmegaConf's configs in a value by plain data; add their positions to `places`."""
    if _is_config(value):
        with suppress(Exception):  # an interpolation refers to a missing value
            value = import_module("omegaconf").OmegaConf.to_container(value, resolve=True)
            places.append(list(place))
    elif type(value) in (dict, HyperParameters):
        return {k: _without_configs(v, (*place, k), places) for k, v in value.items()}
    elif type(value) is list:
        return [_without_configs(v, (*place, i), places) for i, v in enumerate(value)]
    return value


def _with_configs(saved: Any, places: list[list[Any]]) -> Any:
    """Return saved hyperparameters with OmegaConf's configs restored at their positions."""
    for place in places:
        if not place:
            return _config(saved)
        with suppress(KeyError, IndexError, TypeError):
            holder = reduce(getitem, place[:-1], saved)
            holder[place[-1]] = _config(holder[place[-1]])
    return saved


def _config(value: Any) -> Any:
    """Return plain data as a config, unless reading the config would call a resolver."""
    with suppress(Exception):  # OmegaConf is not installed, or rejects the value
        return value if "${" in str(value) else import_module("omegaconf").OmegaConf.create(value)
    return value
