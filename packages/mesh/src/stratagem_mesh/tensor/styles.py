"""Styles of division: the parameters on each rank, and the inputs and outputs of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from stratagem.errors import ConfigurationError
from stratagem_mesh.tensor.collectives import (
    copy_to_ranks,
    gather_from_ranks,
    part_of_rank,
    sum_of_ranks,
    sum_to_parts,
)
from stratagem_mesh.tensor.region import Region
from stratagem_mesh.tensor.sequence import Blocks


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is a Conv1D of transformers: a Linear with a transposed weight."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer maps features to features by a matrix; packed bits are none."""
    weight = layer._parameters.get("weight")
    is_packed = weight is not None and not weight.is_floating_point()
    return (isinstance(layer, nn.Linear) and not is_packed) or is_transposed(layer)


def features(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    weight: Any = layer.weight
    return tuple(weight.shape) if is_transposed(layer) else (weight.shape[1], weight.shape[0])


def has_parameters(layer: nn.Module) -> bool:
    """Whether a module has parameters of its own."""
    return any(parameter is not None for parameter in layer._parameters.values())


def computed(layer: nn.Module) -> list[str]:
    """Return which of weight and bias are no parameters, as a parametrization computes them.

    They are not read, since spectral_norm changes its state at each access.
    """
    found = layer._modules.get("parametrizations")
    others = {*vars(layer), *layer._buffers, *(found if isinstance(found, nn.ModuleDict) else ())}
    return [k for k in ("weight", "bias") if k not in layer._parameters and k in others]


class Style(ABC):
    """Divides a layer; its own forward runs with the parameters of this rank.

    The parameters are DTensors, which are sharded and saved as such. Around each call of the
    layer, hooks put plain tensors of this rank in their place.

    Args:
        region: the state that the divided layers of the model share.
        packs: the number of layers that are packed in one, such as 3 for queries, keys and values.

    Attributes:
        blocks: the blocks with the layer, if they hold parts of a sequence in training.
    """

    kinds = "linear layers"

    def __init__(self, region: Region, packs: int = 1) -> None:
        self.region = region
        self.mesh = region.mesh
        self.packs = packs
        self.blocks: Blocks | None = None
        self._whole: dict[str, Any] = {}

    @property
    def is_cut(self) -> bool:
        """Whether the layer lies in blocks that compute a part of the sequence now."""
        return self.blocks is not None and self.blocks.is_cut()

    def fits(self, layer: nn.Module) -> bool:
        """Whether the style can divide a module of this class."""
        return is_linear(layer)

    @abstractmethod
    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        """Return how the parameters are divided; others stay whole."""

    def check(self, name: str, layer: nn.Module) -> None:
        """Raise if the layer cannot be divided.

        Raises:
            ConfigurationError: names the layer.
        """
        if not self.fits(layer):
            raise ConfigurationError(
                f"{name!r} is a {type(layer).__name__}, which {type(self).__name__.lower()} does "
                f"not divide: expected {self.kinds}"
            )
        if keys := computed(layer):
            raise ConfigurationError(
                f"{name}.{keys[0]} is computed from other parameters, such as by weight_norm or "
                "spectral_norm, and ranks divide parameters: expected a tensor_plan without this "
                "layer, or torch.nn.utils.parametrize.remove_parametrizations"
                f"(layer, {keys[0]!r}) before training"
            )
        size = self.mesh.size() * self.packs
        for key, placement in self.placements(layer).items():
            if not isinstance(placement, Shard):
                continue
            length = layer._parameters[key].shape[placement.dim]  # type: ignore[union-attr]
            if length % size:
                raise ConfigurationError(
                    f"{name}.{key} has {length} features, which do not divide between "
                    f"{self.mesh.size()} ranks: choose another size of the tensor axis, or a "
                    "tensor_plan without this layer"
                )

    def apply(self, layer: nn.Module) -> None:
        """Divide a layer in place."""
        self._divide_parameters(layer)
        layer.register_forward_pre_hook(self._before, with_kwargs=True)
        layer.register_forward_hook(self._after, always_call=True)

    def _divide_parameters(self, layer: nn.Module) -> None:
        for key, placement in self.placements(layer).items():
            whole = layer._parameters[key]
            assert whole is not None
            if isinstance(whole, DTensor):  # of a tied layer, which is divided already
                continue
            layer._parameters[key] = divided(whole, self.region, placement)

    def enter(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return the input as this rank's part of the layer reads it."""
        return values

    def leave(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return the output of the whole layer, or the part that the next layer reads."""
        return values

    def local(self, layer: nn.Module, key: str, parameter: DTensor) -> Tensor | None:
        """Return this rank's part of a parameter."""
        return parameter.to_local()

    def __deepcopy__(self, memo: object) -> Style:
        return self

    def _before(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = [*args, *kwargs.values()]
        inputs[0] = self.enter(layer, inputs[0])
        self._take(layer)
        count = len(args)
        return tuple(inputs[:count]), dict(zip(kwargs, inputs[count:], strict=True))

    def _take(self, layer: nn.Module) -> None:
        """Put tensors of this rank in the place of the parameters."""
        whole = layer._parameters
        self._whole = dict(whole)
        for key, parameter in self._whole.items():
            if isinstance(parameter, DTensor):
                whole[key] = self.local(layer, key, parameter)  # type: ignore[assignment]

    def _give_back(self, layer: nn.Module) -> None:
        layer._parameters.update(self._whole)
        self._whole = {}

    def _after(self, layer: nn.Module, args: Any, output: Any) -> Any:
        self._give_back(layer)
        return None if output is None else self.leave(layer, output)


def rows_of_rank(parameter: DTensor, packs: int, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of each packed layer.

    A checkpoint has packed layers one after the other, and so does each rank's shard of them. The
    shards are gathered for the call, and each rank takes its rows of each layer.
    """
    if packs == 1:
        return parameter.to_local()
    whole = parameter.redistribute(placements=[Replicate()])
    values = whole.to_local(grad_placements=[Partial()])
    shape = values.shape
    sizes = *shape[:dim], packs, mesh.size(), -1, *shape[dim + 1 :]
    mine: Tensor = values.view(sizes).select(dim + 1, mesh.get_local_rank())
    return mine.flatten(dim, dim + 1)


def divided(whole: nn.Parameter, region: Region, placement: Placement) -> nn.Parameter:
    """Return a parameter that is divided between ranks, each of which has the whole values."""
    known = region.divided.get(whole)
    if known is None:
        # With None nothing is sent, since the values are equal on all ranks.
        tensor = distribute_tensor(whole.detach(), region.mesh, [placement], src_data_rank=None)
        known = nn.Parameter(tensor, requires_grad=whole.requires_grad)
        region.divided[whole] = known
    return known


class Colwise(Style):
    """Divides output features; each rank has its part of the output."""

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        """Return the dimension of output features of weight and bias."""
        weight = Shard(1 if is_transposed(layer) else 0)
        has_bias = layer._parameters.get("bias") is not None
        return {"weight": weight, **({"bias": Shard(0)} if has_bias else {})}

    def apply(self, layer: nn.Module) -> None:
        """Divide a layer in place."""
        super().apply(layer)
        if is_transposed(layer):
            layer.nf = layer.nf // self.mesh.size()  # type: ignore[operator,assignment]

    def enter(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return the input; backward sums its gradient over ranks."""
        if self.blocks is not None and self.is_cut:
            return self.blocks.enter(values)
        return self.region.enter(values)

    def leave(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return this rank's part."""
        if not self.is_cut:  # there each rank draws its own numbers
            self.region.begin(layer)
        return values

    def local(self, layer: nn.Module, key: str, parameter: DTensor) -> Tensor | None:
        """Return this rank's rows of each packed layer."""
        dim = self.placements(layer)[key].dim  # type: ignore[attr-defined]
        return rows_of_rank(parameter, self.packs, dim, self.mesh)


class ColwiseGathered(Colwise):
    """Divides output features; each rank has the whole output."""

    def enter(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return the input; backward sums its gradient over ranks."""
        return copy_to_ranks(values, self.mesh)

    def leave(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return the parts of all ranks."""
        return gather_from_ranks(values, self.mesh)


class ColwiseVocabulary(ColwiseGathered):
    """Divides the logits of a last layer; in training each rank keeps its part for the loss.

    Attributes:
        is_asked: whether the model computes its loss from the parts itself; None: its
            parts go to `cross_entropy`, as a DTensor.
    """

    def __init__(self, region: Region, packs: int = 1) -> None:
        super().__init__(region, packs)
        self.is_asked: bool | None = None

    def keeps_parts(self) -> bool:
        """Whether the logits stay divided now."""
        return torch.is_grad_enabled() and self.is_asked is not False

    def leave(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return this rank's part in training, else the parts of all ranks."""
        if self.is_asked is None and layer.training and self.keeps_parts():
            placements = [Shard(values.ndim - 1)]
            return DTensor.from_local(values, self.mesh, placements, run_check=False)
        return values if self.is_asked and self.keeps_parts() else super().leave(layer, values)


class Rowwise(Style):
    """Divides input features; the output is the sum of the ranks' parts."""

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        """Return the dimension of input features of the weight; a bias is whole."""
        weight = Shard(0 if is_transposed(layer) else 1)
        has_bias = self.blocks is not None and layer._parameters.get("bias") is not None
        return {"weight": weight, **({"bias": Replicate()} if has_bias else {})}

    def enter(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return this rank's part of the input."""
        self.region.end()
        if values.shape[-1] == features(layer)[0]:
            return part_of_rank(values, self.mesh)
        return values

    def leave(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return the sum of the ranks' outputs, or this rank's part of it, and the bias once."""
        is_cut = self.is_cut
        if self.blocks is not None:
            self.blocks.end_pair()
        total = (sum_to_parts if is_cut else sum_of_ranks)(values, self.mesh)
        bias: Any = layer._parameters.get("bias")
        if isinstance(bias, DTensor):
            bias = _local_whole(bias, is_part=is_cut)
        return total if bias is None else total + bias.to(total.dtype)

    def _before(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entered = super()._before(layer, args, kwargs)
        bias = layer._parameters.get("bias")
        if bias is not None:  # a Conv1D needs one
            zeros = torch.zeros_like(bias) if is_transposed(layer) else None
            layer._parameters["bias"] = zeros  # type: ignore[assignment]
        return entered


class EmbeddingRowwise(Style):
    """Divides a vocabulary; each rank looks up the tokens that it has."""

    kinds = "an nn.Embedding"

    def fits(self, layer: nn.Module) -> bool:
        """Whether the module is an embedding that does not scale its rows or their gradients."""
        return (
            isinstance(layer, nn.Embedding)
            and layer.max_norm is None
            and not (layer.sparse or layer.scale_grad_by_freq)
        )

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        """Return the dimension of tokens."""
        return {"weight": Shard(0)}

    def enter(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return the rows of this rank's tokens, and row 0 for others."""
        rows = layer.num_embeddings // self.mesh.size()  # type: ignore[operator]
        index = values - rows * self.mesh.get_local_rank()
        self._others = (index < 0) | (index >= rows)
        padding = layer.padding_idx
        self._padding: Any = padding
        if padding is not None:  # no gradient goes to this row
            number: Any = padding
            here = int(number) - rows * self.mesh.get_local_rank()
            layer.padding_idx = here if 0 <= here < rows else None  # type: ignore[assignment]
        return index.masked_fill(self._others, 0)

    def leave(self, layer: nn.Module, values: Tensor) -> Tensor:
        """Return the rows of all tokens."""
        layer.padding_idx = self._padding
        return sum_of_ranks(values.masked_fill(self._others[..., None], 0), self.mesh)


class Replicated(Style):
    """Leaves parameters whole that are used for a part of the heads; sums their gradients."""

    kinds = "a module with parameters of its own, such as a norm"

    def fits(self, layer: nn.Module) -> bool:
        """Whether the module has parameters."""
        return has_parameters(layer)

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        """Return that all parameters are whole."""
        return {k: Replicate() for k, value in layer._parameters.items() if value is not None}

    def local(self, layer: nn.Module, key: str, parameter: DTensor) -> Tensor | None:
        """Return the parameter; gradients of ranks are parts of a sum."""
        return _local_whole(parameter, is_part=True)


class InBlocks(Replicated):
    """Leaves parameters whole that compute a part of a sequence; sums their gradients then.

    Activation checkpointing of a block repeats its forward without its hooks, so the forward takes
    the tensors of this rank by itself.
    """

    def apply(self, layer: nn.Module) -> None:
        """Let the module compute with the tensors of this rank."""
        self._divide_parameters(layer)
        layer.forward = _WithTensors(self, layer)

    def local(self, layer: nn.Module, key: str, parameter: DTensor) -> Tensor | None:
        """Return the parameter."""
        return _local_whole(parameter, is_part=self.is_cut)


class _WithTensors:
    """Takes the place of a module's forward, which computes with the tensors of this rank."""

    def __init__(self, style: InBlocks, layer: nn.Module) -> None:
        self._style, self._layer, self._forward = style, layer, layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._style._take(self._layer)
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._style._give_back(self._layer)


def _local_whole(parameter: DTensor, *, is_part: bool) -> Tensor:
    """Return a whole parameter; with `is_part`, gradients of ranks are parts of a sum."""
    return parameter.to_local(grad_placements=[Partial() if is_part else Replicate()])
