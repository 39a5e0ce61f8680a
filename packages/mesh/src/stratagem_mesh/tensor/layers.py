"""Dividing the layers of a model between the ranks of the tensor axis."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_info
from stratagem_mesh.context.regions import named_regions, random_depth
from stratagem_mesh.tensor.adapters import watch_dropout, with_adapters, without_adapters
from stratagem_mesh.tensor.blocks import find_blocks
from stratagem_mesh.tensor.heads import attach_losses, with_heads
from stratagem_mesh.tensor.multihead import (
    STYLE,
    Multihead,
    pad_as_nested,
    why_whole,
    with_projections,
)
from stratagem_mesh.tensor.planned import refuse_wrong
from stratagem_mesh.tensor.region import Region, draws_numbers
from stratagem_mesh.tensor.search import divide_numbers, find_layers
from stratagem_mesh.tensor.sequence import Blocks, refuse_states
from stratagem_mesh.tensor.styles import (
    Colwise,
    ColwiseGathered,
    ColwiseVocabulary,
    EmbeddingRowwise,
    InBlocks,
    Replicated,
    Rowwise,
    Style,
    has_parameters,
)

STYLES: dict[str, Callable[..., Style]] = {
    "colwise": Colwise,
    "colwise_packed_2": partial(Colwise, packs=2),
    "colwise_packed_3": partial(Colwise, packs=3),
    "rowwise": Rowwise,
    "multihead": Multihead,
    "colwise_gather_output": ColwiseGathered,
    "colwise_vocabulary": ColwiseVocabulary,
    "embedding_rowwise": EmbeddingRowwise,
    "replicated_with_grad_allreduce": Replicated,
}
"""The styles that a plan names."""

TensorPlan = Mapping[str, str | ParallelStyle] | Callable[[nn.Module, DeviceMesh], Any]


@dataclass(frozen=True)
class SequenceOptions:
    """How blocks hold parts of a sequence.

    Attributes:
        check: compare the first forward pass of each block with one over the whole sequence.
        regions: the modules that the user names for the context axis, or None.
        units: the stages of a pipeline, by the names of the modules that they have.
    """

    check: bool = True
    regions: Collection[str] | None = None
    units: Mapping[str, int] | None = None


@dataclass(frozen=True)
class LossOptions:
    """How losses are computed from parts of the logits.

    Attributes:
        gather_logits: give each rank all logits after the loss.
    """

    gather_logits: bool = False


_HEADS = (
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_VOCABULARY = "embedding_rowwise", "colwise_gather_output", "colwise_vocabulary"


def check_plan(plan: Any) -> None:
    """Raise for a plan that is neither a function nor a mapping of known styles.

    Raises:
        ConfigurationError: names the entry.
    """
    if plan is None or callable(plan):
        return
    if not isinstance(plan, Mapping):
        raise ConfigurationError(
            f"tensor_plan={plan!r}: expected a mapping of names to styles, such as "
            "{'layers.*.up': 'colwise'}, or a function (model, mesh)"
        )
    for name, style in plan.items():
        if style not in STYLES and not isinstance(style, ParallelStyle):
            raise ConfigurationError(
                f"tensor_plan[{name!r}]={style!r}: expected one of "
                f"{', '.join(map(repr, STYLES))}, or a style of torch.distributed.tensor.parallel"
            )


def divide_layers(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: TensorPlan | None,
    example: Any = None,
    *,
    sequence: SequenceOptions | None = None,
    loss: LossOptions | None = None,
) -> dict[str, str]:
    """Divide a model's layers between the ranks of a mesh with one dimension, in place.

    Args:
        model: has whole parameters, equal on all ranks.
        mesh: the ranks that share a layer.
        plan: the user's plan. Default: the plan of the model, or pairs of layers from a dry run.
        example: an input of the model, for the dry run.
        sequence: divide the sequence too, between the layers of blocks.
        loss: compute losses from parts of the logits.

    Returns:
        The style of each divided module, by its name.

    Raises:
        ConfigurationError: the plan names no module of the model, a layer does not divide, or
            nothing is divided.
    """
    if callable(plan):
        if sequence is not None or loss is not None:
            option = "sequence_parallel" if sequence is not None else "loss_parallel"
            raise ConfigurationError(
                f"{option}=True needs layers of known styles, and tensor_plan is a function: "
                f"expected a mapping of names to styles, or {option}=False"
            )
        plan(model, mesh)
        return _divided_by_hand(model)
    region = Region(mesh, draws=draws_numbers(model))
    apply = partial(_apply, model, region, sequence=sequence, loss=loss)
    if plan is not None:
        styles = _expand(model, plan)
        with without_adapters(model):
            tied = _with_tied(model, styles)
            refuse_wrong(model, mesh.size(), example, tied, in_blocks=sequence is not None)
        return apply(styles)
    styles, whole = _plan_of_model(model, mesh.size())
    if styles:
        _say_whole(model, mesh.size(), whole)
        return apply(styles)
    with without_adapters(model):
        found = find_layers(model, mesh.size(), example)
    for name in [name for name, style in found.styles.items() if style == STYLE]:
        why = why_whole(model.get_submodule(name), mesh.size())
        if why is not None:
            found.whole[name] = why
            del found.styles[name]
    styles = apply(found.styles, is_proved=True)
    for name, numbers in found.numbers.items():
        divide_numbers(model.get_submodule(name), numbers, mesh.size())
    _say_whole(model, mesh.size(), found.whole)
    return styles


def _say_whole(model: nn.Module, size: int, whole: Mapping[str, str]) -> None:
    """Log the layers that stay whole."""
    if whole:
        rank_zero_info(
            "tensor=%d divides the linear layers of %s, except %s: pass a tensor_plan to divide "
            "others",
            size,
            type(model).__name__,
            _in_words(whole),
        )


def _in_words(whole: Mapping[str, str]) -> str:
    """Return the layers that stay whole, once for repeated blocks, with the reasons."""
    reasons = {_NUMBER.sub("*", name): why for name, why in whole.items()}
    named = [f"{name!r} ({why})" for name, why in list(reasons.items())[:4]]
    return ", ".join(named) + (f" and {len(reasons) - 4} more" if len(reasons) > 4 else "")


def _divided_by_hand(model: nn.Module) -> dict[str, str]:
    """Return the modules with parameters that the user's function has divided."""
    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found[name.rpartition(".")[0]] = str(parameter.placements[-1])
    return found


