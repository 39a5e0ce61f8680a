"""save_pretrained: a folder of weights, written from the shards of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratagem.checkpoint import CheckpointIO, Shards
from stratagem.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
    format_names,
)
from stratagem.strategies import PreparedModel, Ranks, Strategy, user_module
from stratagem_extras.pretrained.adapters import (
    CONFIG,
    WEIGHTS,
    Adapted,
    Merge,
    find_adapted,
    merges,
)
from stratagem_extras.pretrained.folder import open_folder
from stratagem_extras.pretrained.names import (
    listing_all,
    match_names,
    part_of_transformers,
    prefix_to_drop,
    ties_of,
)
from stratagem_extras.pretrained.writer import Description, NewFolder


def save_pretrained(
    source: Any,
    folder: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    part: str = "",
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    adapter: str = "",
    merged: bool = False,
) -> None:
    """Write the weights of a model as a folder of safetensors; called on every rank.

    Rank 0 writes one shard of a tensor after the other, which the other ranks send. The folder
    appears whole or not at all. Of tied parameters one name is written.

    Of a model with adapters of PEFT, the adapter alone is written, in PEFT's format:
    "adapter_config.json" and "adapter_model.safetensors".

    Args:
        source: a Trainer, during or after a run, or a model that `lite.setup` returned.
        folder: the new folder.
        like: a folder of the same model, such as the folder that was loaded. The tensors get the
            names in this folder, and its configs and tokenizer are copied. None: the tensors get
            the names in the model of transformers, with its config, or in the module. For an
            adapter alone: the folder of its base model, which its config names.
        part: the submodule to write; "": the model of transformers, or the whole module.
        dtype: the dtype of floating-point tensors, such as "bfloat16"; None: as in the model.
        max_shard_size: the most bytes of a file, such as "5GB".
        adapter: the name of the adapter to write; "": the active one.
        merged: whether to write the base model with its active adapters merged, layer by layer,
            instead of the adapter.

    Raises:
        ConfigurationError: the folder exists, or an argument has another form.
        CheckpointContentError: adapters cannot be written or merged, or a tensor has an unknown
            dtype.
        CheckpointSaveError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from stratagem import Lite
        >>> from stratagem.checkpoint import save_pretrained
        >>> model = Lite(accelerator="cpu").setup(torch.nn.Linear(2, 1))
        >>> folder = tempfile.mkdtemp() + "/linear"
        >>> save_pretrained(model, folder, dtype="bfloat16")
        >>> from safetensors.torch import load_file
        >>> load_file(f"{folder}/model.safetensors")["weight"].dtype
        torch.bfloat16
    """
    strategy, prepared = _prepared(source)
    ranks = strategy.ranks
    prepared.reshard()
    module = user_module(prepared.original)
    with listing_all(strategy, prepared):
        ties = ties_of(prepared.original.state_dict(keep_vars=True))
    with in_shards(strategy):
        state = strategy.model_state(prepared)
    described = _described(ranks, state)
    places = _places(ranks, state)

    request = _Request(folder, like, part, dtype, max_shard_size, adapter, merged)
    with _on_rank_zero(ranks) as attempt:
        begun: _Begun | None = attempt(partial(_begin, request, described, ties, module))
        groups = ranks.broadcast([] if begun is None else [one.sources for one in begun.groups])
        names = [name for group in groups for name in group]
        buffer = _buffer(ranks, [(places.get(name, {}), described[name]) for name in names])
        for number, group in enumerate(groups):
            whole: dict[str, Tensor] = {}
            for name in group:
                pieces = _pieces(ranks, state.get(name), places.get(name), described[name], buffer)
                if begun is None:
                    for _ in pieces:
                        pass
                elif begun.groups[number].merge is None:
                    for first, values in pieces:
                        new = begun.groups[number].target
                        attempt(partial(begun.folder.write, new, values, first))
                else:
                    whole[name] = _whole(ranks, pieces, described[name])
            if begun is not None and begun.groups[number].merge is not None:
                attempt(partial(begun.merge, number, whole))
        if begun is not None:
            attempt(begun.folder.commit)
    ranks.barrier("save_pretrained")


@dataclass
class _Request:
    """The arguments of `save_pretrained`."""

    folder: str | os.PathLike[str]
    like: str | os.PathLike[str] | None
    part: str
    dtype: torch.dtype | str | None
    max_shard_size: int | str
    adapter: str
    merged: bool


@dataclass
class _Group:
    """Tensors that are written together: one as it is, or those of a layer that is merged."""

    sources: list[str]
    target: str = ""
    merge: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None


@dataclass
class _Begun:
    """A folder that is being written; on rank 0."""

    folder: NewFolder
    groups: list[_Group]
    names: dict[str, str]

    def merge(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of a layer, merged."""
        function = self.groups[number].merge
        assert function is not None
        for name, value in function(tensors).items():
            if name in self.names:
                self.folder.write(self.names[name], value)


