"""RetentionPolicy: which checkpoints of a run are kept, the best ones and the newest ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any, Literal

from stratagem.errors import CheckpointCorruptError, format_value
from stratagem.storage import paths


class RetentionPolicy:
    """Decides, and remembers; nothing is written or removed here.

    Args:
        mode: "min": smaller values are better; "max". NaN is the worst in either.
        top_k: how many of the best are kept; -1: all.
        latest_k: how many of the newest are kept, whatever their values.

    Attributes:
        best: value by path.
        latest: paths, the newest last. With `latest_k=0` that is what a run which ended early has
            saved to resume from, until there is another checkpoint.
        nonfinite: the newest whose weights are not finite, until there is another checkpoint; "":
            there is none. It replaces no finite checkpoint.

    Example:
        >>> kept = RetentionPolicy("min", top_k=1, latest_k=1)
        >>> kept.add("a", 0.3), kept.add("b", 0.2), kept.add("c", None)
        ([], ['a'], [])
        >>> kept.best, kept.latest
        ({'b': 0.2}, ['c'])
    """

    def __init__(self, mode: Literal["min", "max"], *, top_k: int, latest_k: int) -> None:
        self._better: Callable[[float, float], bool] = _smaller if mode == "min" else _larger
        self._top_k = top_k
        self._latest_k = latest_k
        self.best: dict[str, float] = {}
        self.latest: list[str] = []
        self.nonfinite = ""

    def is_among_best(self, value: float) -> bool:
        """Return whether a new checkpoint with such a value would be kept for it."""
        if self._top_k == -1 or len(self.best) < self._top_k:
            return True
        return self._top_k > 0 and self._better(value, self.best[self._worst()])

    def best_path(self) -> str:
        """Return the best of all; "": there is none."""
        return _extreme(self.best, self._better) if self.best else ""

    def worst_path(self) -> str:
        """Return the worst of the best; "": there is none."""
        return self._worst() if self.best else ""

    def add(self, path: str, value: float | None) -> list[str]:
        """Take a new checkpoint; return those that are not to be kept, once it is durable.

        Args:
            path: where it is.
            value: its value, if it is among the best; None: it is not.
        """
        before = self.all_paths()
        self.nonfinite = ""
        if value is not None:
            # More than one: a state that is resumed from may name any number.
            while self._top_k != -1 and len(self.best) >= self._top_k:
                del self.best[self._worst()]
            self.best[path] = value
        self.latest = [*self.latest, path][-self._latest_k :] if self._latest_k else []
        return self._left_out(before)

    def add_nonfinite(self, path: str) -> list[str]:
        """Take a new checkpoint whose weights are not finite; return what `add` does."""
        before = self.all_paths()
        if self._top_k == -1:
            self.best[path] = math.nan
        else:
            self.nonfinite = path
        return self._left_out(before)

    def all_paths(self) -> list[str]:
        """Return all that are kept, for whatever reason."""
        return [*self.best, *self.latest, *filter(None, [self.nonfinite])]

    def copy(self) -> RetentionPolicy:
        """Return the same, to go back to."""
        copied = copy(self)
        copied.best, copied.latest = dict(self.best), list(self.latest)
        return copied

    def add_to_resume_from(self, path: str) -> None:
        """Take a checkpoint that is kept until there is another one."""
        self.latest.append(path)

    def _left_out(self, before: list[str]) -> list[str]:
        kept = self.all_paths()
        return [path for path in dict.fromkeys(before) if path not in kept]

    def _worst(self) -> str:
        return _extreme(self.best, lambda a, b: self._better(b, a))

    def state_dict(self, folder: paths.Location) -> dict[str, Any]:
        """Return what is kept, as seen from a folder, so that all of it can be moved."""
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
        """Take it back.

        Args:
            state: what `state_dict` returned.
            locate: returns where a checkpoint is by now; None: it is gone.

        Raises:
            CheckpointCorruptError: it is not what `state_dict` returns.
        """
        models, latest = state.get("best_k_models"), state.get("latest")
        if (
            not isinstance(models, dict)
            or not isinstance(latest, list)
            or not all(isinstance(value, (int, float)) for value in models.values())
        ):
            raise CheckpointCorruptError(
                "the checkpoint's state of ModelCheckpoint is damaged: expected best_k_models, "
                f"numbers by name, and latest, a list of names; received "
                f"{format_value(models)} and {format_value(latest)}"
            )
        best = [(locate(name), value) for name, value in models.items()]
        self.best = {path: value for path, value in best if path is not None}
        self.latest = [path for path in map(locate, latest) if path is not None]
        nonfinite = state.get("nonfinite")
        self.nonfinite = (locate(nonfinite) or "") if nonfinite else ""


def _larger(a: float, b: float) -> bool:
    return a > b or (b != b and a == a)


def _smaller(a: float, b: float) -> bool:
    return a < b or (b != b and a == a)


def _extreme(models: dict[str, float], better: Callable[[float, float], bool]) -> str:
    """Return the path whose value is better than all others'; NaN is the worst."""
    rest = iter(models)
    best = next(rest)
    for path in rest:
        if better(models[path], models[best]):
            best = path
    return best
