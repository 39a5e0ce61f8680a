"""DirectoryCheckpointIO: a directory that all ranks write together, each its own chunks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint import (
    Checksum,
    Manifest,
    Shards,
    SingleFileCheckpointIO,
    StoredCheckpointIO,
    has_shards,
    manifest_of,
    write_archive,
)
from stratagem.errors import CheckpointContentError, CheckpointSaveError
from stratagem.state import why_refused
from stratagem.storage import DurableDirectory, StreamedFile, check_is_new, to_location
from stratagem.strategies import Ranks
from stratagem.system import BINARY
from stratagem_torch.checkpoint.sharded.exchange import Exchange, StoreExchange
from stratagem_torch.checkpoint.sharded.layout import encode_layout
from stratagem_torch.checkpoint.sharded.manifest import (
    LAYOUT,
    MANIFEST,
    STATE,
    SavedFile,
    encode_manifest,
    is_directory_checkpoint,
)
from stratagem_torch.checkpoint.sharded.opening import open_directory
from stratagem_torch.checkpoint.sharded.save_plan import Held, SavePlan, make_plan
from stratagem_torch.checkpoint.sharded.shard_writer import file_of, write_share

Record = dict[str, Any]
"""What a rank tells of its part of a save, or rank 0 of all of it; "error" says why it failed."""


class DirectoryCheckpointIO(StoredCheckpointIO):
    """Writes sharded state in parallel; each rank writes its own shards without gathering.

    Tensors are stored in the format of `torch.distributed.checkpoint`, other objects in a small
    file beside them. A manifest lists the checksum of each file. The directory appears at its path
    once the files of all ranks are on disk. It loads under any strategy and any number of ranks.

    The path must be on a file system that all ranks share.

    Args:
        verify: verify checksums when loading; each rank verifies a part of the files.

    Example:
        >>> import tempfile, torch
        >>> from stratagem import Lite
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> path = f"{tempfile.mkdtemp()}/step=1"
        >>> lite.save(path, {"weights": torch.ones(2)})
        >>> lite.load(path)
        {'weights': tensor([1., 1.])}
    """

    supports_shards = True
    open_directory = staticmethod(open_directory)
    """Opens any directory checkpoint; core's reader calls it if a path is a directory."""

    def __init__(self, *, verify: bool = True) -> None:
        super().__init__(verify=verify)
        self._exchange: StoreExchange | None = None
        self.last_plan: SavePlan | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write `checkpoint` to the directory `path`; see `CheckpointIO.save_checkpoint`.

        Every rank calls it; all return once the checkpoint is durable, or raise.
        """
        save = _Save(self, checkpoint, _local(path))
        save.write(save.ranks)

    def prepare_save(self, checkpoint: dict[str, Any], path: str | Path) -> Callable[[], None]:
        """Plan the save on all ranks; return its function. See `CheckpointIO.prepare_save`."""
        save = _Save(self, checkpoint, _local(path))
        exchange: Exchange = save.ranks
        if save.ranks.world_size > 1:
            exchange = self._exchange = self._exchange or StoreExchange(save.ranks)
        return partial(save.write, exchange)

    def rank_was_lost(self) -> None:
        if self._exchange is not None:
            self._exchange.stop()

    def teardown(self) -> None:
        """Wait for no other rank any more."""
        super().teardown()
        self.last_plan = None
        if self._exchange is not None:
            self._exchange.stop()
            self._exchange = None


class _Save:
    """One save of one rank. Making it communicates; `write` does so only by its argument."""

    def __init__(self, io: DirectoryCheckpointIO, checkpoint: dict[str, Any], path: Path) -> None:
        self.ranks = Ranks() if io.ranks is None else io.ranks
        self._io = io
        self._path = path
        self._rest, self._tensors, self._paths = _split(checkpoint)
        self._manifest: Manifest = manifest_of(checkpoint, io)
        self._directory: DurableDirectory | None = None
        self._held = Held([], [])
        # A rank that fails reports its error, so that the other ranks do not wait for it.
        try:
            self._temporary = self._agree(self._begin())
        except BaseException:
            self._close()
            raise

    def _begin(self) -> Record:
        """Return why this rank cannot save; {} if it can."""
        try:
            self._held = Held.of(self._tensors)
        except ValueError as error:
            return {"error": str(error), "errno": None, "is_content": True}
        if why := why_refused(self._rest):
            return {"error": why, "errno": None, "is_content": True}
        if self.ranks.is_global_zero:
            try:
                self._directory = DurableDirectory(self._path, may_replace=is_directory_checkpoint)
            except OSError as error:
                return _failure(error)
        return {}

    def _agree(self, failure: Record) -> Path:
        """Plan the save, or keep the plan of the last one; return the temporary directory."""
        ranks, held, last = self.ranks, self._held, self._io.last_plan
        signature = held.signature()
        changed = last is None or last.held != held
        own = [bool(failure), changed, held.dims, signature, -signature]
        failed, changed, dims, largest, smallest = ranks.all_reduce(
            torch.tensor(own, dtype=torch.int64), "max"
        ).tolist()
        if failed:
            self._settle(ranks, failure)
        temporary = ranks.broadcast(str(self._directory.temporary if self._directory else ""))
        if changed:
            self._io.last_plan = None
            try:
                last = make_plan(held, ranks, dims=dims, alike=largest == -smallest)
            except ValueError as error:
                raise CheckpointContentError(
                    f"cannot save {str(self._path)!r}: the ranks' shards do not make whole "
                    f"tensors: {error}"
                ) from error
        assert last is not None
        self._io.last_plan = self._plan = last
        return Path(temporary)

    def write(self, exchange: Exchange) -> None:
        """Write this rank's chunks; on rank 0, put the checkpoint in its place when all have."""
        try:
            places, record = self._write_share()
            self._settle(exchange, record)
            self._plan.places = places
        except BaseException:
            # Rank 0 may not hold the plan that this rank assumes.
            self._io.last_plan = None
            raise
        finally:
            self._close()

    def _settle(self, exchange: Exchange, record: Record) -> None:
        """Tell rank 0 how it went; there, commit if it went well everywhere.

        Raises:
            CheckpointContentError, CheckpointSaveError: the first rank's that failed; the same one
                on every rank.
        """
        records = [json.loads(data) for data in exchange.gather_bytes(json.dumps(record).encode())]
        outcome = _first_failure(records)
        if self._directory is not None and not outcome:
            outcome = self._commit(self._directory, records)
        _raise(exchange.broadcast(outcome), self._path)

    def _write_share(self) -> tuple[list[list[int]], Record]:
        rank = self.ranks.global_rank
        files: dict[str, SavedFile] = {}
        create = partial(_HashedFile, files)
        try:
            places = write_share(self._tensors, self._plan, rank, self._temporary, create)
            if rank == 0:
                with closing(create(self._temporary / STATE)) as file:
                    write_archive(self._rest, self._manifest, file)
        except Exception as error:
            return [], _failure(error)
        written = {name: (file.size, file.xxh3_128) for name, file in files.items()}
        # They seldom change from save to save.
        known = places == self._plan.places
        return places, {"files": written, "places": None if known else places}

    def _commit(self, directory: DurableDirectory, written: list[Record]) -> Record:
        """Return why the checkpoint is not in its place; {} if it is."""
        files = {
            name: SavedFile(size, checksum)
            for record in written
            for name, (size, checksum) in record["files"].items()
        }
        everyone = self._plan.everyone
        assert everyone is not None
        try:
            for rank, record in enumerate(written):
                if record["places"] is not None:
                    everyone.places[rank] = torch.tensor(record["places"], dtype=torch.int64)
            names = [file_of(rank) for rank in range(len(written))]
            with closing(_HashedFile(files, directory.temporary / LAYOUT)) as file:
                for piece in encode_layout(everyone, names, everyone.all_places(), self._paths):
                    file.write(piece)
            manifest = encode_manifest(self._manifest, files)
            with closing(_HashedFile({}, directory.temporary / MANIFEST)) as file:
                file.write(manifest)
            directory.commit()
        except Exception as error:
            return _failure(error)
        return {}

    def _close(self) -> None:
        if self._directory is not None:
            self._directory.close()


