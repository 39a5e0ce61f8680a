"""SqliteCheckpointIO: a checkpoint is a SQLite database."""

import errno
import sqlite3
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stratagem.checkpoint import CheckpointIO
from stratagem.errors import CheckpointCorruptError, CheckpointNotFoundError
from stratagem.state import from_bytes, to_bytes
from stratagem.storage import durable_replace

_PIECE = 64 << 20
"""Bytes in a row: SQLite takes up to 1 GB."""


class SqliteCheckpointIO(CheckpointIO):
    """Writes a database with a table `pieces`: bytes that `torch.load` reads, and their checksums.

    Paths are local. A kill or a power cut leaves the checkpoint before or the new one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write a database beside `path`, then put it in its place."""
        data = to_bytes(checkpoint, path)
        pieces = (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))
        with durable_replace(path) as new, closing(sqlite3.connect(new)) as database:
            try:
                # The whole file is new: it needs no journal, and is synced once at the end.
                database.executescript(
                    "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; CREATE TABLE pieces "
                    "(number INTEGER PRIMARY KEY, checksum BLOB NOT NULL, data BLOB NOT NULL)"
                )
                with database:
                    database.executemany(
                        "INSERT INTO pieces (checksum, data) VALUES (?, ?)",
                        ((blake2b(piece).digest(), piece) for piece in pieces),
                    )
            except sqlite3.Error as error:
                raise OSError(errno.EIO, str(error)) from error

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Compare the pieces with their checksums, and return the checkpoint."""
        if not Path(path).is_file():
            raise CheckpointNotFoundError(f"there is no checkpoint {str(path)!r}")
        try:
            uri = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
            with closing(sqlite3.connect(uri, uri=True)) as database:
                rows = database.execute(
                    "SELECT checksum, data FROM pieces ORDER BY number"
                ).fetchall()
        except sqlite3.Error as error:
            raise CheckpointCorruptError(f"{str(path)!r} cannot be read: {error}") from error
        for number, (checksum, piece) in enumerate(rows):
            if not isinstance(piece, bytes) or blake2b(piece).digest() != checksum:
                raise CheckpointCorruptError(f"{str(path)!r} is damaged in piece {number}")
        checkpoint: dict[str, Any] = from_bytes(b"".join(piece for _, piece in rows), path)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the database."""
        Path(path).unlink(missing_ok=True)
