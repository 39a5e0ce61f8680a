"""The losses of models of transformers whose last layer gives each rank a part of the logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from stratagem.errors import ConfigurationError
from stratagem_mesh.context.kinds import bind
from stratagem_mesh.context.transformers_models import IGNORED, NotGathered, is_model
from stratagem_mesh.tensor.collectives import gather_from_ranks
from stratagem_mesh.tensor.styles import ColwiseVocabulary
from stratagem_mesh.tensor.vocabulary import loss_of_parts

STYLE = "colwise_vocabulary"
_LOSSES = "ForCausalLMLoss", "ForMaskedLMLoss"
"""Losses of transformers that are computed from parts."""


class OfVocabulary(NotGathered):
    """Stands for logits of which each rank has a part of the vocabulary."""

    ranks = "the ranks that share a layer"


def with_heads(model: nn.Module, styles: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return styles in which the vocabulary of each last layer is divided.

    Args:
        model: the model.
        styles: the styles by names.
        size: the number of ranks.

    Raises:
        ConfigurationError: no layer can give each rank a part of the logits.
    """
    chosen = dict(styles)
    for _, name, head in _heads(model):
        if head.out_features % size:
            raise ConfigurationError(
                f"loss_parallel=True, and {name!r} has {head.out_features} tokens, which do not "
                f"divide between {size} ranks: call model.resize_token_embeddings("
                f"pad_to_multiple_of={size}), or pass loss_parallel=False"
            )
        chosen[name] = STYLE
    if STYLE not in chosen.values():
        raise ConfigurationError(
            f"loss_parallel=True, but {type(model).__name__} has no model of transformers that "
            "computes its loss by loss_function: name the last layer in tensor_plan, such as "
            f"{{'head': {STYLE!r}}}, and compute the loss by stratagem_mesh.cross_entropy; or "
            "pass loss_parallel=False"
        )
    return chosen


def _heads(model: nn.Module) -> Iterator[tuple[Any, str, nn.Linear]]:
    """Yield models that compute a loss from logits, with their last layer and its name."""
    names = {part: name for name, part in model.named_modules()}
    for part in names:
        if not is_model(part):
            continue
        kind: Any = part
        head = kind.get_output_embeddings()
        code = inspect.unwrap(type(kind).forward).__code__
        if not isinstance(head, nn.Linear) or "loss_function" not in code.co_names:
            continue
        if getattr(kind.loss_function, "__name__", "") in _LOSSES:
            yield kind, names[head], head


def attach_losses(model: nn.Module, styles: Mapping[str, Any], *, gather_logits: bool) -> None:
    """Let models compute their losses from parts.

    Args:
        model: has models of transformers.
        styles: the made style of each layer, by its name.
        gather_logits: give each rank all logits after the loss.

    Raises:
        ConfigurationError: a last layer stays whole.
    """
    for part, name, _ in _heads(model):
        style = styles.get(name)
        if not isinstance(style, ColwiseVocabulary):
            raise ConfigurationError(
                f"loss_parallel=True, and {name!r} shares its weight with a layer that is not an "
                "embedding, so it is not divided: pass loss_parallel=False"
            )
        style.is_asked = False
        part.register_forward_pre_hook(partial(_ask, style), with_kwargs=True)
        part.register_forward_hook(partial(_answer, style, gather_logits), always_call=True)
        original = part.loss_function
        part.loss_function = partial(_loss, style, original)


def _ask(style: ColwiseVocabulary, model: nn.Module, args: Any, kwargs: Any) -> None:
    """Keep the logits divided if the model computes its loss."""
    style.is_asked = bind(model, args, kwargs).get("labels") is not None


def _answer(
    style: ColwiseVocabulary, gathers: bool, model: nn.Module, inputs: Any, output: Any
) -> Any:
    """Replace parts of logits, which are the second output, after the loss."""
    was_asked, style.is_asked = style.is_asked, False
    if output is None or not was_asked or not torch.is_grad_enabled():
        return None
    if isinstance(output, tuple):
        return output[0], _answered(style, gathers, output[1]), *output[2:]
    output["logits"] = _answered(style, gathers, output["logits"])
    return output


def _answered(style: ColwiseVocabulary, gathers: bool, part: Tensor) -> Any:
    return gather_from_ranks(part, style.mesh) if gathers else OfVocabulary()


def _loss(
    style: ColwiseVocabulary,
    original: Any,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """See `transformers.loss.loss_utils`."""
    if not style.keeps_parts():
        options |= {"ignore_index": ignore_index, "num_items_in_batch": num_items_in_batch}
        whole: Tensor = original(logits, labels, vocab_size, shift_labels=shift_labels, **options)
        return whole
    if original.__name__ != _LOSSES[0]:
        shift_labels = labels
    elif shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = loss_of_parts(logits.float(), shift_labels, style.mesh, ignore_index, reduction)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch  # type: ignore[no-any-return]
