"""What every rank saves for itself, in a checkpoint that rank 0 writes: RNG states, place in data.

Rank 0 gets each rank's state encoded and saves it so; whoever resumes decodes the ones it needs.
Thousands of ranks have states that mostly are alike, such as the RNGs of the host where only
devices draw: each sends what differs from rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from stratagem.checkpoint.forms import Form, require_form
from stratagem.errors import CheckpointCorruptError
from stratagem.state import safe_data

if TYPE_CHECKING:
    from stratagem.interfaces.ranks import Ranks

State = dict[str, Any]
Change = tuple[tuple[Any, ...], Any]
"""The keys that lead to an entry, and its value."""


def gather_states(ranks: Ranks, state: State) -> dict[str, Any] | list[State]:
    """Return the states of all ranks, as a checkpoint holds them, on rank 0; {} on the others.

    Args:
        ranks: the ranks that save together; all make the call.
        state: the state of this rank; weights-only-safe data.

    Returns:
        `first`, the state of rank 0; `changes`, the encoded differences of each rank from `first`,
        concatenated to a tensor of bytes; and `ends`, the end of each rank's differences. For a
        single process a list, the form in which 0.1.0 saved all ranks.

    Raises:
        TypeError: on every rank, if the state of a rank is not weights-only-safe data; the message
            names the entry.

    Example:
        >>> from stratagem.strategies import Ranks
        >>> saved = gather_states(Ranks(), {"batches": 3})
        >>> RankStates(saved)[0]
        {'batches': 3}
    """
    if ranks.world_size == 1:
        return [state]
    _check_together(ranks, state)
    first: State = ranks.broadcast(state)
    changes = safe_data.encode(_changes(state, first))
    encoded = ranks.gather_bytes(safe_data.bytes_of(changes))
    if not ranks.is_global_zero:
        return {}
    return {
        "first": first,
        "changes": torch.frombuffer(bytearray().join(encoded), dtype=torch.uint8),
        "ends": torch.tensor([len(of_rank) for of_rank in encoded]).cumsum(0),
    }


def _check_together(ranks: Ranks, state: State) -> None:
    """Raise on every rank if the state of one cannot be encoded, before any waits for another."""
    problem = ""
    try:
        safe_data.encode(state)
    except Exception as error:
        problem = f"rank {ranks.global_rank}: {error}"
    if ranks.all_reduce_ints([bool(problem)], "max")[0]:
        raise TypeError(next(filter(None, ranks.gather_objects(problem))))


class RankStates(Sequence[State]):
    """The states of the saving ranks, in rank order; each is decoded on access.

    Args:
        saved: the return value of `gather_states` on rank 0.
        form: the form of each state, or of its entry.
        key: the entry to select from each state; None for the complete state.
    """

    def __init__(
        self, saved: dict[str, Any] | list[State], form: Form = object, key: str | None = None
    ) -> None:
        self._saved = saved
        self._form = form
        self._key = key

    def of(self, key: str, form: Form = object) -> RankStates:
        """Return one entry of each state, which has this form."""
        return RankStates(self._saved, form, key)

    def __len__(self) -> int:
        return len(self._saved["ends"] if isinstance(self._saved, dict) else self._saved)

    @overload
    def __getitem__(self, rank: int) -> State: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[State]: ...
    def __getitem__(self, rank: int | slice) -> State | Sequence[State]:
        """Return the state of a rank.

        Raises:
            CheckpointCorruptError: it cannot be read.
            CheckpointMismatchError: it has another form.
        """
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(len(self)))]
        if not 0 <= rank < len(self):
            raise IndexError(f"there are the states of {len(self)} ranks, not of rank {rank}")
        state, name = self._state(rank), f"state of rank {rank}"
        if self._key is not None:
            state, name = state[self._key], f"{self._key} of rank {rank}"
        return require_form(state, self._form, name)  # type: ignore[no-any-return]

    def _state(self, rank: int) -> State:
        if not isinstance(self._saved, dict):
            return self._saved[rank]
        first, ends = self._saved["first"], self._saved["ends"]
        begin = int(ends[rank - 1]) if rank else 0
        return _changed(first, self._saved["changes"][begin : int(ends[rank])], rank)


def _changes(own: Any, first: Any, path: tuple[Any, ...] = ()) -> list[Change]:
    """Return the entries of nested dicts that are different in `first`."""
    if type(own) is dict and type(first) is dict and own.keys() == first.keys():
        return [change for key in own for change in _changes(own[key], first[key], (*path, key))]
    return [] if _alike(own, first) else [(path, own)]


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.cpu().equal(other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _changed(state: Any, encoded: torch.Tensor, rank: int) -> State:
    """Return `state` with changes that `gather_states` has encoded; they come from a file."""
    name = f"the state of rank {rank}"
    changes = safe_data.decode(encoded, name)
    try:
        for path, value in changes:
            state = _with(state, path, value)
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointCorruptError(
            f"{name} in the checkpoint is damaged: {type(error).__name__}: {error}"
        ) from error
    if oversized := safe_data.find_oversized(state, name):
        raise CheckpointCorruptError(f"the checkpoint was refused: {oversized}")
    changed: State = state
    return changed


def _with(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return `state` with another value at the end of `path`; nothing is changed in place."""
    if not path:
        return value
    return {**state, path[0]: _with(state[path[0]], path[1:], value)}
