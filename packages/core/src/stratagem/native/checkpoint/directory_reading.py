"""Reading a checkpoint that is a directory, by one rank or by several that share the checking."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from stratagem.checkpoint.directory import LAYOUT, STATE, read_directory, verify_files
from stratagem.errors import CheckpointCorruptError
from stratagem.interfaces.ranks import Ranks
from stratagem.native.checkpoint.shard_reader import ShardReader
from stratagem.native.checkpoint.single_file import SingleFileCheckpointIO


def open_directory(path: Path, *, verify: bool, ranks: Ranks | None) -> dict[str, Any]:
    """Return the checkpoint in a directory, with a `LazyTensor` for each tensor in its layout.

    Called on every rank of `ranks`: each compares some of the files with their checksums, before
    anything is loaded.

    Args:
        path: the directory; what `torch.distributed.checkpoint.save` made may hold tensors only.
        verify: compare with the checksums.
        ranks: those that call; None: this process alone.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: on every rank.
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
        for damage in [found] if ranks is None else ranks.gather_plain(found):
            if damage:
                raise CheckpointCorruptError(damage)
    reader = ShardReader(path, (path / LAYOUT).read_bytes())
    checkpoint: dict[str, Any] = {}
    if directory.manifest is not None:
        checkpoint = SingleFileCheckpointIO(verify=False).load_checkpoint(path / STATE)
    elif reader.objects:
        raise CheckpointCorruptError(
            f"{str(path)!r} was saved by torch.distributed.checkpoint with objects that are no "
            f"tensors: {', '.join(reader.objects[:5])}; loading them would execute code. Save the "
            "tensors alone"
        )
    for name, tensor in reader.tensors.items():
        _put(checkpoint, reader.paths[name], tensor, path)
    return checkpoint


def _put(checkpoint: dict[str, Any], place: tuple[Any, ...], value: Any, path: Path) -> None:
    """Put a tensor where it was when the checkpoint was saved."""
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
