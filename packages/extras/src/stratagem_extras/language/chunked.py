"""Cross entropy over a large vocabulary, without all logits at the same time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils.checkpoint import checkpoint

from stratagem.errors import ConfigurationError, UserCodeError

_CAUSAL, _MASKED = "ForCausalLMLoss", "ForMaskedLMLoss"
_IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    *,
    ignore_index: int = _IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_size: int = 512,
) -> Tensor:
    """Return `cross_entropy(head(hidden), targets)`, from the logits of some tokens at a time.

    Backward computes the logits of each chunk again, so that a step holds the logits of
    `chunk_size` tokens. The price is the forward pass of the head a second time. Losses are
    computed in float32 or higher precision.

    Args:
        hidden: the inputs of the last layer, of shape (..., features).
        head: the last layer, or its weight of shape (vocabulary, features).
        targets: class indices, of the shape of `hidden` without the last dimension.
        ignore_index: a target that does not count.
        reduction: "mean" over the targets that count, or "sum".
        label_smoothing: as for `torch.nn.functional.cross_entropy`.
        chunk_size: the number of tokens in a chunk.

    Raises:
        ConfigurationError: shapes or options do not fit.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> from stratagem_extras.language import linear_cross_entropy
        >>> hidden, head = torch.randn(2, 5, 8), torch.nn.Linear(8, 100)
        >>> targets = torch.randint(0, 100, (2, 5))
        >>> loss = linear_cross_entropy(hidden, head, targets, chunk_size=4)
        >>> torch.allclose(loss, cross_entropy(head(hidden).flatten(0, 1), targets.flatten()))
        True
    """
    if hidden.shape[:-1] != targets.shape:
        raise ConfigurationError(
            f"hidden has the shape {tuple(hidden.shape)} and targets have {tuple(targets.shape)}: "
            "expected one target for each row of features"
        )
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f"reduction={reduction!r}: expected 'mean' or 'sum'")
    _check_size(chunk_size)
    compute = partial(_summed, head, ignore_index, label_smoothing)
    rows, flat = hidden.flatten(0, -2), targets.flatten()
    parts = zip(torch.split(rows, chunk_size), torch.split(flat, chunk_size), strict=True)
    total = torch.stack([_repeated(compute, *part) for part in parts]).sum()
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


def _check_size(chunk_size: Any) -> None:
    if type(chunk_size) is not int or chunk_size < 1:
        raise ConfigurationError(
            f"chunk_size={chunk_size!r}: expected a number of tokens of at least 1"
        )


def _repeated(compute: Callable[..., Tensor], rows: Tensor, targets: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return compute(rows, targets)
    loss: Tensor = checkpoint(compute, rows, targets, use_reentrant=False)
    return loss


def _summed(head: Any, ignored: int, smoothing: float, rows: Tensor, targets: Tensor) -> Tensor:
    logits = linear(rows, head) if isinstance(head, Tensor) else head(rows)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return cross_entropy(
        logits, targets, ignore_index=ignored, reduction="sum", label_smoothing=smoothing
    )


def chunk_loss(model: nn.Module, chunk_size: int = 512) -> None:
    """Let a model of transformers compute its loss by `linear_cross_entropy`, in place.

    Where gradients are computed and labels are given, the model returns no logits. Evaluation does
    not change.

    Args:
        model: a model of transformers for language modeling, or a module with such models in it,
            as PEFT's.
        chunk_size: the number of tokens in a chunk.

    Raises:
        ConfigurationError: no part of the model computes a loss from the logits of a linear layer.

    Example:
        >>> from stratagem_extras.language import chunk_loss
        >>> chunk_loss(torch.nn.Linear(2, 2))
        Traceback (most recent call last):
            ...
        stratagem.errors.ConfigurationError: chunk_loss: no part of Linear is a model of ...
    """
    _check_size(chunk_size)
    found = [part for part in model.modules() if _is_model(part)]
    if not found and (kind := _adapted_head(model)):
        raise ConfigurationError(
            f"chunk_loss: the last layer of {type(model).__name__} has an adapter of PEFT ({kind}):"
            " expected a linear layer. Leave it out of target_modules; with modules_to_save, call "
            "chunk_loss before get_peft_model"
        )
    if not found:
        raise ConfigurationError(
            f"chunk_loss: no part of {type(model).__name__} is a model of transformers that "
            "computes a loss for language modeling from the logits of a linear layer: call "
            "linear_cross_entropy(hidden, head, targets) in your own model"
        )
    for part in found:
        _ChunkedLoss(part, chunk_size).attach()


def _adapted_head(model: nn.Module) -> str:
    """Return the class of a last layer with an adapter, or ""."""
    for part in model.modules():
        head = getattr(type(part), "get_output_embeddings", lambda part: None)(part)
        if head is not None and type(head).__module__.startswith("peft."):
            return type(head).__name__
    return ""


def _is_model(part: Any) -> bool:
    kind = type(part)  # a model of PEFT has the attributes of the model in it
    if not hasattr(kind, "get_output_embeddings") or not hasattr(part, "loss_function"):
        return False
    is_linear = isinstance(part.get_output_embeddings(), nn.Linear)
    return is_linear and getattr(part.loss_function, "__name__", "") in (_CAUSAL, _MASKED)


class _ChunkedLoss:
    """The loss of one model; its last layer returns its inputs while the loss is computed."""

    def __init__(self, model: Any, chunk_size: int) -> None:
        self._model = model
        self._chunk_size = chunk_size
        self._head = model.get_output_embeddings()
        # Of the instance alone: a pickled method would be found as the one that replaces it.
        self._replaced = vars(self._head).get("forward")
        self._original = model.loss_function
        self._is_asked = False
        self._rows: Tensor | None = None
        self._place: tuple[Any, ...] = ()

    def attach(self) -> None:
        self._head.forward = self._forward
        # Its name tells other code of the kind of loss.
        self._model.loss_function = update_wrapper(partial(self._loss), self._original)
        self._model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._model.register_forward_hook(self._after, always_call=True)

    def _before(self, model: Any, args: Any, kwargs: Any) -> None:
        given = signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
        named = {**given, **given.get("kwargs", {})}
        self._is_asked = torch.is_grad_enabled() and named.get("labels") is not None
        if self._is_asked and hasattr(model.get_output_embeddings(), "base_layer"):
            raise UserCodeError(
                "the last layer got an adapter after chunk_loss, which reads a linear layer: leave "
                "it out of target_modules, or leave chunk_loss out"
            )

    def _forward(self, rows: Tensor) -> Tensor:
        if not self._is_asked or self._rows is not None:
            if self._replaced is not None:
                return self._replaced(rows)  # type: ignore[no-any-return]
            return type(self._head).forward(self._head, rows)  # type: ignore[no-any-return]
        self._rows, self._place = rows, _memory(rows)
        return rows

    def _after(self, model: Any, inputs: Any, output: Any) -> Any:
        was_asked, self._is_asked, self._rows = self._is_asked, False, None
        if output is None or not was_asked:
            return None
        if isinstance(output, tuple):
            return output[0], None, *output[2:]
        output["logits"] = None
        return output

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if self._rows is None:
            options |= {"ignore_index": ignore_index, "num_items_in_batch": num_items_in_batch}
            whole: Tensor = self._original(
                logits, labels, vocab_size, shift_labels=shift_labels, **options
            )
            return whole
        if _memory(logits) != self._place:
            raise ConfigurationError(
                f"chunk_loss: {type(self._model).__name__} changes its logits after its last "
                "layer, such as by a softcap or a scale: expected a loss of the last layer's "
                "outputs. Leave chunk_loss out"
            )
        if self._original.__name__ == _MASKED:
            shift_labels = labels
        elif shift_labels is None:
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = linear_cross_entropy(
            logits,
            self._head,
            shift_labels.to(logits.device),
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            chunk_size=self._chunk_size,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return a value that differs after any operation, in place too; hooks of engines alias."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version
