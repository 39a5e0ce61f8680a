"""Uploads: which checkpoints a logger that sends files is to send, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from stratagem.callbacks import ModelCheckpoint


class Upload(NamedTuple):
    """A checkpoint to send.

    Attributes:
        path: a file, or a directory.
        score: its monitored value; None without a monitored value.
        aliases: "latest", and "best" for the best checkpoint.
        saver: the arguments of the ModelCheckpoint.
    """

    path: Path
    score: float | None
    aliases: list[str]
    saver: dict[str, Any]


class Uploads:
    """Knows which saved checkpoints have not been sent in their present state.

    Args:
        log_model: "all": each checkpoint after its save; True: the kept checkpoints, at the end
            of training (when saved, if all are kept); False: no checkpoints.
        send: sends a checkpoint.
    """

    def __init__(self, log_model: bool | Literal["all"], send: Callable[[Upload], None]) -> None:
        self._log_model = log_model
        self._send = send
        self._savers: list[ModelCheckpoint] = []
        self._sent: dict[Path, int] = {}
        """When what was sent had been modified, in nanoseconds."""

    def saved(self, saver: ModelCheckpoint) -> None:
        """Take note of a save."""
        if self._log_model == "all" or (self._log_model is True and saver.save_top_k == -1):
            self._send_new(saver)
        elif self._log_model is True and not any(each is saver for each in self._savers):
            self._savers.append(saver)

    def end(self) -> None:
        """Send the checkpoints that were kept for the end."""
        savers, self._savers = self._savers, []
        for saver in savers:
            self._send_new(saver)

    def _send_new(self, saver: ModelCheckpoint) -> None:
        monitors = saver.monitor is not None
        best = Path(saver.best_model_path or saver.last_model_path)
        scores = {Path(path): score for path, score in saver.best_k_models.items()}
        there = [path for path in map(Path, saver.kept_paths) if path.exists()]
        for path in sorted(there, key=_modified):
            if self._sent.get(path) == _modified(path):
                continue
            self._sent[path] = _modified(path)
            aliases = ["latest", "best"] if path == best else ["latest"]
            score = scores.get(path) if monitors else None
            self._send(Upload(path, score, aliases, _arguments_of(saver)))


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns


def _arguments_of(saver: ModelCheckpoint) -> dict[str, Any]:
    names = ("monitor", "mode", "save_top_k", "save_last", "save_weights_only")
    return {name: getattr(saver, name) for name in names}
