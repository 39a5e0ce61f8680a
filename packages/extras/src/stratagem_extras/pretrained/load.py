"""PretrainedWeights: a folder of weights, read into a model as its strategy holds it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stratagem.checkpoint import Shards
from stratagem.errors import CheckpointMismatchError, ConfigurationError, StratagemError
from stratagem.strategies import PreparedModel, Strategy, user_module
from stratagem_extras.pretrained.adapters import (
    CONFIG,
    check_initialization,
    is_adapter,
    open_adapter,
    sources_of_adapter,
    warn_of_another_base,
)
from stratagem_extras.pretrained.folder import StoredTensor, open_folder
from stratagem_extras.pretrained.names import (
    adapters_of,
    check_names,
    listing_all,
    match_names,
    tensors_of,
    ties_of,
)

_MARK = "_stratagem_pretrained_weights"
"""The attribute of a module that has begun with weights: the object that read them."""


@dataclass(frozen=True)
class PretrainedWeights:
    """A folder of safetensors in Hugging Face's layout, to load a model from.

    Each rank reads its shards of each tensor. The memory of a rank grows by one tensor at most.
    A plain weight of a layer that the precision has quantised is read whole, and quantised.

    Args:
        folder: a local folder with "model.safetensors", or with several files and
            "model.safetensors.index.json"; or one file.
        part: the submodule that the folder describes, such as "policy"; "": the one with the most
            names of the folder.
        allow_missing: patterns of names of the model that the folder may lack, such as
            "model.score.*". PEFT's adapters may be missing anyway.
        allow_unexpected: patterns of names of the folder that the model may lack.
        adapter: the folder of an adapter of PEFT, read after the base model. `folder` itself may be
            an adapter's folder, too: the base model then keeps its weights.

    Raises:
        CheckpointNotFoundError: the folder does not exist.
        CheckpointError: the folder lacks a file, or its index.
        ConfigurationError: an argument has another type.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from stratagem import Lite
        >>> from stratagem.checkpoint import PretrainedWeights, save_pretrained
        >>> lite = Lite(accelerator="cpu")
        >>> model = lite.setup(torch.nn.Linear(2, 1))
        >>> folder = tempfile.mkdtemp() + "/linear"
        >>> save_pretrained(model, folder)
        >>> other = lite.setup(torch.nn.Linear(2, 1))
        >>> lite.load_weights(other, PretrainedWeights(folder))
        >>> bool((other.weight == model.weight).all())
        True
    """

    folder: str | os.PathLike[str]
    part: str = ""
    allow_missing: Sequence[str] = ()
    allow_unexpected: Sequence[str] = ()
    adapter: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check the arguments and the folder."""
        if not isinstance(self.folder, (str, os.PathLike)):
            raise ConfigurationError(
                f"weights={self.folder!r}: expected a folder of safetensors, or "
                "PretrainedWeights(folder)"
            )
        for name in ("allow_missing", "allow_unexpected"):
            if isinstance(getattr(self, name), str):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r}: expected a list of patterns"
                )
        folder = Path(self.folder).expanduser().absolute()
        if is_adapter(folder):
            open_adapter(folder)
        else:
            open_folder(self.folder)
        object.__setattr__(self, "folder", folder)
        if self.adapter is None:
            return
        adapter = Path(self.adapter).expanduser().absolute()
        if is_adapter(folder) or not is_adapter(adapter):
            raise ConfigurationError(
                f"PretrainedWeights({str(folder)!r}, adapter={str(adapter)!r}): expected the "
                f"folder of a base model, and one of an adapter, which has {CONFIG}"
            )
        open_adapter(adapter)
        object.__setattr__(self, "adapter", adapter)

    @classmethod
    def of(cls, weights: Any) -> PretrainedWeights:
        """Return the weights that an argument means: a folder, or a PretrainedWeights."""
        return weights if isinstance(weights, PretrainedWeights) else cls(weights)

    def start(self, strategy: Strategy, prepared: PreparedModel, *, reads: bool) -> None:
        """Load a model for its first run in a Trainer; later runs begin with the trained weights.

        Args:
            strategy: the strategy that prepared the model.
            prepared: the model.
            reads: False: the run begins with a checkpoint.
        """
        module = user_module(prepared.original)
        if reads and vars(module).get(_MARK) is not self:
            self.load(strategy, prepared)
        self.mark(module)

    def mark(self, module: nn.Module) -> None:
        """Remember that a module has begun with these weights."""
        vars(module)[_MARK] = self

    def load(self, strategy: Strategy, prepared: PreparedModel) -> None:
        """Load a prepared model; called on every rank.

        Args:
            strategy: the strategy that prepared the model.
            prepared: the model.

        Raises:
            CheckpointMismatchError: on every rank, before a parameter is changed: names or shapes
                differ. The error lists them with the nearest ones.
            ConfigurationError: the model makes its parameters of several tensors.
        """
        prepared.reshard()
        own = prepared.original.state_dict(keep_vars=True)
        is_divided = strategy.capabilities.parameters == "divided"
        sources: dict[str, StoredTensor] = {}
        layers: dict[str, Any] = {}
        error: StratagemError | None = None
        try:
            with listing_all(strategy, prepared):
                listed = prepared.original.state_dict(keep_vars=True)
                layers = _quantized_layers(prepared.original, listed)
                sources = self._find(strategy, prepared, listed)
        except StratagemError as raised:
            error = raised
        failures = strategy.ranks.gather_objects("" if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(failures):
            if text:
                raise CheckpointMismatchError(f"rank {rank}: {text}")
        of_layers = [
            ({n: sources.pop(n) for n in (name, *_scales(name, layer)) if n in sources}, layer)
            for name, layer in layers.items()
        ]
        pending = _read_in_place(strategy, sources, own)
        names = [name for name in sources if name in pending]
        if is_divided:  # each rank takes part in each load
            everywhere = set().union(*strategy.ranks.gather_objects(names))
            names = [name for name in sources if name in everywhere]
        in_shards = strategy.capabilities.sharded_state
        limit = max((sources[name].nbytes for name in names), default=0)
        sizes = {n: sources[n].nbytes if is_divided else _size_here(own[n]) for n in names}
        for group in _groups(sizes, limit):
            state: dict[str, Any] = {name: sources[name] for name in group if name in pending}
            if not in_shards:
                state = {name: value.whole() for name, value in state.items()}
            strategy.load_model_state(prepared, state, strict=False)
        for found, layer in of_layers:
            state = {name: source.whole() for name, source in found.items() if name in own}
            if len(state) == 1:  # a plain weight
                ((name, weight),) = state.items()
                prefix = name.removesuffix("weight")
                state = {prefix + n: value for n, value in layer.quantized_state(weight).items()}
            if found:
                strategy.load_model_state(prepared, state, strict=False)

    def _find(
        self, strategy: Strategy, prepared: PreparedModel, own: Mapping[str, Any]
    ) -> dict[str, StoredTensor]:
        """Return the stored tensor that each name of the model reads.

        A quantised layer reads its plain weight, or the tensors of its quantised weight.
        """
        is_divided = strategy.capabilities.parameters == "divided"
        if is_divided and not hasattr(strategy, "listing_all"):
            raise ConfigurationError(
                f"weights={str(self.folder)!r}: {type(strategy).__name__} gives ranks different "
                "parameters and has no `listing_all(module)`, a context in which the model lists "
                "those of all ranks: load a checkpoint of another strategy with ckpt_path"
            )
        module = user_module(prepared.original)
        shapes, ties = tensors_of(own), ties_of(own)
        folder = Path(self.folder)
        adapter = folder if is_adapter(folder) else self.adapter
        of_adapter: dict[str, StoredTensor] = {}
        if adapter is not None:
            described = {name: (shape, own[name].dtype) for name, shape in shapes.items()}
            of_adapter = sources_of_adapter(Path(adapter), module, self.part, described)
        if adapter is folder:
            return of_adapter
        check_initialization(module, folder, has_adapter=bool(of_adapter))
        if adapter is not None:
            warn_of_another_base(Path(adapter), folder)
        stored = open_folder(folder)
        quantized = _quantized_layers(prepared.original, own)
        scales = {name for weight, layer in quantized.items() for name in _scales(weight, layer)}
        kinds = {name.rpartition(".")[2] for name in scales}
        dtypes = {name: own[name].dtype for name in shapes}
        if not any(name.rpartition(".")[2] in kinds for name in stored):
            shapes = {name: shape for name, shape in shapes.items() if name not in scales}
            for name, layer in quantized.items():
                shapes[name] = (layer.out_features, layer.in_features)
                dtypes[name] = layer.plain_dtype
        try:
            names = match_names(list(shapes), list(stored), module, self.part)
            check_names(
                names,
                shapes,
                {name: tensor.shape for name, tensor in stored.items()},
                ties,
                allow_missing=[*self.allow_missing, *adapters_of(module), *of_adapter],
                allow_unexpected=self.allow_unexpected,
            )
        except CheckpointMismatchError as error:
            message = f"{str(self.folder)!r}: {error}"
            raise CheckpointMismatchError(message, error.missing, error.unexpected) from error
        first: dict[str, str] = {}
        for name, source in names.sources.items():
            one = names.sources[first.setdefault(ties[name], name)]
            if one != source and strategy.ranks.global_rank == 0:
                _check_equal(folder, (one, source), stored)
            _check_kind(folder, (name, dtypes[name]), source, stored[source])
        # Ranks with different parameters may have different names of a tied weight.
        read = names.sources if is_divided else first.values()
        found = {name: stored[names.sources[name]] for name in read}
        return {**found, **of_adapter}


def _check_equal(folder: Path, names: tuple[str, str], stored: Mapping[str, StoredTensor]) -> None:
    """Refuse two names of one parameter with different values."""
    one, other = (stored[name] for name in names)
    if not one.equals(other):
        raise CheckpointMismatchError(
            f"{str(folder)!r} has different values of {names[0]} and {names[1]}, which are one "
            "parameter of the model: build the model without the tie (tie_word_embeddings=False)"
        )


def _check_kind(
    folder: Path, own: tuple[str, torch.dtype], source: str, stored: StoredTensor
) -> None:
    """Refuse integers for a parameter of floating-point numbers: weights may be quantised."""
    name, dtype = own
    if dtype.is_floating_point and not stored.dtype.is_floating_point:
        raise CheckpointMismatchError(
            f"{str(folder)!r} has {source} in {stored.dtype}, as quantised weights have it, and "
            f"the model's {name} is {dtype}: expected a folder of floating-point weights"
        )


def _quantized_layers(model: nn.Module, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers that quantise a weight (`quantized_state`), by the names of the weight."""
    layers = [part for part in model.modules() if hasattr(type(part), "quantized_state")]
    by_weight = {id(layer.weight): layer for layer in layers}
    return {name: by_weight[id(value)] for name, value in own.items() if id(value) in by_weight}


def _scales(name: str, layer: nn.Module) -> list[str]:
    """Return the names of the other parameters that a quantised layer has for its weight."""
    prefix = name.removesuffix("weight")
    parameters = [own for own, value in layer._parameters.items() if value is not None]
    return [prefix + own for own in parameters if own not in ("weight", "bias")]


def _read_in_place(
    strategy: Strategy, sources: Mapping[str, StoredTensor], own: Mapping[str, Any]
) -> set[str]:
    """Read shards into the memory of the parameters; return the other names of this rank.

    A strategy of another distribution may keep copies of its shards, so it loads them itself.
    """
    pending = {name for name in sources if name in own}
    if not type(strategy).load_model_state.__module__.startswith("stratagem_torch."):
        return pending
    for name in list(pending):
        local = own[name].to_local() if isinstance(own[name], DTensor) else None
        if type(local) is Tensor:
            _, offsets = compute_local_shape_and_global_offset(
                own[name].shape, own[name].device_mesh, own[name].placements
            )
            source = sources[name]
            source.read_into(Shards(source.shape, source.dtype, [(tuple(offsets), local.detach())]))
            pending.remove(name)
    return pending


def _groups(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Yield names whose tensors take no more memory on this rank together than the largest one.

    A strategy checks the names of its model in each call, so a call takes several tensors.
    """
    group: list[str] = []
    room = limit
    for name, size in sizes.items():
        if group and size > room:
            yield group
            group, room = [], limit
        group.append(name)
        room -= size
    if group:
        yield group


def _size_here(value: Tensor) -> int:
    """Return the bytes of a tensor on this rank.

    A parameter that an engine has cut is empty here, and read in ranges by its strategy.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.numel() * local.element_size()