# -- the layers to divide


def _expand(
    model: nn.Module, plan: Mapping[str, Any], prefix: str = "", *, is_own: bool = False
) -> dict[str, Any]:
    """Return the style of each module that a pattern names, by its whole name or its end.

    Args:
        model: has the modules.
        plan: styles by patterns.
        prefix: begins each pattern.
        is_own: whether the plan is the model's own, which may name modules that the model lacks.

    Raises:
        ConfigurationError: a pattern names no module.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    styles: dict[str, Any] = {}
    for pattern, style in plan.items():
        whole = prefix + pattern
        expression = re.escape(whole).replace(r"\*", r"\d+")
        found = [name for name in names if re.fullmatch(expression, name)]
        if not found:
            found = [name for name in names if re.fullmatch(rf".+\.{expression}", name)]
        if not found and not is_own:
            patterns = sorted({_NUMBER.sub("*", name) for name in names})
            near = get_close_matches(pattern, patterns, 3, 0.4) or patterns[:8]
            raise ConfigurationError(
                f"tensor_plan has {pattern!r}, which names no module of {type(model).__name__}: "
                f"expected names such as {', '.join(map(repr, near))}"
            )
        styles.update(dict.fromkeys(found, style))
    # A module with several names is divided once.
    first = {model.get_submodule(name): name for name in sorted(styles, reverse=True)}
    return {name: s for name, s in styles.items() if first[model.get_submodule(name)] == name}


def _plan_of_model(model: nn.Module, size: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the styles of the plans of modules, such as models of transformers.

    Layers beside one whose style is not known stay whole, such as experts.

    Returns:
        The styles, and why other modules of the plans stay whole, by name.
    """
    styles: dict[str, str] = {}
    whole: dict[str, str] = {}
    for name, part in _with_plans(model):
        plan = {
            pattern: style
            for pattern, style in part._tp_plan.items()
            if not (style in _VOCABULARY and _vocabulary_of(part) % size)
        }
        known = _expand(model, plan, f"{name}." if name else "", is_own=True)
        unknown = {n: style for n, style in known.items() if style not in STYLES}
        unknown.update(dict.fromkeys(_parameters_in(model, plan, name), "a style of a parameter"))
        groups = {n.rpartition(".")[0]: style for n, style in unknown.items()}
        for layer, style in known.items():
            group = layer.rpartition(".")[0]
            if group in groups:
                whole[layer] = f"the model's plan has {groups[group]!r} there"
            else:
                styles[layer] = style
    return styles, whole


def _parameters_in(model: nn.Module, plan: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the parameters that the plan of a module names."""
    prefix = f"{name}." if name else ""
    for pattern in plan:
        expression = re.escape(prefix + pattern).replace(r"\*", r"\d+")
        yield from (n for n, _ in model.named_parameters() if re.fullmatch(expression, n))


def has_plan(part: nn.Module) -> bool:
    """Whether a module has a plan of its layers, as models of transformers have."""
    return bool(getattr(part, "_tp_plan", None))


def _with_plans(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost modules that have a plan, with their names."""
    inside: tuple[str, ...] = ()
    for name, part in model.named_modules():
        if has_plan(part) and not name.startswith(inside or ("\0",)):
            inside = *inside, f"{name}." if name else ""
            yield name, part


def _vocabulary_of(part: Any) -> int:
    """Return the number of tokens of a model; 0 if its configuration does not say."""
    config: Any = getattr(part, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "vocab_size", 0) or 0)


# -- tied weights