def _local(path: str | Path) -> Path:
    path = to_location(path)
    if isinstance(path, Path):
        return path
    raise CheckpointSaveError(
        f"cannot save {path!r}: a checkpoint that is a directory lies on a file system that all "
        "ranks share, not at a URL: give a local path, or use the format 'single_file'"
    )


def _split(
    checkpoint: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Tensor | Shards], dict[str, tuple[Any, ...]]]:
    """Separate the tensors of the sharded entries from a checkpoint.

    Returns:
        The checkpoint with None in place of these tensors, the tensors by name, and the path of
        each tensor in the checkpoint.
    """
    chunks: dict[str, Tensor | Shards] = {}
    places: dict[str, tuple[Any, ...]] = {}

    def take(data: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(data, (Tensor, Shards)):
            name = ".".join(map(str, path))
            if name in chunks:  # {"a": {"b.c": ...}} and {"a.b": {"c": ...}}
                name = repr(path)
            chunks[name], places[name] = data, path
            return None
        if isinstance(data, dict):
            return {key: take(value, (*path, key)) for key, value in data.items()}
        if type(data) in (list, tuple):
            return type(data)(take(value, (*path, i)) for i, value in enumerate(data))
        return data

    rest = {
        name: take(entry, (name,)) if has_shards(entry) else entry
        for name, entry in checkpoint.items()
    }
    return rest, chunks, places


def _failure(error: Exception) -> Record:
    return {
        "error": f"{type(error).__name__}: {error}",
        "errno": error.errno if isinstance(error, OSError) else None,
    }


def _first_failure(records: list[Record]) -> Record:
    """Return the record of the first rank that failed, with its number; {} if none did."""
    for rank, record in enumerate(records):
        if "error" in record:
            where = f"rank {rank}: " if len(records) > 1 else ""
            return {**record, "error": where + record["error"]}
    return {}


def _raise(outcome: Record, path: Path) -> None:
    """Raise the error that rank 0 tells of, if it does."""
    if not outcome:
        return
    message = f"cannot save {str(path)!r}: {outcome['error']}"
    if outcome.get("is_content"):
        raise CheckpointContentError(message)
    state = "what was there before is unchanged" if path.exists() else "nothing is there"
    raise CheckpointSaveError(f"{message}; {state}", errno=outcome["errno"])


class _HashedFile:
    """A file of the directory that is hashed during writing; `close` syncs it to disk.

    Args:
        files: receives the size and checksum of the file.
        path: path of the file, which must not exist.
    """

    def __init__(self, files: dict[str, SavedFile], path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY
        self._file: StreamedFile | None = StreamedFile(os.open(path, flags, 0o666))
        self._checksum = Checksum()
        self._files = files
        self._name = path.name
        self._size = 0

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            assert self._file is not None
            data = view.cast("B")
            self._checksum.update(data)
            self._size += len(data)
            return self._file.write(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing, since closing the file flushes it to the disk."""

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.sync()
            finally:
                file.close()
            self._files[self._name] = SavedFile(self._size, self._checksum.hexdigest())


def consolidate_checkpoint(source: str | Path, target: str | Path) -> None:
    """Convert a directory checkpoint into a single file without loss.

    Args:
        source: the directory, which is verified before loading. Its state must fit into memory.
        target: the file, which must not exist.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: `source` is not a complete checkpoint.
        CheckpointSaveError: `target` exists, or cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from stratagem import Lite
        >>> from stratagem.checkpoint import consolidate_checkpoint
        >>> lite = Lite(accelerator="cpu", plugins="directory")
        >>> lite.launch()
        >>> folder = tempfile.mkdtemp()
        >>> lite.save(f"{folder}/step=1", {"weights": torch.ones(2)})
        >>> consolidate_checkpoint(f"{folder}/step=1", f"{folder}/step=1.ckpt")
        >>> torch.load(f"{folder}/step=1.ckpt", weights_only=True)
        {'weights': tensor([1., 1.])}
    """
    check_is_new(target)
    io = SingleFileCheckpointIO()
    io.save_checkpoint(io.load_checkpoint(source), target)
