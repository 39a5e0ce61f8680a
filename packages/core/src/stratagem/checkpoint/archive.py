"""The layout of a single-file checkpoint: its manifest and checksum, without torch.

A checkpoint is the zip archive that `torch.save` makes. The archive's comment, which readers of zip
files ignore, holds the manifest and the checksum. So a checkpoint is a single file, and
`torch.load` reads it anywhere::

    stratagem checkpoint
    {"format_version": 2, "stratagem": "0.1.0", ...}    the manifest, JSON in one line
    xxh3_128 6c78e0e3bd51d358d01e758642b85fb8           of every byte before these 32 digits

The digits are those of `stratagem.checkpoint.checksum`, over pieces as large as the manifest says.

Files of plain `torch.save` have no comment, and are read without these checks.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO, Protocol

from stratagem.checkpoint.checksum import PIECE_SIZE, Checksum, checksum_of_file
from stratagem.checkpoint.entries import Refused, read_entries
from stratagem.errors import CheckpointCorruptError, CheckpointFormatError, format_text

FORMAT_VERSION = 2

_HEAD = b"stratagem checkpoint\n"
_CHECKSUM = b"\nxxh3_128 "
_DIGITS = 32
_COMMENT = re.compile(_HEAD + rb"(\{[^\n]*\})" + _CHECKSUM + rb"([0-9a-f]{32})")

# The record at the end of a zip file: its first bytes, and its size without the comment.
_END = b"PK\x05\x06"
_END_SIZE = 22
_LONGEST_COMMENT = 0xFFFF
# The manifest must fit in the comment, whatever the number and length of names.
_ROOM_FOR_NAMES, _NAME_LENGTH = 16_000, 200
# Hash and write this many bytes at once, while the processor's cache has them.
_AT_ONCE = 1 << 20
# Shorter writes are collected first.
_SMALL = 64 << 10
# Limits for a foreign manifest: smaller pieces would only make the check slow.
_SMALLEST_PIECE, _LARGEST_PIECE = 1 << 20, 1 << 62


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The metadata of a checkpoint.

    Attributes:
        format_version: the version of the file's layout. Newer versions cannot be read.
        piece_size: the bytes of a piece of the checksum; 0 for a checksum of the whole file
            (version 1).
        stratagem, torch: the versions that saved the checkpoint.
        strategy, world_size: the strategy and number of ranks that saved it; None if unknown.
        epoch, global_step: the position of training; None if unknown.
        run: the name of the run that saved it. A resumed run keeps the name. None if unknown.
        nonfinite: the name of a weight that holds NaN or an infinity; None if unknown or if all
            weights are finite.
        contents: the keys of the checkpoint's dict, as many as fit in 16,000 bytes.

    Example:
        >>> from stratagem.checkpoint import Manifest
        >>> Manifest(stratagem="0.1.0", torch="2.13.0", epoch=3).epoch
        3
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


_REQUIRED = ("piece_size", "stratagem", "torch")
_KINDS: dict[str, type] = {
    "piece_size": int,
    "stratagem": str,
    "torch": str,
    "strategy": str,
    "world_size": int,
    "epoch": int,
    "global_step": int,
    "run": str,
}


@dataclass(frozen=True)
class Archive:
    """The metadata at the end of a checkpoint file.

    Attributes:
        size: the size of the file, in bytes.
        comment: the length of the archive's comment, in bytes.
        manifest: the manifest; None for a file of plain `torch.save`.
        checksum: the checksum, 32 hexadecimal digits; None for a file of plain `torch.save`.
    """

    size: int
    comment: int
    manifest: Manifest | None
    checksum: str | None


class Sink(Protocol):
    """The output of an `ArchiveWriter`.

    Example:
        >>> import io
        >>> from stratagem.checkpoint import Sink
        >>> sink: Sink = io.BytesIO()
        >>> sink.write(memoryview(b"abc"))
        3
    """

    def write(self, data: memoryview, /) -> object:
        """Write all of `data`."""


class ArchiveWriter:
    """A file object for `torch.save` that hashes the data and adds the manifest.

    Call `torch.save(contents, writer)`, then `finish`. Only small tensors are copied, and the last
    22 bytes. These are held back, since they contain the length of the comment.

    Args:
        sink: the output.

    Attributes:
        error: the error that the sink raised. `torch.save` still ends the archive, and then raises
            another error, about an unexpected position.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._checksum = Checksum()
        self._held = bytearray()
        self.error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        """Write the next bytes of the archive."""
        size = len(data)
        if size < _SMALL:
            # Seven such writes for each tensor.
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
        """Do nothing: the output is complete only after `finish`."""

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
    """Return the metadata at the end of a checkpoint file, without reading the contents.

    Args:
        file: a file opened for reading.
        path: the path to name in errors.

    Raises:
        CheckpointCorruptError: the checkpoint is incomplete, or has a newer format.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_SIZE - _LONGEST_COMMENT))
    tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_SIZE:
        check_begin(file, path, size)
        raise not_whole(path, size, "its end is missing")
    comment = tail[at + _END_SIZE :]
    expected = int.from_bytes(tail[at + 20 : at + 22], "little")
    if expected != len(comment):
        check_begin(file, path, size)
        raise not_whole(path, size, f"it ends with {len(comment)} bytes, expected {expected}")
    if not comment:
        return Archive(size, 0, None, None)
    match = _COMMENT.fullmatch(comment)
    try:
        if match is None:
            raise ValueError("the comment has another form")
        manifest = parse_manifest(load_json(match[1]), path)
    except (ValueError, KeyError, RecursionError) as error:
        raise not_whole(path, size, "its manifest cannot be read") from error
    return Archive(size, expected, manifest, match[2].decode("ascii"))


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
    """Check that an archive has the form that `torch.save` writes.

    Raises:
        CheckpointCorruptError: the archive has another form. The error says where.
    """
    # Not closed explicitly, since an error's traceback may hold views of the mapping.
    mapped = mmap.mmap(file.fileno(), archive.size, access=mmap.ACCESS_READ)
    try:
        read_entries(memoryview(mapped), comment=archive.comment)
    except Refused as error:
        raise refused(path, error) from error


def refused(path: str, reason: Refused) -> CheckpointCorruptError:
    """Return the error for a file that was not written by `torch.save`."""
    return CheckpointCorruptError(
        f"{path!r} was refused: {reason}. torch.save writes no such file: do not use it unless you "
        "know who made it"
    )


def check_begin(file: BinaryIO, path: str, size: int) -> None:
    """Check that a file begins like a zip archive.

    Files of other formats may contain an archive, even at their end.

    Raises:
        CheckpointFormatError: the file has another format.
    """
    file.seek(0)
    begin = file.read(4)
    if not b"PK\x03\x04".startswith(begin):
        raise CheckpointFormatError(
            f"{path!r} is not a whole checkpoint ({size} bytes): it begins with {begin!r}, "
            "expected a zip archive. If it is of another format, name that one"
        )


def not_whole(path: str, size: int, what: str) -> CheckpointCorruptError:
    """Return the error for a file that is truncated or something else."""
    return CheckpointCorruptError(
        f"{path!r} is not a whole checkpoint ({size} bytes): {what}. It may be truncated; use an "
        "older one"
    )


def load_json(text: bytes) -> dict[str, Any]:
    """Return the object that a JSON text holds.

    Raises:
        ValueError: the text holds another type, a duplicate key, or a value that is not a number.
        RecursionError: the object is nested too deeply.

    Example:
        >>> from stratagem.checkpoint import load_json
        >>> load_json(b'{"step": 1}')
        {'step': 1}
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) < len(items):
            raise ValueError("a key is there twice")
        return values

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    values = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    if not isinstance(values, dict):
        raise ValueError(f"it is a {type(values).__name__}")
    return values