def _begin(
    request: _Request,
    described: Mapping[str, Description],
    ties: Mapping[str, str],
    module: nn.Module,
) -> _Begun:
    """Return the new folder with its configs, and what to write into it."""
    adapted = find_adapted(module, request.part)
    if adapted is None and (request.merged or request.adapter):
        argument = "merged=True" if request.merged else f"adapter={request.adapter!r}"
        raise ConfigurationError(f"{argument}: the model has no adapters of PEFT: leave it out")
    if adapted is not None and not request.merged:
        return _begin_adapter(request, described, adapted)
    options = (request.dtype, request.max_shard_size)
    like, part = request.like, request.part
    kept = {name: name for name in described}
    layers: list[Merge] = []
    if adapted is not None:
        kept, layers = merges(adapted, described, ties)
        part = adapted.base[:-1]
    firsts = {name: ties.get(name, name) for name in kept}
    plain_ties = {new: kept.get(firsts[name], new) for name, new in kept.items()}
    plain = names_to_write(kept.values(), plain_ties, like, module, part)
    names = {name: plain[new] for name, new in kept.items() if new in plain}
    tensors = {new: described[name] for name, new in names.items()}
    model = part_of_transformers(module, prefix_to_drop(list(kept.values()), module, part))
    fits = like is not None and not new_in(like, tensors, has_config=model is not None)
    target = NewFolder(request.folder, tensors, *options)
    target.add_files(like, None if fits else model)
    chosen = [request.adapter] if request.adapter else None
    groups = [_Group(one.sources, merge=partial(one.apply, chosen)) for one in layers]
    changed = {name for one in layers for name in one.results.values()}
    groups += [_Group([name], new) for name, new in names.items() if name not in changed]
    return _Begun(target, groups, names)


def _begin_adapter(
    request: _Request, described: Mapping[str, Description], adapted: Adapted
) -> _Begun:
    """Return the folder of an adapter alone."""
    adapter = adapted.chosen(request.adapter)
    names = adapted.names(described, adapter)
    tensors = {new: described[name] for name, new in names.items()}
    target = NewFolder(request.folder, tensors, request.dtype, None, single=WEIGHTS)
    target.add_json(CONFIG, adapted.config(adapter, request.like))
    return _Begun(target, [_Group([name], new) for name, new in names.items()], names)


def _prepared(source: Any) -> tuple[Strategy, PreparedModel]:
    """Return the strategy and the prepared model of a Trainer, or of a model of Lite."""
    prepared = getattr(source, "prepared", None)
    if isinstance(prepared, PreparedModel):
        return source.__dict__["_strategy"], prepared
    if hasattr(source, "run") and hasattr(source, "fit"):
        return source.strategy, source.run.require_prepared()
    raise ConfigurationError(
        f"save_pretrained() received a {type(source).__name__}; expected a Trainer that has run, "
        "or a model that lite.setup() returned"
    )


# -- the names


