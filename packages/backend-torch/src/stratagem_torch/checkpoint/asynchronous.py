"""AsyncCheckpointIO: copies what is saved, and writes it while training goes on."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stratagem.accelerators import Accelerator
from stratagem.checkpoint import CheckpointIO, Shards
from stratagem.discovery import get_registry
from stratagem.errors import CheckpointSaveError, ConfigurationError
from stratagem.launch import at_end_of_rank, record_failure, this_rank
from stratagem.state import check_safe_data
from stratagem.strategies import Ranks
from stratagem_torch.checkpoint.snapshot import Snapshots

_GRACE = 20.0
"""Seconds that a rank which ends with an error gives the others to write their shares."""


class AsyncCheckpointIO(CheckpointIO):
    """Saves checkpoints in the background, in any other format.

    A save returns once the state is copied to host memory, which later saves reuse. A rank that
    writes therefore needs additional memory of the size of its checkpoint. At most one write runs
    at a time; the next save waits for its end. Removing and linking checkpoints run in the
    background after the pending write, and are skipped if that write fails, so that the previous
    checkpoint remains until the new one is durable. Loading also waits for the write.

    The next training step, the next call of this object or the end of the run raises an error of
    the background write. If the process ends before, it exits with the error.

    Args:
        inner: the format that writes the files: a name, or a CheckpointIO.

    Raises:
        ConfigurationError: `inner` is asynchronous itself.

    Example:
        >>> import tempfile, torch
        >>> from stratagem.checkpoint import AsyncCheckpointIO
        >>> path = f"{tempfile.mkdtemp()}/model.ckpt"
        >>> weights = torch.ones(2)
        >>> io = AsyncCheckpointIO("single_file")
        >>> io.save_checkpoint({"weights": weights}, path)
        >>> weights.zero_()
        tensor([0., 0.])
        >>> io.load_checkpoint(path)
        {'weights': tensor([1., 1.])}
    """

    asynchronous = True

    def __init__(self, inner: str | CheckpointIO = "single_file") -> None:
        self.inner: CheckpointIO = (
            get_registry().find("checkpoint_io", inner).spec.build()
            if isinstance(inner, str)
            else inner
        )
        if self.inner.asynchronous:
            raise ConfigurationError(
                f"AsyncCheckpointIO(inner={inner!r}): it is asynchronous already; pass the format "
                "that it writes, or leave async_save out"
            )
        self.supports_shards = self.inner.supports_shards
        self._snapshots = Snapshots()
        self._pins_memory = False
        self._write: _Write | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes that are started anew receive the constructor's arguments.
        return type(self), (self.inner,), {"_pins_memory": self._pins_memory}

    def bind(self, accelerator: Accelerator) -> None:
        self._pins_memory = accelerator.pins_memory
        self.inner.bind(accelerator)

    def setup(self, ranks: Ranks, strategy_name: str) -> None:
        super().setup(ranks, strategy_name)
        self.inner.setup(ranks, strategy_name)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Copy `checkpoint` and begin to write it; see `CheckpointIO.save_checkpoint`.

        Raises:
            CheckpointContentError: the checkpoint contains an object that is not weights-only-safe
                data; no data is copied.
            CheckpointSaveError: the previous save failed; this save is not started.
        """
        check_safe_data(_with_plain_shards(checkpoint), path)
        self.wait()
        snapshot = self._snapshots.take(checkpoint, pin_memory=self._pins_memory)
        # Here and now, since it may communicate.
        rest = self.inner.prepare_save(snapshot, path)
        self._write = _Write(snapshot, path, rest, self.inner.rank_was_lost)
        self._write.start()

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        self.wait()
        return self.inner.load_checkpoint(path)

    def open_checkpoint(self, path: str | Path) -> dict[str, Any]:
        self.wait()
        return self.inner.open_checkpoint(path)

    def verify_checkpoint(self, path: str | Path) -> None:
        self.wait()
        self.inner.verify_checkpoint(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        self.when_durable(partial(self.inner.remove_checkpoint, path))

    def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
        """Make `path` a second name of the checkpoint at `target`, after that is durable.

        Where the inner format cannot, what was copied for `target` is written a second time.
        """
        write = self._write
        if (
            write is not None
            and str(write.path) == str(target)
            and write.then(partial(self._link_or_save, write.snapshot, target, path))
        ):
            return True
        self.wait()
        return self.inner.link_checkpoint(target, path)

    def _link_or_save(self, snapshot: dict[str, Any], target: str | Path, path: str | Path) -> None:
        if self.inner.link_checkpoint(target, path):
            return
        if self.supports_shards:
            # A second time all ranks would have to save together.
            raise CheckpointSaveError(
                f"cannot save {str(path)!r}: {type(self.inner).__name__} cannot link it to "
                f"{str(target)!r} on this file system"
            )
        self.inner.save_checkpoint(snapshot, path)

    def when_durable(self, action: Callable[[], None]) -> None:
        self.raise_errors()
        if self._write is None or not self._write.then(action):
            self.raise_errors()
            action()

    def raise_errors(self) -> None:
        write = self._write
        if write is not None and write.error is not None:
            self.wait()

    def wait(self) -> None:
        write = self._write
        if write is not None:
            write.join()
            # Not before: Ctrl-C ends the waiting, and not the write.
            self._write = None
            write.raise_error()

    def wait_at_error(self) -> None:
        write = self._write
        if write is not None:
            write.join_at_error()
            self.wait()

    def rank_was_lost(self) -> None:
        self.inner.rank_was_lost()

    def teardown(self) -> None:
        try:
            self.wait()
        finally:
            self._snapshots.forget()
            self.inner.teardown()


class _Write:
    """A checkpoint write that runs in the background, with the actions that follow it.

    Args:
        snapshot: the copied state to write.
        path: the path of the checkpoint.
        rest: writes the snapshot.
        give_up: makes the write stop waiting for other ranks.

    Attributes:
        error: the exception that the write or a following action raised.
    """

    def __init__(
        self,
        snapshot: dict[str, Any],
        path: str | Path,
        rest: Callable[[], None],
        give_up: Callable[[], None],
    ) -> None:
        self.snapshot = snapshot
        self.path = path
        self.error: BaseException | None = None
        self._todo = [rest]
        self._give_up = give_up
        self._ended = False
        self._raised = False
        self._lock = threading.Lock()
        # A daemon: for another one the interpreter would wait, also where it waits for a rank that
        # is gone. `_at_end` knows.
        self._thread = threading.Thread(target=self._run, name="stratagem-save", daemon=True)

    def start(self) -> None:
        at_end_of_rank(self._at_end)
        self._thread.start()

    def then(self, action: Callable[[], None]) -> bool:
        """Do something more if all before it succeeds; return False if it has ended already."""
        with self._lock:
            if not self._ended:
                self._todo.append(action)
            return not self._ended

    def join(self) -> None:
        """Wait until all work is done, or a part of the work has failed."""
        self._thread.join()

    def raise_error(self) -> None:
        """Raise the error of the write, if any."""
        if self.error is not None:
            self._raised = True
            raise self.error

    def join_at_error(self) -> None:
        """Do as `join`, where other ranks may be gone: their shares come soon or never."""
        self._thread.join(0 if this_rank.lost_peer else _GRACE)
        if self._thread.is_alive():
            self._give_up()
        self.join()

    def _run(self) -> None:
        try:
            while (action := self._next()) is not None:
                action()
        # The boundary of the thread: whoever waits for it raises this.
        except BaseException as error:
            with self._lock:
                self._ended = True
                self.error = error
        else:
            try:
                this_rank.at_end.remove(self._at_end)
            except ValueError:
                pass  # the process is at its end, and waits

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._ended = not self._todo
            return self._todo.pop(0) if self._todo else None

    def _at_end(self) -> None:
        """At the end of the process: wait; an error that nobody has raised is the process's."""
        failed = this_rank.failed or this_rank.lost_peer
        if failed:
            self.join_at_error()
        else:
            self.join()
        if self._raised or self.error is None:
            return
        traceback.print_exception(self.error)
        if failed:
            return  # it ends with another error
        record_failure(self.error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _with_plain_shards(data: Any) -> Any:
    """Return data with a list of its chunks in the place of each `Shards`."""
    if isinstance(data, Shards):
        return [chunk for _, chunk in data.chunks]
    if type(data) is dict:
        return {name: _with_plain_shards(value) for name, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(_with_plain_shards(value) for value in data)
    return data
