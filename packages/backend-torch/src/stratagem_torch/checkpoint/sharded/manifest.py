"""The manifest of a directory checkpoint, and the checksums of its files; without torch.

::

    step=400/
      manifest.json     says what this is, and has the size and checksum of every other file
      state.ckpt        all but the sharded tensors, as a checkpoint of one file has it
      .metadata         of torch.distributed.checkpoint: which chunk of a tensor lies where
      __0_0.distcp      the chunks that rank 0 wrote
      __1_0.distcp      ... and rank 1

The manifest is written last, when the other files are durable. `torch.distributed.checkpoint.load`
reads the tensors too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from stratagem.checkpoint import (
    Description,
    Manifest,
    checksum_of_file,
    load_json,
    parse_manifest,
)
from stratagem.errors import CheckpointCorruptError
from stratagem.storage import is_name, open_regular

MANIFEST = "manifest.json"
STATE = "state.ckpt"
LAYOUT = ".metadata"

# Far more than the file names of a million tensors need.
_LARGEST_MANIFEST = 256 << 20


@dataclass(frozen=True)
class SavedFile:
    """A file of the directory, as its manifest describes it.

    Attributes:
        size: in bytes.
        xxh3_128: its checksum (`stratagem.checkpoint.Checksum`), 32 hexadecimal digits.

    Example:
        >>> from stratagem_torch.checkpoint.sharded.manifest import SavedFile
        >>> SavedFile(3, "0" * 32).size
        3
    """

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Directory:
    """The manifest of a directory checkpoint, with its files.

    Attributes:
        path: the directory.
        manifest: the manifest; None for a checkpoint of plain `torch.distributed.checkpoint`.
        checksum: the checksum of the manifest, 32 hexadecimal digits; None without a manifest.
        files: the files by name.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from stratagem import Lite
        >>> path = Path(tempfile.mkdtemp()) / "step=1"
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> lite.save(path, {"step": 1})
        >>> from stratagem_torch.checkpoint.sharded.manifest import read_directory
        >>> read_directory(path).manifest.contents
        ('step',)
    """

    path: Path
    manifest: Manifest | None
    checksum: str | None
    files: Mapping[str, SavedFile]

    @property
    def piece_size(self) -> int:
        """The bytes of a piece of the files' checksums; 0 for checksums of whole files."""
        return 0 if self.manifest is None else self.manifest.piece_size

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size for file in self.files.values())


def encode_manifest(manifest: Manifest, files: Mapping[str, SavedFile]) -> bytes:
    """Return the contents of the manifest file, including their own checksum.

    Example:
        >>> from stratagem.checkpoint import Manifest
        >>> from stratagem_torch.checkpoint.sharded.manifest import encode_manifest
        >>> text = encode_manifest(Manifest(stratagem="0.1.0", torch="2.13.0"), {})
        >>> b'"xxh3_128"' in text
        True
    """
    contents = {**asdict(manifest), "files": {name: asdict(files[name]) for name in sorted(files)}}
    return _dump({**contents, "xxh3_128": _checksum_of(contents)})


def is_directory_checkpoint(path: Path) -> bool:
    """Return whether a path is a directory checkpoint of Stratagem or plain DCP, by its files.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from stratagem_torch.checkpoint.sharded.manifest import is_directory_checkpoint
        >>> is_directory_checkpoint(Path(tempfile.mkdtemp()))
        False
    """
    return (path / MANIFEST).is_file() or (path / LAYOUT).is_file()


