"""Models of transformers: their inputs, masks, losses and outputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_mesh.context.call import Call, divides, running
from stratagem_mesh.context.collectives import ContextGroup, first, gather, sum_of_losses
from stratagem_mesh.context.kinds import Arguments, bind, title

IGNORED = -100
"""The label that has no loss."""

SHIFTED = ("ForCausalLM", "LMHeadModel")
UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")
"""Ends of the names of models whose loss is a mean over positions."""

MASKS = (
    "create_causal_mask",
    "create_bidirectional_mask",
    "create_sliding_window_causal_mask",
    "create_bidirectional_sliding_window_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
)
"""Functions of `transformers.masking_utils`."""

_SEQUENCES = ("input_ids", "inputs_embeds", "token_type_ids", "labels", "shift_labels")
_OTHER_SEQUENCES = ("encoder_hidden_states", "decoder_input_ids", "pixel_values", "input_features")


def is_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, which is not imported for it."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def region_of(model: Any) -> Any:
    """Return the model itself if its loss is a mean over positions, else its body."""
    body = model.base_model
    return model if type(model).__name__.endswith(SHIFTED + UNSHIFTED) else body


def check_model(name: str, model: Any) -> None:
    """Refuse models that cannot be divided exactly.

    Raises:
        ConfigurationError: says why.
    """
    kind = title(name, model)
    if model.config.is_encoder_decoder:
        raise ConfigurationError(
            f"context parallelism divides one sequence, and {kind} attends from one sequence to "
            "another: pass context=1, and use tensor or shard"
        )
    if model.main_input_name != "input_ids":
        raise ConfigurationError(
            f"context parallelism divides a sequence of input_ids, and {kind} reads "
            f"{model.main_input_name}: pass context=1, or name its layers, which read "
            "(batch, sequence, features): context_modules=['layers.*'], where * stands for a number"
        )
    for part in model.modules():
        used = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if is_model(part) and used not in (None, "sdpa"):
            raise ConfigurationError(
                f"{kind} computes attention by {used!r}, and context parallelism by 'sdpa' alone: "
                "pass attn_implementation='sdpa' to from_pretrained or from_config, or call "
                "model.set_attn_implementation('sdpa')"
            )


class TransformersModel:
    """A model of transformers, with its loss if it has one."""

    def __init__(self, name: str, model: Any, *, gather_logits: bool) -> None:
        self._name = title(name, model)
        self._model = model
        self._gathers_logits = gather_logits
        self._names = set(inspect.signature(model.forward).parameters)
        # Other losses take no notice of num_items_in_batch.
        self._counts_items = (
            "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
        )
        self._shifts = type(model).__name__.endswith(SHIFTED)
        for part in model.modules():
            if is_model(part):
                replace_masks(type(part))

    def cut(
        self, group: ContextGroup, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Call, Arguments] | None:
        """See Kind; with a cache (`generate`) each rank computes all."""
        inputs = {k: v for k, v in bind(self._model, args, kwargs).items() if v is not None}
        whole = inputs.get("input_ids", inputs.get("inputs_embeds"))
        if whole is None or self._has_cache(inputs):
            return None
        if whole.ndim < 2:
            raise UserCodeError(
                f"{self._name} received input_ids of shape {tuple(whole.shape)}, and context "
                "parallelism divides its sequence: expected (batch, sequence)"
            )
        if not divides(whole.shape[1], group):
            return None
        self._refuse(inputs)
        call = Call(self._name, group, whole.shape[1])
        call.makes_masks, call.positions = True, inputs.get("position_ids")
        if call.positions is None and "use_cache" in self._names:
            # With positions of the user, a model that has a cache does not look for documents.
            inputs["use_cache"] = False
        self._divide_loss(call, inputs)
        self._cut_positions(call, inputs)
        for name in _SEQUENCES:
            if name in inputs:
                value = IGNORED if "labels" in name else 0
                inputs[name] = call.cut(inputs[name], 1, value).contiguous()
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            inputs["attention_mask"] = call.cut(mask, 1)
        return call, ((), {**inputs, "return_dict": True})

    @staticmethod
    def _has_cache(inputs: dict[str, Any]) -> bool:
        keeps = inputs.get("logits_to_keep", 0)
        keeps_some = isinstance(keeps, Tensor) or bool(keeps)
        return "past_key_values" in inputs or bool(inputs.get("use_cache")) or keeps_some

    def _refuse(self, inputs: dict[str, Any]) -> None:
        other = [name for name in _OTHER_SEQUENCES if name in inputs]
        if other:
            raise UserCodeError(
                f"{self._name} was called with {other[0]}, a second sequence: context parallelism "
                "divides one; pass context=1"
            )
        if inputs.get("output_attentions") or self._model.config.output_attentions:
            raise UserCodeError(
                f"{self._name} was called with output_attentions=True, and each rank computes "
                "attention of a part: expected output_attentions=False, or context=1"
            )

    def _divide_loss(self, call: Call, inputs: dict[str, Any]) -> None:
        """Shift labels before the cut; note the fraction of the loss of this rank."""
        labels = inputs.get("labels")
        if labels is None:
            return
        if self._shifts:
            following = pad(labels[:, 1:], (0, 1), value=IGNORED)
            labels = inputs.setdefault("shift_labels", following)
            inputs["labels"] = labels
        if self._counts_items and inputs.get("num_items_in_batch") is not None:
            call.weight = torch.ones((), device=labels.device)
            return
        # On the device, so that no step waits for it.
        own = call.cut(labels, 1, IGNORED).ne(IGNORED).sum().double()
        call.weight = own / labels.ne(IGNORED).sum().clamp(min=1)

    def _cut_positions(self, call: Call, inputs: dict[str, Any]) -> None:
        if "position_ids" in inputs:
            positions = inputs["position_ids"]
            inputs["position_ids"] = call.cut(positions, positions.ndim - 1)
        elif "position_ids" in self._names:
            inputs["position_ids"] = call.cut(self._positions(call, inputs), 1)

    def _positions(self, call: Call, inputs: dict[str, Any]) -> Tensor:
        """Return the positions that the model counts from the whole sequence."""
        for part in self._model.modules():
            count = getattr(part, "create_position_ids_from_input_ids", None)
            if count is not None and "input_ids" in inputs:  # RoBERTa and its kin
                counted: Tensor = count(inputs["input_ids"], part.padding_idx)
                return counted
        whole: Tensor = inputs["input_ids" if "input_ids" in inputs else "inputs_embeds"]
        return torch.arange(call.length, device=whole.device)[None]

    def join(self, call: Call, output: Any) -> Any:
        """See Kind."""
        for name, value in list(output.items()):
            output[name] = self._joined(call, name, value)
        return output

    def _joined(self, call: Call, name: str, value: Any) -> Any:
        if name == "loss" and call.weight is not None:
            return sum_of_losses(value, call.weight, call.group, call)
        if name == "logits" and self._is_left_out(call):
            return NotGathered()
        if name in ("logits", "last_hidden_state"):
            return gather(value, call.group, 1, call).narrow(1, 0, call.length)
        if name == "hidden_states":
            return tuple(self._joined(call, "last_hidden_state", part) for part in value)
        if name == "past_key_values":  # of a part; a call that reads them passes use_cache=True
            return None
        if name == "pooler_output":
            return first(value, call.group, call)
        raise UserCodeError(
            f"{self._name} returned {name!r}, which context parallelism cannot join from the parts "
            f"of {call.group.size} ranks: expected a call without it, or context=1"
        )

    def _is_left_out(self, call: Call) -> bool:
        return call.weight is not None and torch.is_grad_enabled() and not self._gathers_logits


class NotGathered:
    """Stands for logits that no rank has."""

    ranks = "the ranks of a sequence"

    def __getattr__(self, name: str) -> Any:
        raise UserCodeError(
            f"logits are divided between {self.ranks} in training, since the model has "
            "computed the loss from them. To read them, pass MeshStrategy(gather_logits=True), "
            "which gives each rank all of them"
        )


def replace_masks(model: type) -> None:
    """Let a model make its masks from the whole batch in a region."""
    masking = sys.modules.get("transformers.masking_utils")
    functions = {getattr(masking, name, None) for name in MASKS} - {None}
    for kind in model.__mro__:
        names = vars(sys.modules.get(kind.__module__, object))
        for name, value in list(names.items()):
            if callable(value) and getattr(value, "__hash__", None) and value in functions:
                setattr(sys.modules[kind.__module__], name, _of_whole_batch(value))


def _of_whole_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def create_mask(*args: Any, **kwargs: Any) -> Any:
        call = running()
        if call is None or not call.makes_masks:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        for name in ("or_mask_function", "and_mask_function", "block_sequence_ids"):
            if given.get(name) is not None:
                raise UserCodeError(
                    f"{call.name} passes {name} to {function.__name__}, which reads a part of the "
                    "sequence: context parallelism cannot divide its mask; pass context=1"
                )
        embeds = "inputs_embeds" if "inputs_embeds" in signature.parameters else "input_embeds"
        given[embeds] = given[embeds].detach()[:, :1, :1].expand(-1, call.length, -1)
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            given["attention_mask"] = call.group.join(mask, 1)[:, : call.length]
        if given.get("position_ids") is not None:
            given["position_ids"] = call.positions
        if "cache_position" in signature.parameters:
            given["cache_position"] = torch.arange(call.length, device=given[embeds].device)
        return function(*bound.args, **bound.kwargs)

    return create_mask
