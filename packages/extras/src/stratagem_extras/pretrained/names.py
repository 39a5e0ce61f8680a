"""Which tensor of a folder belongs to which parameter or buffer of a model."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from stratagem.errors import (
    CheckpointMismatchError,
    ConfigurationError,
    format_names,
    format_text,
    with_explanation,
)
from stratagem.strategies import PreparedModel, Strategy, user_module

Shape = tuple[int, ...]
_SHOWN = 5
_OF_PEFT = re.compile(r"\.(base_layer|original_module|token_adapter|modules_to_save\.[^.]+)(?=\.)")


@dataclass
class Names:
    """The names of a folder in a model.

    Attributes:
        sources: the folder's name of each tensor of the model that the folder has.
        into: the prefix of the model's names that the folder's names lack.
        lacks: the prefix of the folder's names that the model's names lack.
        missing: names of the model that the folder lacks, within the part that it describes.
        unexpected: names of the folder that the model lacks.
    """

    sources: dict[str, str] = field(default_factory=dict)
    into: str = ""
    lacks: str = ""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def listing_all(strategy: Strategy, prepared: PreparedModel) -> AbstractContextManager[Any]:
    """Let a model list the tensors of all ranks, with one object for a tied weight.

    Tensors of other ranks are placeholders.

    Args:
        strategy: the strategy that prepared the model. Without a `listing_all(module)`, the model
            lists its own tensors.
        prepared: the model.

    Example:
        >>> from stratagem import Lite
        >>> lite = Lite(accelerator="cpu")
        >>> prepared = lite.setup(nn.Linear(2, 1)).prepared
        >>> with listing_all(lite.strategy, prepared):
        ...     list(prepared.original.state_dict())
        ['weight', 'bias']
    """
    made = getattr(strategy, "listing_all", None)
    return nullcontext() if made is None else made(user_module(prepared.original))


def tensors_of(state: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of a model's parameters and buffers, unsharded.

    Example:
        >>> import torch
        >>> tensors_of(torch.nn.Linear(2, 1).state_dict())
        {'weight': (1, 2), 'bias': (1,)}
    """
    # An engine that cuts parameters keeps the shape of the whole beside its part.
    return {
        name: tuple(getattr(value, "ds_shape", value.shape))
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def ties_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the first name of each tensor of a state dict with its parameters (`keep_vars`).

    Example:
        >>> import torch
        >>> model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
        >>> model["b"].weight = model["a"].weight
        >>> ties_of(model.state_dict(keep_vars=True))["b.weight"]
        'a.weight'
    """
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(value), name)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def match_names(
    own: Sequence[str], stored: Sequence[str], module: nn.Module | None = None, part: str = ""
) -> Names:
    """Match the names of a folder to the names of a model.

    The part of the model that the folder describes is the one where most names end alike. A model
    of transformers has rules of its own: former names, and names that it ignores.

    Args:
        own: the names of the model.
        stored: the names of the folder.
        module: the model; None: unknown.
        part: the submodule that the folder describes; "": find it.

    Raises:
        ConfigurationError: several submodules fit equally, or the model of transformers would
            merge tensors of the folder.

    Example:
        >>> match_names(["net.a.weight", "net.b.weight"], ["a.weight", "b.weight"]).into
        'net.'
    """
    parts = {} if module is None else _parts_of_transformers(module)
    plain = _plain_names(own, module)
    renamed = {name: name for name in stored}
    if inside := [model for path, model in parts.items() if path.startswith(_dotted(part))]:
        renamed = _renamed(inside[0], stored)
    prefix = _dotted(part)
    lacks, into = _most_alike([name for name in plain if name.startswith(prefix)], renamed, part)
    scope = next((path for path in sorted(parts, key=len) if into.startswith(path)), into)
    names = Names(into=into, lacks=lacks)
    for new, name in renamed.items():
        places = [into + new.removeprefix(lacks)] if new.startswith(lacks) else []
        found = next((p for p in (*places, into + new, scope + new) if p in plain), None)
        if found is None:
            names.unexpected.append(name)
        else:
            names.sources |= dict.fromkeys(plain[found], name)
    names.missing = [n for n in own if n.startswith(scope) and n not in names.sources]
    model = parts.get(scope)
    names.missing = _not_ignored(model, "missing", names.missing, scope)
    names.unexpected = _not_ignored(model, "unexpected", names.unexpected, "")
    return names


def prefix_to_drop(own: Sequence[str], module: nn.Module | None = None, part: str = "") -> str:
    """Return the prefix of a model's names that its folder's names would lack.

    It is the path of the only model of transformers, or else the longest that all names have.

    Example:
        >>> prefix_to_drop(["model.layers.0.weight", "model.head.weight"])
        'model.'
    """
    if part:
        return _dotted(part)
    parts = {} if module is None else _parts_of_transformers(module)
    if len(parts) == 1:
        return next(iter(parts))
    common: list[str] = []
    for level in zip(*(name.split(".")[:-1] for name in own), strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return _dotted(".".join(common))


def part_of_transformers(module: nn.Module, prefix: str) -> Any:
    """Return the model of transformers at a prefix; None: another module is there."""
    return _parts_of_transformers(module).get(prefix)


def check_names(
    names: Names,
    shapes: Mapping[str, Shape],
    stored: Mapping[str, Shape],
    ties: Mapping[str, str],
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> None:
    """Check that a folder fits a model; of tied parameters one name suffices.

    Args:
        names: the names of the folder in the model.
        shapes: the shapes of the model's tensors.
        stored: the shapes of the folder's tensors.
        ties: the first name of each tensor of the model.
        allow_missing, allow_unexpected: patterns of names that may be absent.

    Raises:
        CheckpointMismatchError: lists names and shapes that differ, with the nearest ones.
    """
    found = {ties.get(name, name) for name in names.sources}
    missing = [n for n in names.missing if ties.get(n, n) not in found and n in shapes]
    missing = _without(missing, allow_missing)
    unexpected = _without(names.unexpected, allow_unexpected)
    differing = [
        f"{format_text(source, 100)} {stored[source]} (the model's {name} has {shapes[name]})"
        for name, source in names.sources.items()
        if stored[source] != shapes[name]
    ]
    problems, advice = [], ["Build the model from the config.json of the folder"]
    if missing:
        problems.append(f"it lacks {with_nearest(missing, shapes, stored)}")
        advice.append(f"name new parameters in allow_missing=[{missing[0]!r}]")
    if unexpected:
        problems.append(f"it has {with_nearest(unexpected, stored, shapes)}, which the model lacks")
        advice.append(f"name tensors to leave out in allow_unexpected=[{unexpected[0]!r}]")
    if differing:
        problems.append(f"these have another shape: {format_names(differing, _SHOWN)}")
    if not problems:
        return
    if len(advice) > 1:
        advice[-1] += " of PretrainedWeights(folder, ...)"
    message = f"the weights belong to another model: {'; '.join(problems)}. {', or '.join(advice)}"
    raise CheckpointMismatchError(
        with_explanation(message, "checkpoint-mismatch"), missing, unexpected
    )


def _dotted(path: str) -> str:
    return f"{path}." if path else ""


def _without(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [n for n in names if not any(fnmatchcase(n, pattern) for pattern in patterns)]


def with_nearest(
    names: Sequence[str], shapes: Mapping[str, Shape], others: Mapping[str, Shape]
) -> str:
    """Return a list of names with their shapes, each with the most similar other name."""
    listed = []
    for name in names[:_SHOWN]:
        near = get_close_matches(name, list(others), 1)
        text = f"{format_text(name, 100)} {shapes.get(name, '')}".rstrip()
        nearest = f" (nearest: {format_text(near[0], 100)} {others[near[0]]})" if near else ""
        listed.append(text + nearest)
    more = len(names) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")


def _most_alike(own: Sequence[str], stored: Mapping[str, str], part: str) -> tuple[str, str]:
    """Return the prefix that only the folder's names have, and the one that only the model's have.

    Raises:
        ConfigurationError: several parts of the model fit equally.
    """
    beginnings = Counter(
        ".".join(levels[:depth]) + "."
        for levels in (name.split(".") for name in stored)
        for depth in (1, 2)
        if len(levels) > depth
    )
    candidates = ["", *(b for b, count in beginnings.items() if 2 * count >= len(stored))]
    best: tuple[int, int, str, Counter[str]] = (0, 0, "", Counter())
    for lacks in candidates:
        ends = {name.removeprefix(lacks) for name in stored if name.startswith(lacks)}
        votes: Counter[str] = Counter()
        for name in own:
            start = 0
            while True:
                if name[start:] in ends:
                    votes[name[:start]] += 1
                dot = name.find(".", start)
                if dot < 0:
                    break
                start = dot + 1
        most = max(votes.values(), default=0)
        if (most, -len(lacks)) > (best[0], best[1]):
            best = (most, -len(lacks), lacks, votes)
    most, _, lacks, votes = best
    places = sorted((place for place, count in votes.items() if count == most), key=len)
    if len(places) > 1 and places[0] != _dotted(part):
        raise ConfigurationError(
            f"the names in the folder fit {len(places)} parts of the model equally: "
            f"{format_names([place[:-1] for place in places])}. Name one: "
            f"PretrainedWeights(folder, part={places[0][:-1]!r})"
        )
    return lacks, places[0] if places else _dotted(part)


# -- PEFT


def _plain_names(own: Sequence[str], module: nn.Module | None) -> dict[str, list[str]]:
    """Return the names of the model by the names that they have without PEFT's layers."""
    if module is not None and not any(_has_adapters(part) for part in module.modules()):
        return {name: [name] for name in own}
    plain: dict[str, list[str]] = {}
    for name in own:
        without = _OF_PEFT.sub("", name)
        plain.setdefault(without, []).append(name)
    return plain


def _has_adapters(part: nn.Module) -> bool:
    return hasattr(part, "adapter_layer_names") or hasattr(part, "peft_config")


def adapters_of(module: nn.Module) -> list[str]:
    """Return patterns of the parameters that PEFT's adapters add, without magnitudes of DoRA."""
    layers = {
        name
        for part in module.modules()
        for name in (*getattr(part, "adapter_layer_names", ()), *_projections(part))
        if "magnitude" not in name  # DoRA computes it from the weights
    }
    prompts = any(hasattr(part, "prompt_encoder") for part in module.modules())
    return [f"*.{name}.*" for name in sorted(layers)] + ["*prompt_encoder.*"] * prompts


def _projections(part: nn.Module) -> list[str]:
    """Return names of other tensors that a layer of PEFT holds, such as random projections."""
    names = getattr(part, "other_param_names", ())
    return [name for name in names if isinstance(getattr(part, name, None), nn.Module)]


# -- transformers


def _parts_of_transformers(module: nn.Module) -> dict[str, Any]:
    """Return the outermost models of transformers in a module, by the prefix of their names."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        is_model = hasattr(part, "base_model_prefix")
        # A wrapper of PEFT passes on the attributes of its model.
        wraps = any(base.__module__.startswith("peft.") for base in type(part).__mro__)
        is_model = is_model and hasattr(part, "config") and not wraps
        if is_model and not any(_dotted(path).startswith(outer) for outer in found):
            found[_dotted(path)] = part
    return found


def _not_ignored(model: Any, kind: str, names: list[str], prefix: str) -> list[str]:
    """Return names that a model of transformers does not ignore by its own rules."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return [
        name
        for name in names
        if not any(re.search(pattern, name.removeprefix(prefix)) for pattern in patterns)
    ]


