"""The layout of a checkpoint that is one file: its manifest and checksum, without torch.

A checkpoint is the zip archive that `torch.save` makes. The archive's comment, which readers of zip
files pass over, holds what the contents do not say of themselves, so that one file moves as a whole
and `torch.load` reads it anywhere::

    stratagem checkpoint
    {"format_version": 2, "stratagem": "0.1.0", ...}    the manifest, JSON in one line
    xxh3_128 6c78e0e3bd51d358d01e758642b85fb8           of every byte before these 32 digits

The digits are those of `stratagem.checkpoint.checksum`, over pieces as large as the manifest says.

Files that plain `torch.save` made have no comment; they are read without these checks.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO, Protocol

from stratagem.checkpoint.checksum import PIECE_SIZE, Checksum, checksum_of_file
from stratagem.errors import CheckpointCorruptError

FORMAT_VERSION = 2

_HEAD = b"stratagem checkpoint\n"
_CHECKSUM = b"\nxxh3_128 "
_DIGITS = 32
_COMMENT = re.compile(_HEAD + rb"(\{[^\n]*\})" + _CHECKSUM + rb"([0-9a-f]{32})")

# Of a zip file: the record at its end begins so, and is so long without its comment.
_END = b"PK\x05\x06"
_END_SIZE = 22
_LONGEST_COMMENT = 0xFFFF
# The manifest has to fit in the comment, at any number and length of names.
_ROOM_FOR_NAMES, _NAME_LENGTH = 16_000, 200
# Read by `zipfile` in one piece, into some 500 bytes for each of 60; enough for a million tensors.
_LARGEST_DIRECTORY = 64 << 20
# So much is hashed and then written: it is still in the processor's cache.
_AT_ONCE = 1 << 20
# What is shorter is collected first.
_SMALL = 64 << 10
# Of a manifest that is not ours: smaller pieces would only make the check slow.
_SMALLEST_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        format_version: of the file's layout; newer ones are refused.
        piece_size: bytes of a piece of the checksum; 0: it is of the file as a whole (version 1).
        stratagem, torch: the versions that saved it.
        strategy, world_size: under which it was saved; None: unknown.
        epoch, global_step: how far training was; None: unknown.
        run: name of the run that saved it, kept by a run that resumes from it; None: unknown.
        nonfinite: the name of a weight that holds NaN or an infinity; None: unknown, or there is
            none.
        contents: the names in the checkpoint's dict, as many as fit in 16,000 bytes.
    """

    format_version: int = FORMAT_VERSION
    piece_size: int = PIECE_SIZE
    stratagem: str
    torch: str
    strategy: str | None = None
    world_size: int | None = None
    epoch: int | None = None
    global_step: int | None = None
    run: str | None = None
    nonfinite: str | None = None
    contents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Archive:
    """What the end of a file says of it.

    Attributes:
        size: of the file, in bytes.
        manifest: None: made by `torch.save` alone.
        checksum: 32 hexadecimal digits; None as well.
    """

    size: int
    manifest: Manifest | None
    checksum: str | None


class Sink(Protocol):
    """What an `ArchiveWriter` writes to."""

    def write(self, data: memoryview, /) -> object:
        """Write all of `data`."""


class ArchiveWriter:
    """The file object that `torch.save` writes to: hashes what it passes on, and adds the manifest.

    Call `torch.save(contents, writer)`, then `finish`. No tensor is copied but small ones and
    the last 22 bytes, which are held back since the length of the comment is among them.

    Args:
        sink: where the bytes go.

    Attributes:
        error: what the sink raised. `torch.save` ends the archive even so, and then raises another
            error, about a position that it did not expect.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._checksum = Checksum()
        self._held = bytearray()
        self.error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        """Take what comes next in the archive."""
        size = len(data)
        if size < _SMALL:
            # Seven of these for each tensor.
            self._held += data
            if len(self._held) >= _AT_ONCE:
                self._release(len(self._held) - _END_SIZE)
        else:
            self._release(len(self._held))
            for start in range(0, size - _END_SIZE, _AT_ONCE):
                self._pass_on(data[start : min(start + _AT_ONCE, size - _END_SIZE)])
            self._held += data[-_END_SIZE:]
        return size

    def flush(self) -> None:
        """Do nothing: what is written is complete after `finish`."""

    def finish(self, manifest: Manifest) -> str:
        """Write the end of the archive with the manifest; return the checksum."""
        if self.error is not None:
            raise self.error
        end = bytes(self._held[-_END_SIZE:])
        if end[:4] != _END or end[20:] != b"\0\0":
            raise RuntimeError(
                f"torch.save ended a file with {end!r}; expected a zip archive without a "
                "comment: this version of torch writes another format, please report it"
            )
        text = json.dumps(asdict(manifest), separators=(",", ":")).encode("ascii")
        before = _HEAD + text + _CHECKSUM
        self._held[-2:] = (len(before) + _DIGITS).to_bytes(2, "little")
        self._held += before
        self._release(len(self._held))
        checksum = self._checksum.hexdigest()
        self._sink.write(memoryview(checksum.encode("ascii")))
        return checksum

    def _release(self, size: int) -> None:
        with memoryview(self._held) as held, held[:size] as released:
            self._pass_on(released)
        del self._held[:size]

    def _pass_on(self, data: memoryview) -> None:
        if self.error is not None:
            return
        self._checksum.update(data)
        try:
            self._sink.write(data)
        except BaseException as error:
            self.error = error
            raise


def names_of(contents: dict[Any, Any]) -> tuple[str, ...]:
    """Return the keys of a checkpoint as its manifest lists them."""
    names: list[str] = []
    room = _ROOM_FOR_NAMES
    for key in contents:
        name = str(key)[:_NAME_LENGTH]
        room -= len(json.dumps(name))
        if room < 0:
            return (*names, f"... and {len(contents) - len(names)} more")
        names.append(name)
    return tuple(names)


def read_archive(file: BinaryIO, path: str) -> Archive:
    """Return what the end of the file says; the contents are not looked at.

    Args:
        file: opened for reading.
        path: what errors call it.

    Raises:
        CheckpointCorruptError: it is not a whole checkpoint, or of a newer format.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_SIZE - _LONGEST_COMMENT))
    tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_SIZE:
        file.seek(0)
        begin = file.read(4)
        raise not_whole(
            path,
            size,
            "its end is missing"
            if begin == b"PK\x03\x04"
            else f"it begins with {begin!r}, expected a zip archive",
        )
    comment = tail[at + _END_SIZE :]
    expected = int.from_bytes(tail[at + 20 : at + 22], "little")
    if expected != len(comment):
        raise not_whole(path, size, f"it ends with {len(comment)} bytes, expected {expected}")
    if _directory_size(tail, at) > _LARGEST_DIRECTORY:
        raise not_whole(path, size, f"its directory is larger than {_LARGEST_DIRECTORY} bytes")
    if not comment:
        return Archive(size, None, None)
    match = _COMMENT.fullmatch(comment)
    if match is None:
        raise not_whole(path, size, "its manifest cannot be read")
    return Archive(size, _parse(match[1], path, size), match[2].decode("ascii"))


