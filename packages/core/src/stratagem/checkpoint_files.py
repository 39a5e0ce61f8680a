"""Checkpoints as they lie in storage: which there are, and whether one is whole; no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import BinaryIO, cast

from stratagem import storage
from stratagem.checkpoint_archive import (
    Archive,
    Manifest,
    check_entries,
    read_archive,
    verify_checksum,
)
from stratagem.errors import CheckpointError, CheckpointNotFoundError

SUFFIX = ".ckpt"
MANIFEST = "manifest.json"


def read_manifest(path: str | os.PathLike[str]) -> Manifest | None:
    """Return what a checkpoint says of itself, of which a few kilobytes are read.

    Returns:
        None: plain `torch.save` made it.

    Raises:
        CheckpointCorruptError: it is no checkpoint.
        OSError: it cannot be read.
    """
    with storage.open_in_place(path) as file:
        return read_archive(cast("BinaryIO", file), str(path)).manifest


def verify(path: str | os.PathLike[str]) -> Archive:
    """Read a checkpoint whole and compare it with its checksum, if it has one.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointCorruptError: it is damaged, or no checkpoint.
        OSError: it cannot be read.
    """
    try:
        with storage.open_local(path) as file:
            archive = read_archive(file, str(path))
            verify_checksum(file, archive, str(path))
            check_entries(file, archive, str(path))
            return archive
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no checkpoint at {str(path)!r}") from error


def find_all(folders: Iterable[str | os.PathLike[str]]) -> list[storage.Entry]:
    """Return the checkpoints in some folders, the newest first, each once.

    They are what is called `*.ckpt`, and directories with a manifest. Where two are equally old, as
    far as the file system tells, the one with the higher numbers in its name is the newer.
    """
    found = {
        str(entry.path): entry
        for folder in folders
        for entry in storage.entries(folder)
        if storage.name_of(entry.path).endswith(SUFFIX)
        or (entry.is_directory and storage.exists(storage.join(entry.path, MANIFEST)))
    }
    return sorted(
        found.values(), key=lambda entry: (entry.modified, _natural(entry.path)), reverse=True
    )


def first_whole(
    paths: Iterable[storage.Location], check: Callable[[storage.Location], object]
) -> tuple[str, list[str]]:
    """Return the first checkpoint that is whole, or "", and why those before it were passed over.

    Args:
        paths: the best first.
        check: raises where one is not whole, such as `CheckpointIO.verify_checkpoint`.
    """
    passed_over = []
    for path in paths:
        try:
            check(path)
        except (CheckpointError, OSError) as error:
            passed_over.append(f"{str(path)!r} was passed over: {error}")
        else:
            return str(path), passed_over
    return "", passed_over


def _natural(path: storage.Location) -> list[tuple[int, str]]:
    """Return a key that sorts "step=9" before "step=10"."""
    return [
        (int(number or 0), text)
        for number, text in re.findall(r"(\d*)([^\d]*)", storage.name_of(path))
    ]
