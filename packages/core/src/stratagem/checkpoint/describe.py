"""What a checkpoint (a file or a directory) says of itself, and whether it is whole; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from stratagem.checkpoint.archive import Manifest, check_entries, read_archive, verify_checksum
from stratagem.checkpoint.directory import read_directory, verify_files
from stratagem.storage import paths


@dataclass(frozen=True)
class Description:
    """What a checkpoint's manifest says.

    Attributes:
        size: of all of it, in bytes.
        files: how many there are; 1, unless it is a directory.
        checksum: 32 hexadecimal digits, of the file or of the directory's manifest, which has those
            of the other files; None: it has none.
        manifest: None: plain torch made it.
    """

    size: int
    files: int
    checksum: str | None
    manifest: Manifest | None


def describe_checkpoint(path: str | Path, *, verify: bool = False) -> Description:
    """Return what a checkpoint says of itself.

    Args:
        path: a file, a directory, or the URL of a file.
        verify: read all of it, and compare it with its checksums.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: it is no whole checkpoint.
        OSError: it cannot be read.
    """
    path = paths.to_location(path)
    if isinstance(path, Path) and path.is_dir():
        directory = read_directory(path)
        if verify:
            verify_files(directory)
        return Description(
            directory.size, len(directory.files) + 1, directory.checksum, directory.manifest
        )
    # All of a file at a URL is fetched only to be checked.
    opened = paths.open_local(path) if verify else paths.open_in_place(path)
    with opened as opened_file:
        file = cast("BinaryIO", opened_file)
        archive = read_archive(file, str(path))
        if verify:
            verify_checksum(file, archive, str(path))
            check_entries(file, archive, str(path))
    return Description(archive.size, 1, archive.checksum, archive.manifest)