def _renamed(model: Any, stored: Sequence[str]) -> dict[str, str]:
    """Return the folder's names by the names that a model of transformers gives them.

    Raises:
        ConfigurationError: the model would merge or split tensors.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {name: name for name in stored}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # before transformers 5
        return {name: name for name in stored}
    with _classes_of_transformers(model):
        rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    renamed = {}
    for name in stored:
        new = name
        for rule in renamings:
            new, _ = rule.rename_source_key(new)
        for rule in converters:
            if rule.rename_source_key(new)[1] is not None:
                raise ConfigurationError(
                    f"{type(model).__name__} makes its parameters of several tensors such as "
                    f"{format_text(name)} ({', '.join(map(repr, rule.operations))}), and weights= "
                    "reads each parameter from one tensor: load the model with from_pretrained "
                    "under single_device or ddp, and start from a checkpoint of that"
                )
        renamed[new] = name
    return renamed


@contextmanager
def _classes_of_transformers(model: nn.Module) -> Iterator[None]:
    """Let classes that FSDP has derived have the names that the rules are looked up by."""
    changed: dict[type, tuple[str, str]] = {}
    for part in model.modules():
        kind = type(part)
        if not kind.__name__.startswith("FSDP") or kind in changed:
            continue
        base = next((b for b in kind.__mro__[1:] if f"FSDP{b.__name__}" == kind.__name__), kind)
        changed[kind] = (kind.__name__, kind.__module__)
        kind.__name__, kind.__module__ = base.__name__, base.__module__
    try:
        yield
    finally:
        for kind, (name, module) in changed.items():
            kind.__name__, kind.__module__ = name, module