def read_directory(path: Path) -> Directory:
    """Return the manifest of a directory checkpoint, without reading the other files.

    Raises:
        CheckpointCorruptError: the manifest is damaged, has a newer format, or is missing although
            its files exist.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from stratagem import Lite
        >>> path = Path(tempfile.mkdtemp()) / "step=1"
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> lite.save(path, {"step": 1})
        >>> from stratagem_torch.checkpoint.sharded.manifest import read_directory
        >>> sorted(read_directory(path).files)
        ['.metadata', 'state.ckpt']
    """
    file = path / MANIFEST
    if not os.path.lexists(file):
        if os.path.lexists(path / LAYOUT) and not os.path.lexists(path / STATE):
            return Directory(path, None, None, {})
        # An interrupted copy of our own checkpoint: torch's checkpoints have no state.ckpt.
        raise _damaged(file, "it is missing")
    with open_member(path, MANIFEST) as opened:
        if os.fstat(opened.fileno()).st_size > _LARGEST_MANIFEST:
            raise CheckpointCorruptError(f"{str(file)!r} is larger than {_LARGEST_MANIFEST} bytes")
        text = opened.read()
    try:
        contents = load_json(text)
        checksum = contents.pop("xxh3_128")
        files = {name: _saved_file(entry) for name, entry in contents["files"].items()}
        manifest = parse_manifest(contents, str(file))
        # Compare the whole text, so that any changed byte is found.
        is_whole = checksum == _checksum_of(contents) and text == _dump(
            {**contents, "xxh3_128": checksum}
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(file, f"it cannot be read ({type(error).__name__}: {error})") from error
    if not is_whole:
        raise _damaged(file, "its contents do not have the checksum that was written")
    for name in (STATE, LAYOUT):
        if name not in files:
            raise _damaged(file, f"it does not name the file {name!r}")
    for name in files:
        if not is_name(name):
            raise CheckpointCorruptError(
                f"{str(file)!r} was refused: it names the file {name!r}, which leads out of the "
                "directory"
            )
    return Directory(path, manifest, checksum, files)


def describe_directory(path: Path, *, verify: bool) -> Description:
    """Return the description of a directory checkpoint; `describe_checkpoint` calls it.

    Args:
        path: the directory.
        verify: whether to read all files and compare them with their checksums.

    Raises:
        CheckpointCorruptError: the directory is not a complete checkpoint.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from stratagem import Lite
        >>> path = Path(tempfile.mkdtemp()) / "step=1"
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> lite.save(path, {"step": 1})
        >>> from stratagem.checkpoint import describe_directory
        >>> describe_directory(path, verify=True).files
        3
    """
    directory = read_directory(path)
    if verify:
        verify_files(directory)
    return Description(
        directory.size, len(directory.files) + 1, directory.checksum, directory.manifest
    )


def verify_files(directory: Directory, names: Iterable[str] | None = None) -> None:
    """Read complete files and compare them with their checksums.

    Args:
        directory: the directory with its manifest.
        names: the files to read; by default all.

    Raises:
        CheckpointCorruptError: a file is missing, or has changed since it was written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from stratagem import Lite
        >>> path = Path(tempfile.mkdtemp()) / "step=1"
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> lite.save(path, {"step": 1})
        >>> from stratagem_torch.checkpoint.sharded.manifest import read_directory, verify_files
        >>> verify_files(read_directory(path)) is None
        True
    """
    for name in directory.files if names is None else names:
        expected = directory.files[name]
        path = directory.path / name
        with open_member(directory.path, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                raise _damaged(path, f"it has {size} bytes, but {expected.size} were written")
            found = checksum_of_file(file, size, directory.piece_size)
        if found != expected.xxh3_128:
            raise _damaged(
                path,
                f"its contents have the checksum xxh3_128 {found}, but {expected.xxh3_128} was "
                "written",
            )


def open_member(folder: Path, name: str) -> BinaryIO:
    """Open a file of a directory checkpoint, unbuffered.

    Raises:
        CheckpointCorruptError: the file is missing, is a link, which may lead anywhere, or is not a
            regular file.
        OSError: the file cannot be opened.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "state.ckpt").write_bytes(b"abc")
        >>> from stratagem_torch.checkpoint.sharded.manifest import open_member
        >>> with open_member(folder, "state.ckpt") as file:
        ...     file.read()
        b'abc'
    """
    try:
        return open_regular(folder / name, follow=False)
    except FileNotFoundError as error:
        raise _damaged(folder / name, "it is missing") from error


def size_of_member(folder: Path, name: str) -> int:
    """Return the size of a file of a directory checkpoint, in bytes; -1 if it does not exist.

    Raises:
        CheckpointCorruptError: as `open_member`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "state.ckpt").write_bytes(b"abc")
        >>> from stratagem_torch.checkpoint.sharded.manifest import size_of_member
        >>> size_of_member(folder, "state.ckpt"), size_of_member(folder, "other")
        (3, -1)
    """
    if not os.path.lexists(folder / name):
        return -1
    with open_member(folder, name) as file:
        return os.fstat(file.fileno()).st_size


def _saved_file(entry: Any) -> SavedFile:
    size, checksum = entry["size"], entry["xxh3_128"]
    if type(size) is not int or type(checksum) is not str or size < 0:
        raise ValueError(f"a file has the size {size!r:.100} and the checksum {checksum!r:.100}")
    return SavedFile(size, checksum)


def _checksum_of(contents: dict[str, Any]) -> str:
    return xxhash.xxh3_128(_dump(contents)).hexdigest()


def _dump(contents: dict[str, Any]) -> bytes:
    return json.dumps(contents, indent=1).encode("ascii")


def _damaged(path: Path, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{str(path)!r} is damaged: {what}. Copy the checkpoint again from where it is whole, or "
        "use an older one"
    )
