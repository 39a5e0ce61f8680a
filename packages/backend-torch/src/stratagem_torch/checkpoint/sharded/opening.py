"""Open a directory checkpoint: its state, and its tensors by the layout."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from stratagem.checkpoint import open_archive
from stratagem.errors import CheckpointCorruptError
from stratagem.strategies import Ranks
from stratagem_torch.checkpoint.sharded.manifest import (
    LAYOUT,
    STATE,
    open_member,
    read_directory,
    verify_files,
)
from stratagem_torch.checkpoint.sharded.shard_reader import ShardReader


def open_directory(
    path: Path, *, verify: bool, ranks: Ranks | None, check_parts: bool = False
) -> dict[str, Any]:
    """Return a directory checkpoint with a `LazyTensor` for each sharded tensor.

    Args:
        path: the directory.
        verify: whether to compare the files with their checksums, each rank a part of them.
        ranks: the ranks that make the call; None for this process alone.
        check_parts: whether to check that the layout covers each tensor.

    Raises:
        CheckpointCorruptError: the directory is not a complete checkpoint.
    """
    directory = read_directory(path)
    if verify:
        names = sorted(directory.files)
        own = names if ranks is None else names[ranks.global_rank :: ranks.world_size]
        found = ""
        try:
            verify_files(directory, own)
        except CheckpointCorruptError as error:
            found = str(error)
        for damage in [found] if ranks is None else ranks.gather_objects(found):
            if damage:
                raise CheckpointCorruptError(damage)
    with open_member(path, LAYOUT) as file:
        reader = ShardReader(path, file.read())
    checkpoint: dict[str, Any] = {}
    if directory.manifest is not None:
        if unnamed := sorted(reader.files - directory.files.keys()):
            raise CheckpointCorruptError(
                f"{str(path)!r} was refused: its layout names {unnamed[0]!r}, which its manifest "
                "does not"
            )
        # Verified with the other files.
        with open_member(path, STATE) as file:
            checkpoint = open_archive(file, str(path / STATE), verify=False)
    elif reader.objects:
        raise CheckpointCorruptError(
            f"{str(path)!r} was saved by torch.distributed.checkpoint with objects that are no "
            f"tensors: {', '.join(reader.objects[:5])}; loading them would execute code. Save the "
            "tensors alone"
        )
    if check_parts:
        reader.check_parts()
    for name, tensor in reader.tensors.items():
        _insert(checkpoint, reader.paths[name], tensor, path)
    return checkpoint


def _insert(checkpoint: dict[str, Any], place: tuple[Any, ...], value: Any, path: Path) -> None:
    """Put a tensor where it was when the checkpoint was saved.

    Args:
        checkpoint: changed in place.
        place: keys and indices that lead to the tensor.
        value: the tensor.
        path: of the checkpoint, for errors.
    """
    at: Any = checkpoint
    try:
        for key, after in pairwise(place):
            if isinstance(at, dict):
                at = at.setdefault(key, [] if isinstance(after, int) else {})
            else:
                at = at[key]
        if isinstance(at, list) and place[-1] == len(at):
            at.append(value)
        else:
            at[place[-1]] = value
    except (LookupError, TypeError, IndexError) as error:
        raise CheckpointCorruptError(
            f"{str(path)!r} is damaged: its layout has a tensor at {place!r}, where "
            f"{STATE} has no place for one"
        ) from error
