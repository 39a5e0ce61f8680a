"""State by owner: checkpoints of models of which each rank has a part of the parameters.

Ranks at different places along an axis with `parameters="divided"` (stages of a pipeline, experts)
have parameters of different names. The owner of a name is the first rank that has it. Checkpoints
hold the names of all owners, as those of one process do.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.checkpoint import Shards
from stratagem.errors import CheckpointMismatchError, PluginError, format_names, with_explanation
from stratagem.state import bytes_of, check_weights, state_without_wrapper
from stratagem.strategies import Ranks


def has_owners(ranks: Ranks) -> bool:
    """Return whether ranks have different parameters.

    Example:
        >>> from stratagem.strategies import Axis, Ranks
        >>> has_owners(Ranks(world_size=2, axes=[Axis("stage", 2, "same", "divided")]))
        True
    """
    return len(ranks.replica_groups) > 1


def is_owner(ranks: Ranks) -> bool:
    """Return whether this rank is the first of the ranks with the same parameters.

    Example:
        >>> from stratagem.strategies import Ranks
        >>> is_owner(Ranks(global_rank=1, world_size=2))
        False
    """
    return any(group[0] == ranks.global_rank for group in ranks.replica_groups)


def state_by_owner(
    ranks: Ranks, state: Mapping[str, Any], *, in_shards: bool, compares: bool = True
) -> dict[str, Any]:
    """Return the state of all owners, for a checkpoint; called on every rank.

    Args:
        ranks: the ranks that save together.
        state: this rank's tensors, `Shards` or safe values by name; {} on a rank that is no owner.
        in_shards: return `Shards` on every rank, without chunks for the names of other ranks. With
            False, rank 0 receives whole tensors one by one, and the other ranks return {}.
        compares: raise an error if ranks have different values of one name.

    Raises:
        PluginError: on every rank: copies of a part of the model have different names, or two
            owners have different tensors of one name.

    Example:
        >>> import torch
        >>> from stratagem.strategies import Ranks
        >>> state_by_owner(Ranks(), {"weight": torch.ones(2)}, in_shards=False)
        {'weight': tensor([1., 1.])}
    """
    described = {name: _described(value) for name, value in state.items()}
    _check_copies(ranks, described)
    of_owners = _from_owners(ranks, described)
    if compares:
        _check_common_names(ranks, state, of_owners)
    owners: dict[str, tuple[int, Any]] = {}
    for (first, *_), of_owner in zip(ranks.replica_groups, of_owners, strict=True):
        for name, description in of_owner.items():
            owners.setdefault(name, (first, description))
    if in_shards:
        return {name: _as_shards(state.get(name), what) for name, (_, what) in owners.items()}
    gathered = {
        name: _on_rank_zero(ranks, state.get(name), owner, description)
        for name, (owner, description) in owners.items()
    }
    return gathered if ranks.is_global_zero else {}


def optimizer_state_by_owner(
    ranks: Ranks, state: Mapping[str, Any], *, in_shards: bool
) -> dict[str, Any]:
    """Return an optimizer's state of all owners, for a checkpoint; called on every rank.

    Args:
        ranks, in_shards: see `state_by_owner`.
        state: this rank's state, keyed by parameter names.

    Raises:
        PluginError: on every rank: ranks have different numbers of parameter groups.

    Example:
        >>> from stratagem.strategies import Ranks
        >>> state = {"state": {"weight": {"step": 3}}, "param_groups": [{"params": ["weight"]}]}
        >>> optimizer_state_by_owner(Ranks(), state, in_shards=False) == state
        True
    """
    entries = {
        f"{name}\n{key}": value
        for name, entry in state["state"].items()
        for key, value in entry.items()
    }
    by_name: dict[str, dict[str, Any]] = {}
    gathered = state_by_owner(ranks, entries, in_shards=in_shards, compares=False)
    for joined, value in gathered.items():
        name, _, key = joined.rpartition("\n")
        by_name.setdefault(name, {})[key] = value
    groups = _from_owners(ranks, state["param_groups"])
    for (first, *_), of_owner in zip(ranks.replica_groups, groups, strict=True):
        if len(of_owner) != len(groups[0]):
            raise PluginError(
                f"{_named(ranks, first)} has an optimizer with {len(of_owner)} parameter groups, "
                f"and {_named(ranks, 0)} one with {len(groups[0])}: give it the same groups on "
                "every rank; a group may be empty"
            )
    merged = [
        {**alike[0], "params": list(dict.fromkeys(n for group in alike for n in group["params"]))}
        for alike in zip(*groups, strict=True)
    ]
    return {**state, "state": by_name, "param_groups": merged}


def owned_model_state(
    ranks: Ranks, own: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """Return the entries of a loaded state that this rank has; called on every rank.

    Args:
        ranks: the ranks that load together.
        own: the state dict of this rank's model.
        state: the state of all owners.
        strict: raise an error for names that an owner lacks in `state`, and for names in `state`
            that no rank has.

    Raises:
        CheckpointMismatchError: on every rank: names or shapes differ. The error lists them.

    Example:
        >>> import torch
        >>> from stratagem.strategies import Ranks
        >>> own, state = {"weight": torch.zeros(2)}, {"weight": torch.ones(2)}
        >>> owned_model_state(Ranks(), own, state, strict=True)
        {'weight': tensor([1., 1.])}
    """
    state = state_without_wrapper(state)
    shapes = {name: list(v.shape) if isinstance(v, Tensor) else None for name, v in own.items()}
    everyone: dict[str, Any] = {}
    for of_owner in _from_owners(ranks, shapes):
        everyone.update(of_owner)
    expected = {name: tuple(shape) for name, shape in everyone.items() if shape is not None}
    check_weights(everyone, expected, state, strict=strict)
    return {name: value for name, value in state.items() if name in own}


def owned_optimizer_state(
    ranks: Ranks, own: Collection[str], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the part of a loaded optimizer state for this rank's parameters; on every rank.

    Args:
        ranks: the ranks that load together.
        own: the names of the parameters in this rank's optimizer.
        state: the state of all owners, keyed by parameter names.

    Raises:
        CheckpointMismatchError: on every rank: the state lacks parameters, or has parameters that
            no rank has. The error lists them.

    Example:
        >>> from stratagem.strategies import Ranks
        >>> state = {"state": {"weight": {"step": 3}}, "param_groups": [{"params": ["weight"]}]}
        >>> owned_optimizer_state(Ranks(), ["weight"], state) == state
        True
    """
    everyone = dict.fromkeys(n for of_owner in _from_owners(ranks, sorted(own)) for n in of_owner)
    saved = {name for group in state["param_groups"] for name in group["params"]}
    problems = []
    if missing := [name for name in everyone if name not in saved]:
        problems.append(f"it lacks {format_names(missing)}")
    if unexpected := sorted(saved - everyone.keys()):
        problems.append(f"it has {format_names(unexpected)}, which no rank has")
    if problems:
        message = (
            f"the checkpoint's optimizer has other parameters: {'; '.join(problems)}: use the "
            "optimizer and the parameter groups that it was saved with"
        )
        raise CheckpointMismatchError(with_explanation(message, "checkpoint-mismatch"))
    return {
        **state,
        "state": {name: entry for name, entry in state["state"].items() if name in own},
        "param_groups": [
            {**group, "params": [name for name in group["params"] if name in own]}
            for group in state["param_groups"]
        ],
    }


