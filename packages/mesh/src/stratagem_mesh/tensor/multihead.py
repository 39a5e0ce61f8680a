"""`nn.MultiheadAttention` whose heads are divided between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn import functional

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_mesh.context.attention import refuse_weights
from stratagem_mesh.context.call import in_region
from stratagem_mesh.tensor.collectives import copy_to_ranks, gather_from_ranks, sum_of_ranks
from stratagem_mesh.tensor.styles import Colwise, rows_of_rank

STYLE = "multihead"
_PACKS = 3
"""Queries, keys and values are packed in in_proj_weight and in_proj_bias."""


def is_attention(part: nn.Module) -> bool:
    """Whether a module is torch's attention, with torch's forward pass."""
    return (
        isinstance(part, nn.MultiheadAttention)
        and type(part).forward is nn.MultiheadAttention.forward
        and "forward" not in vars(part)
    )


def why_whole(part: Any, ranks: int) -> str | None:
    """Return why the heads of an attention cannot be divided; None if they can."""
    if not is_attention(part):
        return f"is of the class {type(part).__name__}, and not torch's MultiheadAttention"
    if part.bias_k is not None or part.add_zero_attn:
        option = "add_zero_attn" if part.bias_k is None else "add_bias_kv"
        return f"has {option}=True, which adds a key for all heads"
    if not isinstance(part.out_proj, nn.Linear):
        return f"has an out_proj of the class {type(part.out_proj).__name__}, which torch ignores"
    if part.num_heads % ranks:
        return f"has num_heads={part.num_heads}, which do not divide between {ranks} ranks"
    return None


def with_projections(model: nn.Module, styles: Mapping[str, Any]) -> dict[str, Any]:
    """Return styles in which the last layer of each divided attention is divided too.

    Raises:
        ConfigurationError: it has another style.
    """
    found: dict[str, Any] = {}
    for name, style in styles.items():
        found[name] = style
        if style != STYLE or not isinstance(model.get_submodule(name), nn.MultiheadAttention):
            continue
        last = f"{name}.out_proj"
        given = styles.get(last, "rowwise")
        if given != "rowwise":
            raise ConfigurationError(
                f"tensor_plan divides {name!r} by {STYLE!r}, and {last!r} by {given!r}: expected "
                "'rowwise', or no style for it, since each rank has a part of its inputs"
            )
        found[last] = "rowwise"
    return found


class Multihead(Colwise):
    """Divides queries, keys and values by heads; out_proj is a layer with divided inputs."""

    def check(self, name: str, layer: nn.Module) -> None:
        """Raise if the heads cannot be divided.

        Raises:
            ConfigurationError: names the module.
        """
        why = why_whole(layer, self.mesh.size())
        if why is not None:
            raise ConfigurationError(
                f"tensor_plan divides {name!r} by {STYLE!r}, and it {why}: each rank computes "
                "whole heads of torch's attention. Choose another size of the tensor axis, or a "
                "tensor_plan without this module"
            )
        self.name = name

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        """Return the dimension of output features of all parameters."""
        own = layer._parameters.items()
        return {key: Shard(0) for key, parameter in own if parameter is not None}

    def apply(self, layer: Any) -> None:
        """Divide an attention in place; it keeps the number of all heads."""
        self._divide_parameters(layer)
        count = layer.num_heads // self.mesh.size()
        first = count * self.mesh.get_local_rank()
        layer.heads_of_rank = slice(first, first + count)
        layer.forward = _Forward(self, layer)

    def local(self, layer: nn.Module, key: str, parameter: DTensor) -> Tensor | None:
        """Return this rank's heads of queries, of keys and of values."""
        packs = _PACKS if key.startswith("in_proj") else 1
        return rows_of_rank(parameter, packs, 0, self.mesh)

    def enter_mask(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what a mask adds to scores; backward sums its gradient over ranks."""
        if mask.dtype == torch.bool:
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            return zeros.masked_fill_(mask, -torch.inf)
        # Blocks with parts of a sequence have summed the gradients of their inputs.
        is_shared = mask.requires_grad and not self.is_cut
        return copy_to_ranks(mask, self.mesh) if is_shared else mask


class _Forward:
    """Takes the place of an attention's forward; an object, which is copied with its module."""

    def __init__(self, style: Multihead, layer: Any) -> None:
        self._style, self._layer = style, layer

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `nn.MultiheadAttention.forward`; each rank computes some of the heads."""
        layer = self._layer
        refuse_weights(need_weights)
        self._check(query, key, value, attn_mask, is_causal)
        is_batched = query.ndim == 3
        dtype = query.dtype
        q, k, v = (self._heads(part) for part in self._projected(query, key, value))
        if is_causal and key_padding_mask is None and not need_weights:
            attn_mask = None
        else:
            is_causal = False
        mask = self._mask(q, k, key_padding_mask, attn_mask, dtype)
        dropout = layer.dropout if layer.training else 0.0
        weights = None
        if need_weights:
            weights = _weights(q, k, mask, dropout)
            attended = weights @ v
            weights = self._of_all_heads(weights, is_average=average_attn_weights)
        else:
            attended = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        joined = attended.transpose(1, 2).flatten(2)
        if is_batched and not layer.batch_first:
            joined = joined.transpose(0, 1)
        if not is_batched:
            joined = joined.squeeze(0)
            weights = None if weights is None else weights.squeeze(0)
        return layer.out_proj(joined), weights

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> None:
        """Raise for inputs that torch's forward refuses, and for nested tensors."""
        name = self._style.name
        shapes = [tuple(each.shape) for each in (query, key, value) if not each.is_nested]
        dims = {len(shape) for shape in shapes}
        if len(shapes) < 3 or dims not in ({2}, {3}) or shapes[1][:-1] != shapes[2][:-1]:
            received = ", ".join(map(str, shapes)) if len(shapes) == 3 else "nested tensors"
            raise UserCodeError(
                f"{name!r} (MultiheadAttention) was called with queries, keys and values of "
                f"{received}: expected tensors of 2 or 3 dimensions, and as many keys as values"
            )
        if is_causal and mask is None:
            raise UserCodeError(
                f"{name!r} (MultiheadAttention) was called with is_causal=True alone: expected "
                "attn_mask too, such as nn.Transformer.generate_square_subsequent_mask(length)"
            )

    def _projected(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's features of queries, keys and values."""
        style, layer = self._style, self._layer
        query, key, value = (style.enter(layer, each) for each in inputs)
        style._take(layer)
        try:
            weight, bias = layer.in_proj_weight, layer.in_proj_bias
            if weight is not None and query is key and key is value:
                parts = functional.linear(query, weight, bias).chunk(_PACKS, -1)
            else:
                names = "q_proj_weight", "k_proj_weight", "v_proj_weight"
                apart = [getattr(layer, name) for name in names]
                weights = apart if weight is None else weight.chunk(_PACKS)
                biases = [None] * _PACKS if bias is None else bias.chunk(_PACKS)
                terms = zip((query, key, value), weights, biases, strict=True)
                parts = tuple(functional.linear(*each) for each in terms)
        finally:
            style._give_back(layer)
        style.leave(layer, parts[0])
        return parts

    def _heads(self, features: Tensor) -> Tensor:
        """Return features as (batch, heads, length, features of a head)."""
        layer = self._layer
        if features.ndim == 2:
            features = features.unsqueeze(0)
        elif not layer.batch_first:
            features = features.transpose(0, 1)
        heads = features.reshape(*features.shape[:2], -1, layer.head_dim)
        return heads.transpose(1, 2)

    def _mask(
        self,
        query: Tensor,
        key: Tensor,
        padding: Tensor | None,
        mask: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """Return what both masks add to the scores of this rank's heads."""
        layer = self._layer
        batch, length = query.shape[0], key.shape[-2]
        whole = query.shape[-2], length
        added = []
        if mask is not None:
            expected = [whole, (batch * layer.num_heads, *whole)]
            if tuple(mask.shape) not in expected and not in_region():
                raise self._of_shape("attn_mask", mask, expected)
            mask = self._style.enter_mask(mask, dtype)
            if mask.ndim == 3:
                heads = mask.reshape(batch, layer.num_heads, *mask.shape[1:])
                mask = heads[:, layer.heads_of_rank]
            added.append(mask)
        if padding is not None:
            expected = [(batch, length), (length,)][: 1 + (batch == 1)]
            if tuple(padding.shape) not in expected:
                raise self._of_shape("key_padding_mask", padding, expected)
            padding = self._style.enter_mask(padding, dtype)
            added.append(padding.view(batch, 1, 1, length))
        if len(added) < 2:
            return added[0] if added else None
        return added[0] + added[1]

    def _of_shape(self, option: str, mask: Tensor, expected: Any) -> UserCodeError:
        shapes = " or ".join(str(tuple(shape)) for shape in expected)
        return UserCodeError(
            f"{self._style.name!r} (MultiheadAttention) was called with {option} of "
            f"{tuple(mask.shape)}: expected {shapes}"
        )

    def _of_all_heads(self, weights: Tensor, *, is_average: bool) -> Tensor:
        """Return the weights of all heads, or their average."""
        mesh = self._style.mesh
        if is_average:
            count: int = self._layer.num_heads
            return sum_of_ranks(weights.sum(1), mesh) / count
        return gather_from_ranks(weights.movedim(1, -1), mesh).movedim(-1, 1)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    scores = (query * sqrt(1 / query.shape[-1])) @ key.transpose(-2, -1)
    weights: Tensor = (scores if mask is None else scores + mask).softmax(-1)
    return functional.dropout(weights, dropout) if dropout else weights


def pad_as_nested(model: nn.Module) -> None:
    """Let encoders with divided layers compute padding, and return zeros there as torch does.

    In evaluation `nn.TransformerEncoder` leaves padding out by nested tensors, which divided layers
    do not read.
    """
    encoders: list[Any] = [p for p in model.modules() if isinstance(p, nn.TransformerEncoder)]
    for part in encoders:
        is_divided = any(isinstance(parameter, DTensor) for parameter in part.parameters())
        if is_divided and getattr(part, "use_nested_tensor", False):
            part.use_nested_tensor = False
            part.layers[-1].register_forward_hook(_without_padding, with_kwargs=True)


def _without_padding(
    layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor
) -> Tensor | None:
    """Return zeros at the padding, where torch's encoder would have left it out."""
    padding, mask = kwargs.get("src_key_padding_mask"), kwargs.get("src_mask")
    is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters())
    if layer.training or is_trained or padding is None or mask is not None or output.ndim != 3:
        return None
    if torch.is_autocast_enabled() or torch.overrides.has_torch_function((output,)):
        return None
    if not torch.backends.mha.get_fastpath_enabled():
        return None
    is_padding = padding if padding.dtype == torch.bool else padding != 0
    is_aligned = not (is_padding[:, :-1] & ~is_padding[:, 1:]).any()
    return output.masked_fill(is_padding[..., None], 0) if is_aligned else None