def parse_manifest(values: dict[str, Any], path: str) -> Manifest:
    """Return a manifest from its JSON object.

    Raises:
        CheckpointCorruptError: the manifest has a newer format.
        ValueError, KeyError: the object is not a manifest.

    Example:
        >>> from stratagem.checkpoint import parse_manifest
        >>> values = {"format_version": 1, "stratagem": "0.1.0", "torch": "2.13.0", "contents": []}
        >>> parse_manifest(values, "a.ckpt").torch
        '2.13.0'
    """
    version = values["format_version"]
    if type(version) is not int or version < 1:
        raise ValueError(f"format_version={version!r}: expected a number from 1 on")
    if version > FORMAT_VERSION:
        raise CheckpointCorruptError(
            f"{path!r} has the file format {version}, made by stratagem "
            f"{format_text(str(values.get('stratagem')))}; this version reads up to "
            f"{FORMAT_VERSION}: upgrade stratagem-core"
        )
    piece_size = values["piece_size"] if version > 1 else 0
    contents = values["contents"]
    if type(contents) is not list or not all(type(name) is str for name in contents):
        raise ValueError("contents: expected names")
    known = {field.name for field in fields(Manifest)}
    given = {name: value for name, value in values.items() if name in known}
    given |= {"piece_size": piece_size, "contents": tuple(contents)}
    for name, kind in _KINDS.items():
        value = given.get(name)
        if type(value) is not kind and (value is not None or name in _REQUIRED):
            raise ValueError(f"{name}={value!r:.100}: expected a {kind.__name__}")
    if version > 1 and not _SMALLEST_PIECE <= piece_size <= _LARGEST_PIECE:
        raise ValueError(f"piece_size={piece_size}: expected at least {_SMALLEST_PIECE}")
    return Manifest(**given)
