"""RetentionPolicy: decides which checkpoints of a run to keep, the best and the newest."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any, Literal

from stratagem.checkpoint.forms import require_form
from stratagem.storage import paths

_FORM = {"best_k_models": {str: float}, "latest": [str], "nonfinite?": str}


class RetentionPolicy:
    """Decides which checkpoints to keep, and remembers them, without writing or removing files.

    Args:
        mode: "min" if smaller values are better, or "max". NaN is the worst value in either.
        top_k: the number of best checkpoints to keep; -1 keeps all.
        latest_k: the number of newest checkpoints to keep, whatever their values.

    Attributes:
        best: the values of the best checkpoints, by path.
        latest: the paths of the newest checkpoints, the newest last. With `latest_k=0`, the
            checkpoint that an interrupted run saved, until another checkpoint is saved.
        nonfinite: the path of the newest checkpoint with non-finite weights, until another
            checkpoint is saved; "" without one. It replaces no finite checkpoint.

    Example:
        >>> kept = RetentionPolicy("min", top_k=1, latest_k=1)
        >>> kept.add("a", 0.3), kept.add("b", 0.2), kept.add("c", None)
        ([], ['a'], [])
        >>> kept.best, kept.latest
        ({'b': 0.2}, ['c'])
    """

    def __init__(self, mode: Literal["min", "max"], *, top_k: int, latest_k: int) -> None:
        self._sign = 1 if mode == "min" else -1
        self._top_k = top_k
        self._latest_k = latest_k
        self.best: dict[str, float] = {}
        self.latest: list[str] = []
        self.nonfinite = ""

    def is_among_best(self, value: float) -> bool:
        """Return whether a new checkpoint with this value would be kept as a best one."""
        if self._top_k == -1 or len(self.best) < self._top_k:
            return True
        return self._top_k > 0 and self._rank(value) < self._rank(self.best[self.worst_path()])

    def best_path(self) -> str:
        """Return the path of the best checkpoint, or ""."""
        return min(self.best, key=lambda path: self._rank(self.best[path]), default="")

    def worst_path(self) -> str:
        """Return the path of the worst of the best checkpoints, or ""."""
        return max(self.best, key=lambda path: self._rank(self.best[path]), default="")

    def _rank(self, value: float) -> tuple[bool, float]:
        """Return a key by which better values come first; NaN is the worst."""
        return value != value, self._sign * value

    def add(self, path: str, value: float | None) -> list[str]:
        """Add a new checkpoint; return the checkpoints to remove once the new one is durable.

        Args:
            path: the path of the checkpoint.
            value: its value if it is among the best, or None.
        """
        before = self.all_paths()
        self.nonfinite = ""
        if value is not None:
            # A loop, since a resumed state may name any number of checkpoints.
            while self._top_k != -1 and len(self.best) >= self._top_k:
                del self.best[self.worst_path()]
            self.best[path] = value
        self.latest = [*self.latest, path][-self._latest_k :] if self._latest_k else []
        return self._left_out(before)

    def add_nonfinite(self, path: str) -> list[str]:
        """Add a new checkpoint with non-finite weights; return the checkpoints to remove."""
        before = self.all_paths()
        if self._top_k == -1:
            self.best[path] = math.nan
        else:
            self.nonfinite = path
        return self._left_out(before)

    def all_paths(self) -> list[str]:
        """Return the paths of all checkpoints that are kept."""
        return [*self.best, *self.latest, *filter(None, [self.nonfinite])]

    def copy(self) -> RetentionPolicy:
        """Return a copy of the policy, to restore it later."""
        copied = copy(self)
        copied.best, copied.latest = dict(self.best), list(self.latest)
        return copied

    def add_to_resume_from(self, path: str) -> None:
        """Add a checkpoint that is kept until another one is saved."""
        self.latest.append(path)

    def _left_out(self, before: list[str]) -> list[str]:
        kept = self.all_paths()
        return [path for path in dict.fromkeys(before) if path not in kept]

    def state_dict(self, folder: paths.Location) -> dict[str, Any]:
        """Return the kept checkpoints, with paths relative to a folder, so that it can be moved."""
        return {
            "best_k_models": {
                paths.relative(path, folder): value for path, value in self.best.items()
            },
            "latest": [paths.relative(path, folder) for path in self.latest],
            "nonfinite": paths.relative(self.nonfinite, folder) if self.nonfinite else "",
        }

    def load_state_dict(
        self, state: dict[str, Any], locate: Callable[[object], str | None]
    ) -> None:
        """Restore the kept checkpoints.

        Args:
            state: the return value of `state_dict`.
            locate: a function that returns a checkpoint's current path, or None if it is gone.

        Raises:
            CheckpointMismatchError: the state does not have the form that `state_dict` returns.
        """
        require_form(state, _FORM, "the state of ModelCheckpoint")
        best = [(locate(name), value) for name, value in state["best_k_models"].items()]
        self.best = {path: value for path, value in best if path is not None}
        self.latest = [path for path in map(locate, state["latest"]) if path is not None]
        nonfinite = state.get("nonfinite")
        self.nonfinite = (locate(nonfinite) or "") if nonfinite else ""