def names_to_write(
    own: Iterable[str],
    ties: Mapping[str, str],
    like: str | os.PathLike[str] | None,
    module: torch.nn.Module | None,
    part: str,
) -> dict[str, str]:
    """Return the name to write of each tensor of a model, once for tied ones.

    Raises:
        CheckpointMismatchError: the model lacks names of the folder `like`.
    """
    own = list(own)
    if like is None:
        drop = prefix_to_drop(own, module, part)
        firsts: dict[str, str] = {}
        for name in own:
            if name.startswith(drop):
                firsts.setdefault(ties.get(name, name), name)
        return {name: name.removeprefix(drop) for name in firsts.values()}
    known = match_names(own, list(open_folder(like)), module, part)
    if known.unexpected:
        raise CheckpointMismatchError(
            f"{str(like)!r} has {format_names(known.unexpected)}, which the model lacks: write it "
            "like the folder that the model was loaded from, or without `like`",
            unexpected=known.unexpected,
        )
    written = {ties.get(name, name) for name in known.sources}
    names = {name: known.sources[name] for name in own if name in known.sources}
    for name in known.missing:  # a new head
        if ties.get(name, name) not in written:
            names[name] = known.lacks + name.removeprefix(known.into)
    return names


def new_in(
    like: str | os.PathLike[str], tensors: Mapping[str, Description], *, has_config: bool
) -> list[str]:
    """Return the tensors that a folder lacks or has in another shape.

    Args:
        like: the folder.
        tensors: the tensors to write.
        has_config: whether a model of transformers has a config that describes them.

    Raises:
        CheckpointMismatchError: a shape differs, and only the folder has a config.
    """
    stored = open_folder(like)
    resized = [n for n, (shape, _) in tensors.items() if n in stored and stored[n].shape != shape]
    if resized and not has_config:
        name = resized[0]
        raise CheckpointMismatchError(
            f"{name} has the shape {tensors[name][0]}, and {stored[name].shape} in {str(like)!r}, "
            "whose config would describe another model than the weights: write it without `like`, "
            "or by save_pretrained(trainer, ...), which knows the model's own config"
        )
    return [name for name in tensors if name not in stored or name in resized]


# -- the tensors


@contextmanager
def in_shards(strategy: Strategy) -> Iterator[None]:
    """Let a strategy return shards on every rank, whatever the format of its checkpoints."""
    with_shards = SimpleNamespace(supports_shards=True)
    own, strategy.checkpoint_io = strategy.checkpoint_io, cast("CheckpointIO", with_shards)
    try:
        yield
    finally:
        strategy.checkpoint_io = own


def _described(ranks: Ranks, state: Mapping[str, Any]) -> dict[str, Description]:
    """Return shapes and dtypes by name; a rank without a chunk may not know the dtype."""
    own = {
        name: [list(value.shape), str(value.dtype).removeprefix("torch.")]
        for name, value in state.items()
        if isinstance(value, Tensor) or (isinstance(value, Shards) and value.chunks)
    }
    everyone: dict[str, Any] = {}
    for of_rank in ranks.gather_objects(own):
        everyone = {**of_rank, **everyone}
    return {
        name: (tuple(everyone[name][0]), getattr(torch, everyone[name][1]))
        for name in dict.fromkeys((*state, *everyone))
        if name in everyone
    }


def _places(ranks: Ranks, state: Mapping[str, Any]) -> dict[str, dict[int, list[Any]]]:
    """Return the chunks that each rank sends to rank 0, by name and rank; rank 0 has the others."""
    own = {
        name: [[list(offsets), list(chunk.shape)] for offsets, chunk in value.chunks]
        for name, value in state.items()
        if isinstance(value, Shards)
    }
    places: dict[str, dict[int, list[Any]]] = {}
    for rank, of_rank in enumerate(ranks.gather_objects(own)):
        for name, chunks in of_rank.items():
            held = places.setdefault(name, {})
            known = [chunk for others in held.values() for chunk in others]
            held[rank] = [chunk for chunk in chunks if chunk not in known]
    if ranks.world_size > 1 and places and not dist.is_initialized():
        raise ConfigurationError(
            "save_pretrained() gathers shards by torch.distributed, which this strategy does not "
            "use: save a checkpoint, and write the folder with `stratagem checkpoint convert "
            "CKPT DIR --to huggingface`"
        )
    return places


