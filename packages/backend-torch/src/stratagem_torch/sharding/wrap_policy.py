"""Which modules are sharded as a group: gathered together, and freed together."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategies import StepModule

WrapPolicy = Callable[..., bool] | Collection[type[nn.Module]] | type[nn.Module] | int
"""Classes; a function of a module; or the smallest number of parameters of a group."""

DEFAULT_SIZE = 1_000_000
"""Parameters from which on an element of a ModuleList or Sequential is a group of its own."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def check_policy(policy: WrapPolicy | None) -> None:
    """Raise if a value is not a wrap policy.

    Raises:
        ConfigurationError: the value is not a policy; the message describes the accepted values.
    """
    if policy is None or _is_size(policy) or callable(policy):
        return
    classes = isinstance(policy, Collection) and not isinstance(policy, str)
    if classes and policy and all(_is_module_class(item) for item in policy):  # type: ignore[union-attr]
        return
    raise ConfigurationError(
        f"auto_wrap_policy={policy!r}: expected a class of modules or a set of them, a function of "
        "a module that returns a bool, or a number of parameters of at least 1"
    )


def find_groups(root: nn.Module, policy: WrapPolicy | None) -> list[nn.Module]:
    """Return the modules to shard as groups, without the root; children before their parents.

    Modules outside of all groups belong to the group of the root. By default, the groups are the
    elements of containers (ModuleList, ModuleDict, Sequential) with at least `DEFAULT_SIZE`
    parameters that are not in a smaller group: the layers of most models. Elements that share a
    parameter with another group stay in the group of the root.

    Raises:
        ConfigurationError: a policy puts a shared parameter into two groups.
    """
    parts = [part for part in _bottom_up(root) if part is not root]
    if policy is None or _is_size(policy):
        return _by_size(root, parts, policy)
    groups = _by_classes(parts, policy) if not _is_function(policy) else _by_function(parts, policy)
    if not groups:
        kinds = sorted({type(part).__name__ for part in parts})
        # No error: of several models, one may be small.
        warnings.warn(
            f"auto_wrap_policy={policy!r} chooses none of the model's modules, so that all of its "
            f"parameters are gathered at once; the model has {', '.join(kinds)}: choose the layers "
            "that it repeats",
            stacklevel=2,
        )
    if tied := _tied_over_groups(root, groups):
        names, _ = next(iter(tied.values()))
        raise ConfigurationError(
            f"the parameters {' and '.join(names)} are one tensor, but auto_wrap_policy="
            f"{policy!r} puts them into different groups, which cannot share it: leave "
            "the modules that hold them out, or choose one module that holds both"
        )
    return groups


def _by_size(root: nn.Module, parts: list[nn.Module], size: Any) -> list[nn.Module]:
    smallest = DEFAULT_SIZE if size is None else size
    lists = [part for part in (root, *parts) if isinstance(part, _LISTS)]
    elements = {child for part in lists for child in part.children()}
    taken: set[int] = set()
    groups = []
    for part in parts:
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)) or part not in elements:
            continue  # lists are never called themselves
        own = {id(p): p.numel() for p in part.parameters() if id(p) not in taken}
        if sum(own.values()) >= smallest:
            taken.update(own)
            groups.append(part)
    while tied := _tied_over_groups(root, groups):
        _, owners = next(iter(tied.values()))
        groups = [group for group in groups if group not in owners]
    return groups


def _by_classes(parts: list[nn.Module], policy: Any) -> list[nn.Module]:
    classes = (policy,) if isinstance(policy, type) else tuple(policy)
    return [part for part in parts if isinstance(part, classes) and _has_parameters(part)]


def _by_function(parts: list[nn.Module], policy: Any) -> list[nn.Module]:
    if "recurse" not in inspect.signature(policy).parameters:
        return [part for part in parts if _has_parameters(part) and policy(part)]
    # A policy of torch.distributed.fsdp.wrap, which is also asked whether to look further.
    taken: set[int] = set()
    groups = []
    for part in parts:
        own = {id(p): p.numel() for p in part.parameters() if id(p) not in taken}
        size = sum(own.values())
        if size and policy(module=part, recurse=False, nonwrapped_numel=size):
            taken.update(own)
            groups.append(part)
    return groups


def _bottom_up(root: nn.Module) -> Iterator[nn.Module]:
    """Yield each module once, after the modules in it."""
    seen: set[nn.Module] = set()

    def visit(part: nn.Module) -> Iterator[nn.Module]:
        if part not in seen:
            seen.add(part)
            for child in part.children():
                yield from visit(child)
            yield part

    yield from visit(root)


def _tied_over_groups(
    root: nn.Module, groups: list[nn.Module]
) -> dict[int, tuple[list[str], list[nn.Module]]]:
    """Return names and groups of the parameters that lie in several groups (or the root's)."""
    chosen = set(groups)
    names: dict[int, list[str]] = {}
    owners: dict[int, list[nn.Module]] = {}
    seen: set[nn.Module] = set()

    def visit(part: nn.Module, prefix: str, owner: nn.Module) -> None:
        if part in seen:
            return
        seen.add(part)
        owner = part if part in chosen else owner
        for name, parameter in part._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(prefix + name)
                known = owners.setdefault(id(parameter), [])
                if owner not in known:
                    known.append(owner)
        for name, child in part.named_children():
            # Names are the user's, without the one that a StepModule puts before them.
            visit(child, "" if isinstance(part, StepModule) else f"{prefix}{name}.", owner)

    visit(root, "", root)
    return {
        key: (names[key], [owner for owner in found if owner is not root])
        for key, found in owners.items()
        if len(found) > 1
    }


def _has_parameters(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _is_size(policy: Any) -> bool:
    return isinstance(policy, int) and not isinstance(policy, bool) and policy >= 1


def _is_module_class(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, nn.Module)


def _is_function(policy: Any) -> bool:
    return callable(policy) and not _is_module_class(policy)