def _described(value: Any) -> dict[str, Any]:
    """Return the dtype and shape of a tensor, or the value if it is none, as safe data."""
    if not isinstance(value, (Tensor, Shards)):
        return {"value": value}
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}


def _from_owners(ranks: Ranks, data: Any) -> list[Any]:
    """Return the data of each owner, on every rank."""
    return [ranks.broadcast(data, src=group[0]) for group in ranks.replica_groups]


def _named(ranks: Ranks, rank: int) -> str:
    return f"rank {rank} ({ranks.place([rank]) or 'of the same axis'})"


def _check_copies(ranks: Ranks, names: Collection[str]) -> None:
    """Raise an error if ranks with the same parameters have different names."""
    own = zlib.crc32("\n".join(sorted(names)).encode()) if names else -1
    of_ranks = ranks.all_gather(torch.tensor(own)).tolist()
    for group in ranks.replica_groups:
        for rank in group:
            if of_ranks[rank] not in (-1, of_ranks[group[0]]):
                raise PluginError(
                    f"{_named(ranks, group[0])} and {_named(ranks, rank)} have the same "
                    "parameters by the axes of the strategy, but state of different names: build "
                    "the same part of the model on both, or change `rank_axes`"
                )


def _check_common_names(
    ranks: Ranks, state: Mapping[str, Any], of_owners: list[dict[str, Any]]
) -> None:
    """Raise an error if two owners have different values of one name, such as of a tied weight."""
    counts: dict[str, int] = {}
    for of_owner in of_owners:
        for name in of_owner:
            counts[name] = counts.get(name, 0) + 1
    own = {
        name: [_described(value), _checksum(value)]
        for name, value in state.items()
        if counts.get(name, 0) > 1
    }
    seen: dict[str, tuple[int, Any]] = {}
    for (rank, *_), of_owner in zip(ranks.replica_groups, _from_owners(ranks, own), strict=True):
        for name, value in of_owner.items():
            first, expected = seen.setdefault(name, (rank, value))
            if value != expected:
                raise PluginError(
                    f"{_named(ranks, first)} and {_named(ranks, rank)} have different values of "
                    f"{name!r}, and a checkpoint holds one of them: give the parameters of each "
                    "rank along a divided axis their names in the whole model, and keep weights "
                    "that several ranks share equal"
                )


def _checksum(value: Any) -> int:
    """Return a number that differs where whole tensors do; 0 for other values."""
    if not isinstance(value, Tensor):
        return 0
    return zlib.crc32(bytes_of(value.detach().cpu().contiguous()))


def _as_shards(value: Any, description: Mapping[str, Any]) -> Any:
    """Return a rank's chunks of a tensor: all of it, or nothing if another rank has it."""
    if "value" in description or isinstance(value, Shards):
        return description.get("value", value)
    shape, dtype = tuple(description["shape"]), getattr(torch, description["dtype"])
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    chunks = [] if value is None else [((0,) * len(shape), value)]
    return Shards(shape, dtype, chunks)


def _on_rank_zero(ranks: Ranks, value: Any, owner: int, description: Mapping[str, Any]) -> Any:
    """Return an owner's value on rank 0; a tensor is sent to it in host memory."""
    if "value" in description:
        return description["value"]
    shape, dtype = description["shape"], getattr(torch, description["dtype"])
    if owner == 0 or not prod(shape):
        return torch.empty(shape, dtype=dtype) if value is None else value
    if ranks.global_rank == owner:
        dist.send(value.detach().to(ranks.device).contiguous().flatten().view(torch.uint8), 0)
    elif ranks.is_global_zero:
        received = torch.empty(prod(shape), dtype=dtype, device=ranks.device)
        dist.recv(received.view(torch.uint8), owner)
        return received.view(shape).cpu()
    return None