def _buffer(ranks: Ranks, tensors: Iterable[tuple[Mapping[int, list[Any]], Description]]) -> Tensor:
    """Return memory on rank 0 for the largest chunk of another rank."""
    sizes = [
        prod(shape) * dtype.itemsize
        for places, (_, dtype) in tensors
        for rank, chunks in places.items()
        for _, shape in chunks
        if rank and ranks.is_global_zero
    ]
    return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=ranks.device)


def _pieces(
    ranks: Ranks,
    value: Any,
    places: Mapping[int, list[Any]] | None,
    description: Description,
    buffer: Tensor,
) -> Iterator[tuple[int, Tensor]]:
    """Yield ranges of a tensor on rank 0, each with the number of its first element.

    A chunk that is no range of elements, such as columns of a matrix, is put into the whole tensor
    first.

    Args:
        ranks: the ranks; the others send their chunks.
        value: this rank's tensor or chunks.
        places: the chunks of each rank; None: rank 0 has the whole tensor.
        description: the shape and dtype of the whole tensor.
        buffer: memory of rank 0 for a chunk of another rank, in bytes.
    """
    if places is None:
        if ranks.is_global_zero:
            yield 0, value
        return
    own: dict[tuple[int, ...], Tensor] = {tuple(offsets): chunk for offsets, chunk in value.chunks}
    if not ranks.is_global_zero:
        for offsets, _ in places.get(ranks.global_rank, ()):
            chunk = own[tuple(offsets)].detach().to(ranks.device).contiguous()
            dist.send(chunk.reshape(-1).view(torch.uint8), 0)
        return
    shape, dtype = description
    whole: Tensor | None = None
    for rank, chunks in places.items():
        for offsets, sizes in chunks:
            if rank == 0:
                chunk = own[tuple(offsets)]
            else:
                received = buffer[: prod(sizes) * dtype.itemsize]
                dist.recv(received, rank)
                chunk = received.view(dtype).view(sizes)
            first = _first_element(shape, offsets, sizes)
            if first is not None:
                yield first, chunk
                continue
            whole = torch.empty(shape, dtype=dtype) if whole is None else whole
            region = tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
            whole[region].copy_(chunk)
    if whole is not None:
        yield 0, whole


def _whole(ranks: Ranks, pieces: Iterable[tuple[int, Tensor]], description: Description) -> Tensor:
    """Return a tensor on rank 0, of its ranges."""
    shape, dtype = description
    whole = torch.empty(shape, dtype=dtype, device=ranks.device)
    for first, values in pieces:
        flat = values.detach().reshape(-1)
        whole.view(-1)[first : first + len(flat)] = flat
    return whole


def _first_element(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> int | None:
    """Return where a chunk begins in a flattened tensor; None: the chunk is no range.

    Example:
        >>> _first_element((4, 3), (2, 0), (2, 3)), _first_element((4, 3), (0, 1), (4, 2))
        (6, None)
    """
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    if tuple(sizes[dim + 1 :]) != tuple(shape[dim + 1 :]):
        return None
    return sum(offset * prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


@contextmanager
def _on_rank_zero(ranks: Ranks) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yield a function that runs others on rank 0 and returns their result, or None.

    After an error the rest is left out, and all ranks raise at the end. The other ranks go on
    sending meanwhile, so that no rank waits for another.
    """
    errors: list[Exception] = []

    def attempt(function: Callable[[], Any]) -> Any:
        if not ranks.is_global_zero or errors:
            return None
        try:
            return function()
        except Exception as error:
            errors.append(error)
        return None

    yield attempt
    text = ranks.broadcast(str(errors[0]) if errors else "")
    if errors:
        raise errors[0]
    if text:
        raise CheckpointError(f"rank 0: {text}")