def verify_checksum(file: BinaryIO, archive: Archive, path: str) -> None:
    """Read the whole file and compare it with its checksum, if it has one.

    Raises:
        CheckpointCorruptError: a byte has changed since the file was written.
    """
    if archive.checksum is None:
        return
    piece_size = 0 if archive.manifest is None else archive.manifest.piece_size
    found = checksum_of_file(file, archive.size - _DIGITS, piece_size)
    if found != archive.checksum:
        raise CheckpointCorruptError(
            f"{path!r} is damaged: its contents have the checksum xxh3_128 {found}, "
            f"but {archive.checksum} was written. Copy it again from where it is whole, or use an "
            "older one"
        )


def check_entries(file: BinaryIO, archive: Archive, path: str) -> None:
    """Refuse an archive that would grow when it is read, or that names files elsewhere.

    Raises:
        CheckpointCorruptError: says which entry.
    """
    try:
        entries = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise not_whole(path, archive.size, f"{type(error).__name__}: {error}") from error
    names: set[str] = set()
    total = 0
    for entry in entries:
        name = entry.orig_filename
        total += entry.file_size
        why = ""
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            why = f"is compressed, from {entry.file_size} bytes to {entry.compress_size}"
        elif total > archive.size:
            why = f"ends after {total} bytes of contents in a file of {archive.size} bytes"
        elif name.startswith("/") or "\\" in name or ".." in name.split("/"):
            why = "leads out of the archive"
        elif name in names:
            why = "is there twice"
        if why:
            raise CheckpointCorruptError(
                f"{path!r} was refused: its entry {name!r} {why}. torch.save writes no such file: "
                "do not use it unless you know who made it"
            )
        names.add(name)


def not_whole(path: str, size: int, what: str) -> CheckpointCorruptError:
    """Return the error for a file that is truncated or something else."""
    return CheckpointCorruptError(
        f"{path!r} is not a whole checkpoint ({size} bytes): {what}. It may be truncated; use an "
        "older one"
    )


def _directory_size(tail: bytes, at: int) -> int:
    """Return how long the list of entries says it is, in the old or the 64-bit end record."""
    size = int.from_bytes(tail[at + 12 : at + 16], "little")
    # `zipfile` takes the 64-bit record wherever there is one.
    wide = tail[at - 76 : at - 20] if at >= 76 else b""
    if wide[:4] == b"PK\x06\x06":
        size = max(size, int.from_bytes(wide[40:48], "little"))
    return size


def parse_manifest(values: dict[str, Any], path: str) -> Manifest:
    """Return a manifest from what its JSON holds.

    Raises:
        CheckpointCorruptError: it is of a newer format.
        ValueError, KeyError, TypeError: it is no manifest.
    """
    version = int(values["format_version"])
    if version > FORMAT_VERSION:
        raise CheckpointCorruptError(
            f"{path!r} has the file format {version}, made by stratagem "
            f"{values.get('stratagem')}; this version reads up to {FORMAT_VERSION}: upgrade "
            "stratagem-core"
        )
    piece_size = int(values["piece_size"]) if version > 1 else 0
    if version > 1 and piece_size < _SMALLEST_PIECE:
        raise ValueError(f"piece_size={piece_size}: expected at least {_SMALLEST_PIECE}")
    known = {field.name for field in fields(Manifest)}
    given = {name: value for name, value in values.items() if name in known}
    return Manifest(**{**given, "piece_size": piece_size, "contents": tuple(values["contents"])})


def _parse(text: bytes, path: str, size: int) -> Manifest:
    try:
        return parse_manifest(json.loads(text), path)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise not_whole(path, size, "its manifest cannot be read") from error
