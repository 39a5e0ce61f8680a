"""Checkpoints in storage: describe, list and verify them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from stratagem.checkpoint.archive import (
    Manifest,
    check_begin,
    check_entries,
    read_archive,
    verify_checksum,
)
from stratagem.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    format_value,
)
from stratagem.storage import paths

_MANIFEST = "manifest.json"
_IN_DIRECTORY = (_MANIFEST, "state.ckpt", ".metadata")
"""Files of a directory checkpoint; that of plain `torch.distributed.checkpoint` has the last."""


@dataclass(frozen=True)
class Description:
    """The size, checksum and manifest of a checkpoint.

    Attributes:
        size: the total size, in bytes.
        files: the number of files; 1 unless the checkpoint is a directory.
        checksum: 32 hexadecimal digits, the checksum of the file or of the directory's manifest,
            which contains the checksums of the other files; None for a checkpoint without one.
        manifest: the manifest; None for a checkpoint of plain torch.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import SingleFileCheckpointIO, describe_checkpoint
        >>> path = f"{tempfile.mkdtemp()}/a.ckpt"
        >>> SingleFileCheckpointIO().save_checkpoint({"step": 1}, path)
        >>> describe_checkpoint(path).manifest.contents
        ('step',)
    """

    size: int
    files: int
    checksum: str | None
    manifest: Manifest | None


def describe_checkpoint(path: str | Path, *, verify: bool = False) -> Description:
    """Return the description of a checkpoint.

    Args:
        path: a file, a directory, or the URL of a file.
        verify: whether to read the complete checkpoint and compare it with its checksums.

    Raises:
        CheckpointCorruptError: the path has no complete checkpoint.
        OSError: the checkpoint cannot be read; a FileNotFoundError if the path does not exist.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import SingleFileCheckpointIO, describe_checkpoint
        >>> path = f"{tempfile.mkdtemp()}/a.ckpt"
        >>> SingleFileCheckpointIO().save_checkpoint({"step": 1}, path)
        >>> describe_checkpoint(path, verify=True).files
        1
    """
    path = paths.to_location(path)
    if isinstance(path, Path) and path.is_dir():
        return _describe_directory(path, verify=verify)
    # A file at a URL is downloaded completely only for verification.
    opened = paths.open_local(path) if verify else paths.open_in_place(path)
    with opened as opened_file:
        file = cast("BinaryIO", opened_file)
        archive = read_archive(file, str(path))
        if archive.manifest is None:
            check_begin(file, str(path), archive.size)
        if verify:
            verify_checksum(file, archive, str(path))
            check_entries(file, archive, str(path))
    return Description(archive.size, 1, archive.checksum, archive.manifest)


def _describe_directory(path: Path, *, verify: bool) -> Description:
    check_directory(path)
    try:
        from stratagem.checkpoint import describe_directory
    except ImportError as error:
        raise CheckpointFormatError(f"{str(path)!r} is a directory: {error}") from None
    return describe_directory(path, verify=verify)


def check_directory(path: Path) -> None:
    """Raise if a directory does not contain a checkpoint.

    Raises:
        CheckpointNotFoundError: names the checkpoints in the directory.
    """
    if not any(os.path.lexists(path / name) for name in _IN_DIRECTORY):
        there = sorted(p.name for p in path.glob("*.ckpt"))
        raise CheckpointNotFoundError(
            f"{str(path)!r} is a directory without {_MANIFEST!r}, so it is no checkpoint; expected "
            f"the path of one. The folder contains {', '.join(there) or 'no checkpoints'}"
        )


SUFFIX = ".ckpt"


def check_exists(path: paths.Location) -> None:
    """Raise if a path does not exist.

    Raises:
        CheckpointNotFoundError: names the checkpoints beside the path.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import check_exists
        >>> from stratagem.storage import to_location
        >>> check_exists(to_location(tempfile.mkdtemp())) is None
        True
    """
    if paths.exists(path):
        return
    folder = paths.parent(path)
    found = [entry.path for entry in find_all([folder])]
    there = sorted(paths.name_of(each) for each in found if paths.exists(each))
    content = f"the folder {str(folder)!r} contains {', '.join(there) or 'no checkpoints'}"
    if not paths.exists(folder):
        content = f"there is no folder {str(folder)!r}"
    raise CheckpointNotFoundError(f"no checkpoint {str(path)!r}; {content}")


def run_of(path: str | os.PathLike[str]) -> str:
    """Return the name of the run that saved a checkpoint, from its manifest.

    Return "" if the manifest has no name, cannot be read, or does not exist.
    """
    return str(_said(path, "run", "") or "")


def find_all(folders: Iterable[str | os.PathLike[str]]) -> list[paths.Entry]:
    """Return the checkpoints in folders, each once, with the latest training step first.

    Checkpoints are files `*.ckpt`, and directories with a manifest. Local checkpoints are sorted by
    the step in their manifests, since the time of a copied file is the time of the copy. Unreadable
    checkpoints come first, so that they are not ignored silently; checkpoints without a step come
    last. Ties, and checkpoints at URLs, are sorted by modification time, then by the numbers in
    their names, the highest first.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import find_all
        >>> find_all([tempfile.mkdtemp()])
        []
    """
    found = {
        str(entry.path): entry
        for folder in folders
        for entry in paths.entries(folder)
        if paths.name_of(entry.path).endswith(SUFFIX)
        or (entry.is_directory and paths.exists(paths.join(entry.path, _MANIFEST)))
    }
    return sorted(
        found.values(),
        key=lambda entry: (_progress(entry.path), entry.modified, _natural(entry.path)),
        reverse=True,
    )


def first_whole(
    candidates: Iterable[paths.Location], check: Callable[[paths.Location], object]
) -> tuple[str, list[str]]:
    """Return the first complete checkpoint, or "", and why earlier candidates were rejected.

    A checkpoint with non-finite weights, according to its manifest, is returned only if no other
    candidate is complete.

    Args:
        candidates: the paths, the best first.
        check: a function that raises an error for an incomplete checkpoint, such as
            `CheckpointIO.verify_checkpoint`.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import SingleFileCheckpointIO, first_whole
        >>> from stratagem.storage import to_location
        >>> path = to_location(f"{tempfile.mkdtemp()}/a.ckpt")
        >>> first_whole([path], SingleFileCheckpointIO().verify_checkpoint)[0]
        ''
    """
    rejected: dict[str, str] = {}
    nonfinite = ""
    for path in map(str, candidates):
        try:
            check(paths.to_location(path))
        except (CheckpointError, OSError) as error:
            rejected[path] = f"{path!r} was passed over: {error}"
            continue
        if (name := _said(path, "nonfinite", None)) is None:
            return path, list(rejected.values())
        rejected[path] = (
            f"{path!r} was passed over: its weights are not finite, such as {format_value(name)}"
        )
        nonfinite = nonfinite or path
    rejected.pop(nonfinite, None)
    return nonfinite, list(rejected.values())


def _said(path: str | os.PathLike[str], name: str, unreadable: Any) -> Any:
    """Return a field of a checkpoint's manifest; None if it has none.

    `unreadable` is returned if the checkpoint is damaged, gone, or of another library's format.
    """
    try:
        return getattr(describe_checkpoint(os.fspath(path)).manifest, name, None)
    except (CheckpointError, OSError):
        return unreadable


def _progress(path: paths.Location) -> float:
    """Return a checkpoint's step; -1 if its manifest has no step, inf if it cannot be read."""
    if paths.is_url(path):
        return -1  # opening each file would take longer than listing all
    step: float | None = _said(path, "global_step", math.inf)
    return -1 if step is None else step


def _natural(path: paths.Location) -> list[tuple[int, str]]:
    """Return a key that sorts "step=9" before "step=10"."""
    return [
        (int(number or 0), text)
        for number, text in re.findall(r"(\d*)([^\d]*)", paths.name_of(path))
    ]
