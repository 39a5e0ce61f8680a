"""SDKLogger: what loggers have in common that write through somebody's library."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from stratagem.discovery import require_package
from stratagem.launch import rank_zero_only
from stratagem.loggers import Logger


class DummyExperiment:
    """Stands for an experiment on ranks that write nothing: it takes every call and index.

    Example:
        >>> experiment = DummyExperiment()
        >>> experiment.add_image("sample", [[0]])
        >>> experiment["anything"].append(1.0)
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up such names
            raise AttributeError(name)
        return self._nothing

    def _nothing(self, *arguments: Any, **options: Any) -> None:
        pass

    def __getitem__(self, name: Any) -> DummyExperiment:
        return self

    def __setitem__(self, name: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class SDKLogger(Logger):
    """A logger with an `experiment`: an object of a library, created at its first use.

    The object is created on rank 0: when a fit begins, so that an unreachable server costs no
    training, or with the first value.

    Args:
        prefix: prepended to each name, with a "-".

    Raises:
        MissingPackageError: the library is not installed.
    """

    package: ClassVar[str]
    """The library's import name."""
    extra: ClassVar[str] = ""
    """Of stratagem-core, which installs it."""

    def __init__(self, prefix: str | None = "") -> None:
        require_package(type(self).__name__, self.package, self.extra)
        self.prefix = prefix or ""
        self.fit_id = ""
        self.resumed_at: int | None = None
        self._experiment: Any = None

    @property
    def experiment(self) -> Any:
        """The library's object; on ranks other than 0 one that takes every call."""
        if self._experiment is None:
            if not self.writes_here:
                return DummyExperiment()
            self._experiment = self._start()
        return self._experiment

    @property
    def writes_here(self) -> bool:
        """Whether this process is the one that writes."""
        return rank_zero_only.rank == 0 if self.on_rank_zero is None else self.on_rank_zero

    @abstractmethod
    def _start(self) -> Any:
        """Make the library's object; called once, on rank 0."""

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        """Make the experiment, or find the experiment of the resumed run."""
        self.fit_id, self.resumed_at = run_id, resumed_at
        assert self.experiment is not None

    def __getstate__(self) -> dict[str, Any]:
        # The writer belongs to this process.
        return {**self.__dict__, "_experiment": None}
