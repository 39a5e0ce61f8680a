"""Checkpoints in storage: describe, list and verify them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from stratagem.checkpoint.archive import (
    Manifest,
    check_begin,
    check_entries,
    read_archive,
    verify_checksum,
)
from stratagem.checkpoint.directory import MANIFEST, read_directory, verify_files
from stratagem.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    format_text,
    format_value,
)
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.interfaces.checkpoint_io import CheckpointIO


@dataclass(frozen=True)
class Description:
    """The size, checksum and manifest of a checkpoint.

    Attributes:
        size: the total size, in bytes.
        files: the number of files; 1 unless the checkpoint is a directory.
        checksum: 32 hexadecimal digits, the checksum of the file or of the directory's manifest,
            which contains the checksums of the other files; None for a checkpoint without one.
        manifest: the manifest; None for a checkpoint of plain torch.
    """

    size: int
    files: int
    checksum: str | None
    manifest: Manifest | None


def describe_checkpoint(path: str | Path, *, verify: bool = False) -> Description:
    """Return the description of a checkpoint.

    Args:
        path: a file, a directory, or the URL of a file.
        verify: whether to read the whole checkpoint and compare it with its checksums.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: the path has no complete checkpoint.
        OSError: the checkpoint cannot be read.
    """
    path = paths.to_location(path)
    if isinstance(path, Path) and path.is_dir():
        directory = read_directory(path)
        if verify:
            verify_files(directory)
        return Description(
            directory.size, len(directory.files) + 1, directory.checksum, directory.manifest
        )
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


def find_format(path: str | Path, name: str = "") -> tuple[str, CheckpointIO]:
    """Return the checkpoint format that can load a checkpoint, as (name, object).

    Args:
        path: the path of the checkpoint, in a form that the format accepts.
        name: the name of a format, which is returned without a check. With "", each installed
            format tries to load the checkpoint.

    Raises:
        UnknownNameError: no format has that name.
        CheckpointNotFoundError: the path does not exist.
        CheckpointFormatError: no installed format can load the checkpoint. The error gives the
            reason for each format.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import SingleFileCheckpointIO, find_format
        >>> path = f"{tempfile.mkdtemp()}/a.ckpt"
        >>> SingleFileCheckpointIO().save_checkpoint({"step": 1}, path)
        >>> find_format(path, "single_file")[0]
        'single_file'
    """
    from stratagem.discovery.registry import get_registry

    if name:
        return name, get_registry().find("checkpoint_io", name).spec.build()
    refusals = []
    for candidate in get_registry().candidates("checkpoint_io"):
        # The boundary at which any failure of a format becomes a line of the error.
        try:
            checkpoint_io: CheckpointIO = candidate.spec.build()
            if checkpoint_io.asynchronous:
                continue  # it writes in another one
            checkpoint_io.load_checkpoint(path)
            return candidate.spec.name, checkpoint_io
        except CheckpointFormatError:
            refusals.append(candidate.spec.name)
        except Exception as error:
            refusals.append(f"{candidate.spec.name} ({format_text(str(error), 300)})")
    check_exists(paths.to_location(os.fspath(path)))
    raise CheckpointFormatError(
        f"{str(path)!r} is not a whole checkpoint of any installed format: {', '.join(refusals)}"
    )


SUFFIX = ".ckpt"


def verify(path: str | os.PathLike[str]) -> Description:
    """Read a checkpoint whole and compare it with its checksums, if it has any.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        CheckpointCorruptError: the file is damaged, or not a checkpoint.
        OSError: the checkpoint cannot be read.
    """
    check_exists(paths.to_location(os.fspath(path)))
    return describe_checkpoint(os.fspath(path), verify=True)


def check_exists(path: paths.Location) -> None:
    """Raise CheckpointNotFoundError, with the checkpoints beside it, if nothing is at the path."""
    if paths.exists(path):
        return
    folder = paths.parent(path)
    found = [entry.path for entry in find_all([folder])]
    there = sorted(paths.name_of(each) for each in found if paths.exists(each))
    raise CheckpointNotFoundError(
        f"no checkpoint {str(path)!r}; the folder {str(folder)!r} contains "
        f"{', '.join(there) or 'no checkpoints'}"
    )


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
        or (entry.is_directory and paths.exists(paths.join(entry.path, MANIFEST)))
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
