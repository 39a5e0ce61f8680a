"""Former names of the plugin API, what took their place, and the errors for a plugin with one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from stratagem import __version__
from stratagem.discovery.absent import find_or_explain
from stratagem.discovery.entry_points import fits, is_ours
from stratagem.errors import ConfigurationError, PluginError

T = TypeVar("T")


class Change(NamedTuple):
    """The change of a name.

    Attributes:
        now: the name that replaces it.
        how: further changes that an author has to make; "" if the name is the only change.
        ends: the release that removes the former name. Until then a class may override or call the
            former method, with a DeprecationWarning; "" for a removed name.
    """

    now: str
    how: str = ""
    ends: str = ""

    @property
    def works(self) -> bool:
        """Whether the former name of a method still works."""
        return bool(self.ends) and fits(f"<{self.ends}", __version__) is True


_OBJECTION = {"objection": Change("incompatible_because")}

FORMER: Mapping[str, Mapping[str, Change]] = {
    "Strategy": {
        "take_batch_size": Change("set_batch_size"),
        "join_training": Change("adopt_peer_state"),
        "before_evaluation": Change("evaluation", "it returns a context manager"),
        "take_step_options": Change("components", "read self.components.step after bind"),
    },
    "ParallelStrategy": {
        "data_shard_of": Change("data_split_of"),
        "join_ranks": Change("init_process_group"),
    },
    "Ranks": {
        "data_shard": Change("data_split"),
        "data_shards": Change("data_splits"),
        "data_part": Change("run_split"),
        "evaluation_shard": Change("eval_split"),
        "gather_plain": Change("gather_objects"),
        "reduce_numbers": Change("all_reduce_ints"),
        "reduce_boolean_decision": Change(
            "all_reduce_ints", 'reduce [int(decision)] by "min" for all, by "max" for any'
        ),
    },
    "Accelerator": {"own_strategies": Change("requires_dedicated_strategies")},
    "CheckpointIO": {"takes_shards": Change("supports_shards")},
    "Callback": {
        "monitors": Change("runs_after_metrics"),
        "take_over": Change("load_remote_state"),
    },
    "Capabilities": {
        "owns_clipping": Change("engine_clips"),
        "owns_step": Change("engine_steps"),
        "rebinds_optimizers": Change("accepts_existing_optimizers"),
        "replicated": Change(
            "parameters", '"same" for replicated=True, otherwise "drift" or "divided"'
        ),
        "uneven_evaluation": Change("allows_uneven_eval"),
    },
    "StrategySpec": _OBJECTION,
    "PrecisionSpec": _OBJECTION,
    "ClusterEnvironmentSpec": _OBJECTION,
    "AcceleratorSpec": {"own_strategies": Change("requires_dedicated_strategies")},
    "RunPlan": {
        "environments_passed_over": Change("rejected_environments"),
        "runs_elsewhere": Change("remote"),
    },
    "StrategyConformance": {
        "parts": Change("data_groups"),
        "kept": Change("allowed_leftovers"),
    },
}
"""The change of each former name, by the class that had it: methods, attributes and arguments."""


def former_names(kind: type) -> dict[str, Change]:
    """Return the former names of a class and of its bases.

    Example:
        >>> from stratagem.discovery.former import former_names
        >>> from stratagem.strategies import Ranks
        >>> former_names(Ranks)["data_part"].now
        'run_split'
    """
    return changes_of(base.__name__ for base in kind.__mro__ if _is_ours(base))


def changes_of(classes: Iterable[str]) -> dict[str, Change]:
    """Return the former names of classes, given by their names."""
    return {name: each for kind in classes for name, each in FORMER.get(kind, {}).items()}


def _is_ours(kind: type) -> bool:
    return is_ours(kind.__module__) or kind.__module__.partition(".")[0] == "stratagem_testing"


def what_became(place: str, change: Change) -> str:
    """Return the message for a place that has a former name.

    Example:
        >>> from stratagem.discovery.former import Change, what_became
        >>> what_became("Mine.take_batch_size", Change("set_batch_size"))[:68]
        'Mine.take_batch_size is a former name, which nothing reads or calls:'
    """
    also = f" ({change.how})" if change.how else ""
    return (
        f"{place} is a former name, which nothing reads or calls: use {change.now}{also}; "
        "docs/extend/plugin-api.md lists the former names of the plugin API"
    )


def missing_attribute(owner: object, name: str) -> Any:
    """Raise the AttributeError of an object; used as `__getattr__` of the plugin interfaces.

    The error for a former name has the present name. A former name that still works returns the
    attribute of the present name, with a DeprecationWarning.
    """
    kind = type(owner).__name__
    change = former_names(type(owner)).get(name)
    if change is None:
        return find_or_explain(owner, name)
    if change.works:
        _warn(f"{kind}.{name}", change)
        return getattr(owner, change.now)
    raise AttributeError(what_became(f"{kind}.{name}", change), name=name, obj=owner)


def with_former_names(kind: type[T]) -> type[T]:
    """Make a class of the plugin API refuse former names of arguments and attributes; a decorator.

    Example:
        >>> from stratagem.discovery import Capabilities
        >>> Capabilities(uneven_evaluation=False)
        Traceback (most recent call last):
        stratagem.errors.PluginError: Capabilities(uneven_evaluation=...) is a former name, ...
    """
    create: Any = vars(kind).get("__init__")
    kind.__getattr__ = missing_attribute  # type: ignore[attr-defined]
    if create is None:
        return kind

    @functools.wraps(create)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        changes = former_names(kind) if named else {}
        for name in changes.keys() & named.keys():
            place = f"{type(self).__name__}({name}=...)"
            raise PluginError(what_became(place, changes[name]))
        create(self, *arguments, **named)

    kind.__init__ = __init__  # type: ignore[method-assign]
    return kind


def check_former_names(kind: type) -> None:
    """Check that an author's class overrides no former name of the plugin API.

    A former method that still works is called by its new name, with a DeprecationWarning. A use of
    a former name is an AttributeError with the present name, and `stratagem doctor` lists the uses.

    Args:
        kind: the author's class.

    Raises:
        ConfigurationError: the message names the place, and the replacement of the former name.
    """
    for name, change in former_names(kind).items():
        for owner in kind.__mro__:
            if not _is_override(owner, name, change):
                continue
            if not change.works:
                raise ConfigurationError(what_became(f"{owner.__name__}.{name}", change))
            _serve(owner, kind, name, change)


def check_former_values(owner: object) -> None:
    """Check that no attribute of an object was set by its former name.

    Raises:
        ConfigurationError: the message names the attribute, and its replacement.
    """
    for name, change in former_names(type(owner)).items():
        if name in vars(owner):
            raise ConfigurationError(what_became(f"{type(owner).__name__}.{name}", change))


def _is_override(owner: type, name: str, change: Change) -> bool:
    """Whether a class defines a former name; an attribute of another type is the author's own."""
    found = vars(owner).get(name)
    kinds = (FunctionType, property, staticmethod, classmethod, bool)
    return isinstance(found, kinds) and found is not vars(owner).get(change.now)


def _serve(owner: type, kind: type, name: str, change: Change) -> None:
    """Make the calls of a method's present name reach the override of its former name."""
    _warn(f"{owner.__name__}.{name}", change)
    above = kind.__mro__[kind.__mro__.index(owner) + 1 :]
    home = next(base for base in above if change.now in vars(base))
    setattr(home, name, vars(home)[change.now])  # for super() in the override
    if change.now not in vars(owner):
        setattr(owner, change.now, vars(owner)[name])


def _warn(place: str, change: Change) -> None:
    warnings.warn(
        f"{place} is a former name that ends with release {change.ends}: use {change.now}",
        DeprecationWarning,
        stacklevel=4,
    )
