"""Profiler: measures the actions of a run and reports on them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import WRAPPER_ASSIGNMENTS, wraps
from pathlib import Path
from typing import Any, TypeVar

from stratagem.discovery.former import check_former_names
from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError
from stratagem.launch.process import printable

Result = TypeVar("Result")


class Profiler(ABC):
    """Measures the actions of a run.

    Actions are named `run_training_epoch`, `run_training_batch`, `[Strategy]CLASS.training_step`,
    `.backward`, `.optimizer_step`, `.batch_to_device` and `.validation_step` (`test_step`,
    `predict_step`), `train_dataloader_next`, `val_next`, `test_next`, `predict_next`,
    `save_checkpoint`, and for each hook that is
    overridden `[Callback]CLASS.HOOK`, `[Module]CLASS.HOOK`. The time of a device counts in the
    action that waits for it.

    Call sequence, on every rank:
        1. `setup` at the start of a run.
        2. `start` and `stop` for each action; one may lie within another.
        3. `describe` at its end, also after an error: it writes the text of `summary` to the file
           of `path_of`, or prints it. Then `teardown`.

    The Trainer calls `profile_iterable` and `wrap` for loaders and functions; user code may call
    them too, and `profile`, at any time between `setup` and `teardown`.

    Args:
        dirpath: folder of the report file; None for the log folder of each run.
        filename: name of the report, without an extension. The report goes to `STAGE-FILENAME.txt`,
            with several ranks to `STAGE-FILENAME-RANK.txt`, a file per rank. None: rank 0 prints
            it.

    Example:
        >>> from stratagem.profilers import Profiler
        >>> class Names(Profiler):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.seen = []
        ...     def start(self, action_name):
        ...         self.seen.append(action_name)
        ...     def stop(self, action_name):
        ...         pass
        >>> profiler = Names()
        >>> with profiler.profile("read the labels"):
        ...     pass
        >>> profiler.seen
        ['read the labels']
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self._stage = ""
        self._rank: int | None = None
        self._log_dir: str | None = None

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Called when an action begins."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """Called when it ends."""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Called at the start of a run.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: number of this process; None for a single process.
            log_dir: the log folder of the run.
        """
        self._stage = stage
        self._rank = local_rank
        if self.dirpath in (None, self._log_dir):
            self.dirpath = self._log_dir = log_dir

    def teardown(self, stage: str | None = None) -> None:
        """Called at the end of a run, after `describe`; the next one begins with nothing."""

    def summary(self) -> str:
        """Return the report, or "" without one."""
        return ""

    def describe(self) -> None:
        """Write the report to its file, or print it on rank 0."""
        report = self.summary()
        if not report:
            return
        if self.filename is not None:
            path = self.path_of(".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(report)
        elif not self._rank:
            print(printable(report, getattr(sys.stdout, "encoding", None) or "ascii"))

    def path_of(self, ending: str, name: str = "") -> Path:
        """Return the path of a file of this run: stage, `name`, `filename`, of several the rank."""
        rank = "" if self._rank is None else str(self._rank)
        parts = (self._stage, name, self.filename or "", rank)
        return Path(self.dirpath or "") / ("-".join(part for part in parts if part) + ending)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Profile the code in this context."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def profile_iterable(self, iterable: Iterable[Result], action_name: str) -> Iterator[Result]:
        """Yield the items of an iterable, and profile the time to get each item."""
        iterator = iter(iterable)
        while True:
            with self.profile(action_name):
                try:
                    value = next(iterator)
                except StopIteration:
                    return
            yield value
            del value  # before the next one is read

    def wrap(self, action_name: str, function: Callable[..., Result]) -> Callable[..., Result]:
        """Return a function that profiles each call."""

        # Do not copy the __dict__ of a module to a function.
        @wraps(function, WRAPPER_ASSIGNMENTS, ())
        def profiled(*args: Any, **kwargs: Any) -> Result:
            self.start(action_name)
            try:
                return function(*args, **kwargs)
            finally:
                self.stop(action_name)

        return profiled


class PassThroughProfiler(Profiler):
    """A profiler that does nothing; the Trainer's default.

    Example:
        >>> from stratagem import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=1, logger=False)
        >>> with trainer.profiler.profile("my own code"):
        ...     pass
        >>> trainer.profiler.summary()
        ''
    """

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""


def make_profiler(profiler: str | Profiler | None) -> Profiler | None:
    """Return the Trainer's profiler, or None.

    Raises:
        ConfigurationError: an object is no Profiler.
        UnknownNameError: no installed distribution provides a profiler of this name.

    Example:
        >>> make_profiler(PassThroughProfiler()) is None
        True
    """
    if isinstance(profiler, str):
        built: Profiler = get_registry().find("profiler", profiler).spec.build()
        return built
    if isinstance(profiler, PassThroughProfiler):
        return None
    if isinstance(profiler, Profiler):
        check_former_names(type(profiler))
    if profiler is None or isinstance(profiler, Profiler):
        return profiler
    raise ConfigurationError(
        f"profiler={profiler!r}: expected the name of a profiler, a stratagem.profilers.Profiler, "
        "or None"
    )