def _with_tied(model: nn.Module, styles: dict[str, Any]) -> dict[str, Any]:
    """Return styles in which layers that share a parameter are divided alike, or stay whole."""
    chosen = dict(styles)
    for holders in _shared(model):
        names = {name for name, _ in holders}
        if not names & set(chosen) or len(names) == 1:
            continue
        completed = {n: chosen.get(n) or _style_of_tied(model.get_submodule(n)) for n in names}
        if all(isinstance(s, str) and s in _VOCABULARY for s in completed.values()):
            chosen.update(completed)
        else:
            chosen = {name: style for name, style in chosen.items() if name not in names}
    return chosen


def _style_of_tied(layer: nn.Module) -> str | None:
    kinds = {nn.Embedding: "embedding_rowwise", nn.Linear: "colwise_gather_output"}
    return next((style for kind, style in kinds.items() if isinstance(layer, kind)), None)


def _shared(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return the modules and names that share each parameter."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, part in model.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((name, key))
    return list(holders.values())


# -- dividing


def _apply(
    model: nn.Module,
    region: Region,
    styles: dict[str, Any],
    sequence: SequenceOptions | None,
    loss: LossOptions | None,
    *,
    is_proved: bool = False,
) -> dict[str, str]:
    """Divide the layers in place, tied ones alike; `is_proved`: a run has shown whole heads."""
    if loss is not None:
        styles = with_heads(model, styles, region.mesh.size())
    styles = _with_tied(model, styles)
    if not styles:
        raise ConfigurationError(
            f"tensor={region.mesh.size()}, but no layer of {type(model).__name__} is divided, so "
            f"that {region.mesh.size()} ranks would each do all the work: pass a tensor_plan with "
            "layers that share no parameter with others, or tensor=1"
        )
    styles = with_projections(model, styles)
    parts = with_adapters(model, styles)
    watch_dropout(model, parts, region)
    made = {}
    for name, style in parts.items():
        layer = model.get_submodule(name)
        made[name] = style = STYLES[style](region) if isinstance(style, str) else style
        if isinstance(style, Style):
            style.check(name, layer)
            if not is_proved:
                _check_heads(name, model, region.mesh.size())
    if sequence is not None:
        _divide_sequence(model, region, parts, made, sequence)
    for name, style in made.items():
        if isinstance(style, Style):
            style.apply(model.get_submodule(name))
        else:
            parallelize_module(model.get_submodule(name), region.mesh, style)
    region.divided.clear()
    pad_as_nested(model)
    if loss is not None:
        attach_losses(model, made, gather_logits=loss.gather_logits)
    return {name: str(style) for name, style in styles.items()}


def _divide_sequence(
    model: nn.Module,
    region: Region,
    styles: Mapping[str, Any],
    made: dict[str, Any],
    options: SequenceOptions,
) -> None:
    """Let blocks hold parts of the sequence; add the styles of other modules in them.

    Raises:
        ConfigurationError: the model leaves out layers or samples at random.
    """
    for name, part in model.named_modules():
        option = random_depth(part)
        if option is not None:
            raise ConfigurationError(
                f"sequence_parallel=True, and {name or type(part).__name__} has {option}: each "
                f"rank would drop other layers or samples of its part of the sequence. Set "
                f"{option.partition('=')[0]} to 0, or pass sequence_parallel=False"
            )
    regions = () if options.regions is None else named_regions(model, list(options.regions))
    for found in find_blocks(model, styles, options.units):
        blocks = Blocks(found, region, check=options.check)
        inner = [name for name in regions if blocks.has(name)]
        if inner:
            raise ConfigurationError(
                f"context_modules has {inner[0]!r}, and with sequence_parallel=True the context "
                "axis divides sequences first: expected a module that has all the blocks, such as "
                f"{found.name.rpartition('.')[0] or 'the model'!r}"
            )
        refuse_states(model, blocks)
        blocks.attach()
        for name, part in model.named_modules():
            if blocks.has(name) and (name in made or has_parameters(part)):
                style = made.setdefault(name, InBlocks(region))
                style.blocks = blocks


def _check_heads(name: str, model: nn.Module, size: int) -> None:
    """Raise if the heads of an attention do not divide between the ranks.

    Raises:
        ConfigurationError: names the module and its number of heads.
    """
    parent = name.removesuffix(".base_layer").rpartition(".")[0]
    attention = model.get_submodule(parent)
    numbers = {**vars(attention)}
    config = getattr(attention, "config", None)
    if config is not None and ("attn" in parent.lower() or "attention" in parent.lower()):
        numbers |= {k: getattr(config, k, None) for k in _HEADS}
    for key in _HEADS:
        count = numbers.get(key)
        if type(count) is int and count % size:
            raise ConfigurationError(
                f"{parent or type(model).__name__} has {key}={count}, which do not divide between "
                f"{size} ranks: each rank computes whole heads. Choose a size of the tensor axis "
                "that divides them, or a tensor_plan without the layers of this attention"
            )
