"""Finding the blocks of a model, and the modules in them that read whole sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from stratagem.errors import ConfigurationError
from stratagem_mesh.context.regions import NOT_DIVIDED

_SOURCES = "colwise", "colwise_packed_2", "colwise_packed_3", "multihead"
_INNER = "replicated_with_grad_allreduce"
_WHOLE = (*NOT_DIVIDED, nn.MultiheadAttention)
"""Modules that compute over several positions, and have no divided layers."""


@dataclass(frozen=True)
class Found:
    """Blocks that follow each other.

    Attributes:
        name: the list that has them.
        owner: the module that calls them.
        blocks: the blocks, by their names.
        containers: the modules in them that read a whole sequence, which contain the layers with
            divided outputs of a pair.
    """

    name: str
    owner: nn.Module
    blocks: dict[str, nn.Module]
    containers: list[nn.Module]


def find_blocks(
    model: nn.Module, styles: Mapping[str, Any], units: Mapping[str, int] | None = None
) -> list[Found]:
    """Return the lists of blocks of a model, which contain pairs of divided layers.

    Args:
        model: the model.
        styles: the style of each divided module, by its name.
        units: the stages of a pipeline, by the names of the modules that they have; lists are
            divided where a stage ends, since whole sequences cross from one to the next.

    Raises:
        ConfigurationError: the model has no blocks, or they cannot hold parts of a sequence.
    """
    lists = list(_lists(model, styles))
    several = [one for one in lists if len(one[1]) > 1]
    found: list[Found] = []
    inside: tuple[str, ...] = ()
    for name, blocks in several or lists:
        if name.startswith(inside or ("\0",)):
            continue
        inside = *inside, f"{name}." if name else ""
        found.append(_checked(model, name, blocks, styles))
    if not found:
        raise ConfigurationError(
            f"sequence_parallel=True, but {type(model).__name__} has no blocks, which are modules "
            "of an nn.ModuleList or nn.Sequential with pairs of divided layers (colwise, then "
            "rowwise): pass sequence_parallel=False"
        )
    return found if units is None else [part for one in found for part in _of_stages(one, units)]


def _of_stages(found: Found, units: Mapping[str, int]) -> list[Found]:
    """Return the blocks of each stage of a pipeline.

    Raises:
        ConfigurationError: names a block that belongs to several stages.
    """
    by_stage: dict[int, dict[str, nn.Module]] = {}
    for name, block in found.blocks.items():
        unit = next((one for one in units if f"{name}.".startswith(f"{one}.")), None)
        if unit is None:
            raise ConfigurationError(
                f"sequence_parallel=True, and a pipeline cuts the block {name!r}, of which each "
                "rank has a part of the sequence: expected pipeline_cuts between blocks, or "
                "sequence_parallel=False"
            )
        by_stage.setdefault(units[unit], {})[name] = block
    parts = []
    for blocks in by_stage.values():
        inside = {part for block in blocks.values() for part in block.modules()}
        containers = [one for one in found.containers if one in inside]
        parts.append(Found(found.name, found.owner, blocks, containers))
    return parts


def _lists(
    model: nn.Module, styles: Mapping[str, Any]
) -> Iterable[tuple[str, dict[str, nn.Module]]]:
    """Yield lists and their elements, from the first to the last that has a pair."""
    for name, part in model.named_modules():
        if not isinstance(part, (nn.ModuleList, nn.Sequential)):
            continue
        prefix = f"{name}." if name else ""
        elements = {f"{prefix}{key}": child for key, child in part.named_children()}
        names = list(elements)
        paired = [n for n in names if _has_pair(n, styles)]
        if paired:
            first, last = names.index(paired[0]), names.index(paired[-1])
            yield name, {n: elements[n] for n in names[first : last + 1]}


def _has_pair(block: str, styles: Mapping[str, Any]) -> bool:
    own = [style for name, style in styles.items() if name.startswith(f"{block}.")]
    return any(style in _SOURCES for style in own) and "rowwise" in own


def _checked(
    model: nn.Module, name: str, blocks: dict[str, nn.Module], styles: Mapping[str, Any]
) -> Found:
    """Return blocks with their containers.

    Raises:
        ConfigurationError: names the layer that cannot compute a part of a sequence.
    """
    containers: set[str] = set()
    _refuse_repeated(model, name, blocks)
    for block in blocks:
        own = {n: style for n, style in styles.items() if n.startswith(f"{block}.")}
        for layer, style in own.items():
            if style not in (*_SOURCES, "rowwise", _INNER):
                raise ConfigurationError(
                    f"sequence_parallel=True, and {layer!r} in a block is divided by {style!r}: "
                    "expected pairs of 'colwise' and 'rowwise' there. Choose another tensor_plan, "
                    "or pass sequence_parallel=False"
                )
        _refuse_dropout(model, own)
        containers |= _containers(block, own)
    inside = tuple(f"{one}." for one in containers)
    for block in blocks:
        _refuse_layers(model, block, inside)
    _refuse_shared(model, tuple(f"{block}." for block in blocks))
    owner = model.get_submodule(name)
    if isinstance(owner, nn.ModuleList):
        owner = model.get_submodule(name.rpartition(".")[0])
    return Found(name, owner, blocks, [model.get_submodule(one) for one in sorted(containers)])


def _refuse_repeated(model: nn.Module, name: str, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse blocks that stand several times in a list.

    Raises:
        ConfigurationError: names the block and its places.
    """
    places = list(model.get_submodule(name)._modules.items())
    for block, part in blocks.items():
        keys = [key for key, one in places if one is part]
        if len(keys) > 1 and any(True for _ in part.parameters()):
            raise ConfigurationError(
                f"sequence_parallel=True, and {name!r} has the block {block!r} {len(keys)} times, "
                f"at {', '.join(keys)}: the first and the last block of a sequence need to be "
                "called once. Expected separate blocks, or sequence_parallel=False"
            )


def _containers(block: str, styles: Mapping[str, Any]) -> set[str]:
    """Return the names of the modules in a block that read whole sequences.

    Raises:
        ConfigurationError: names a layer with divided inputs that belongs to no pair.
    """
    free = [
        f"{name}.in_proj" if style == "multihead" else name
        for name, style in styles.items()
        if style in _SOURCES
    ]
    found = {}
    sinks = [name for name, style in styles.items() if style == "rowwise"]
    for depth in range(max(name.count(".") for name in styles), block.count(".") - 1, -1):
        before = free
        for sink in [one for one in sinks if one not in found]:
            around = ".".join(sink.split(".")[: depth + 1])
            sources = [name for name in before if name.startswith(f"{around}.")]
            if sources:
                found[sink] = _shared(sources)
                free = [name for name in free if name not in sources]
    alone = [*free, *(sink for sink in sinks if sink not in found)]
    if alone:
        raise ConfigurationError(
            f"sequence_parallel=True, and {alone[0]!r} in a block is not part of a pair of divided "
            "layers ('colwise', then 'rowwise'): choose another tensor_plan, or pass "
            "sequence_parallel=False"
        )
    return {name for name in found.values() if name != block and name.startswith(block)}


def _shared(layers: list[str]) -> str:
    """Return the name of the smallest module that has all these layers."""
    paths = [name.split(".")[:-1] for name in layers]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _refuse_layers(model: nn.Module, block: str, inside: tuple[str, ...]) -> None:
    """Refuse layers outside of containers that read several positions.

    Raises:
        ConfigurationError: names the layer.
    """
    for name, part in model.get_submodule(block).named_modules(prefix=block):
        if isinstance(part, _WHOLE) and not f"{name}.".startswith(inside or ("\0",)):
            raise ConfigurationError(
                f"sequence_parallel=True, and {name!r} in a block is a {type(part).__name__}, "
                "which reads several positions and has no pair of divided layers: pass "
                "sequence_parallel=False"
            )


def _refuse_dropout(model: nn.Module, styles: Mapping[str, Any]) -> None:
    """Refuse dropout of adapters before layers with divided outputs, which reads whole sequences.

    In blocks each rank draws numbers of its own, and the adapter's matrix A is the same on all.

    Raises:
        ConfigurationError: names the layer.
    """
    for name, style in styles.items():
        layer: Any = model.get_submodule(name.removesuffix(".base_layer"))
        dropouts = layer._modules.get("lora_dropout", {})
        if style in _SOURCES and any(getattr(one, "p", 0) > 0 for one in dropouts.values()):
            raise ConfigurationError(
                f"sequence_parallel=True, and {name!r} in a block has an adapter with dropout: "
                "expected lora_dropout=0.0, or sequence_parallel=False"
            )


def _refuse_shared(model: nn.Module, inside: tuple[str, ...]) -> None:
    """Refuse parameters of blocks that modules outside of them have too.

    Raises:
        ConfigurationError: names the module in a block.
    """
    outer = {
        id(parameter)
        for name, part in model.named_modules(remove_duplicate=False)
        for parameter in part._parameters.values()
        if parameter is not None and not f"{name}.".startswith(inside)
    }
    for name, part in model.named_modules():
        if f"{name}.".startswith(inside) and outer & set(map(id, part._parameters.values())):
            raise ConfigurationError(
                f"sequence_parallel=True, and {name!r} in a block shares a parameter with a module "
                "outside of the blocks: pass sequence_parallel=False"
            )
