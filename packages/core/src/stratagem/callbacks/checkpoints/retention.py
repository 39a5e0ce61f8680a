"""RetentionPolicy: which checkpoints of a run are kept, the best ones and the newest ones.

ResumedCheckpoints: which of them are still there when the run is resumed, and are this run's. The
names come from a file that anybody may have made. A plain name in the run's own folder is looked
at, and one beside the checkpoint that the user named; all others are left alone. Only what says in
a readable manifest that this run has saved it, in its own folder, is ever removed or replaced.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, Literal

from stratagem.checkpoint.catalog import run_of
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
            there is none. It takes the place of none that is kept.

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


_LAST = re.compile(r"last(-v\d+)?\.ckpt")


def leads_to(named: str | os.PathLike[str], path: str) -> bool:
    """Return whether what a user has named is a checkpoint, maybe by a link or another folder.

    Example:
        >>> leads_to("runs/step=3.ckpt", "runs/step=4.ckpt")
        False
    """
    at, checkpoint = paths.parse_user_path(named), paths.to_location(path)
    if not isinstance(at, Path) or not isinstance(checkpoint, Path):
        return str(at) == str(checkpoint)
    try:
        return at.samefile(checkpoint)
    except OSError:  # one of them is gone
        return False


def in_folder(folder: paths.Location, name: object) -> str | None:
    """Return the path of what a checkpoint names, or None: the name leads out of the folder."""
    return str(paths.join(folder, name)) if paths.is_name(name) else None


class ResumedCheckpoints:
    """Looks for the checkpoints that a state names; on rank 0.

    Args:
        folder: in which this run saves.
        resumed_from: the checkpoint that the user named; None: there is none.
        run: the name of the run.

    Attributes:
        spared: what was found and is not this run's to remove.
        refused: names that lead out of a folder.
    """

    def __init__(
        self, folder: paths.Location, resumed_from: paths.Location | None, run: str
    ) -> None:
        self._folder = folder
        self._run = run
        # Nothing is fetched by a name that was read.
        self._beside = resumed_from.absolute().parent if isinstance(resumed_from, Path) else None
        self.spared: set[str] = set()
        self.refused: list[str] = []

    def locate(self, name: object) -> str | None:
        """Return where a checkpoint of this run is; None: it is gone, or not this run's."""
        path = in_folder(self._folder, name)
        if path is None:
            self.refused.append(format_value(name))
            return None
        saver = run_of(path)
        # A format that is not core's does not say whose it is.
        if saver in (self._run, "") and paths.exists(path):
            if saver == "" or paths.target_of(path) != paths.to_location(path):
                self.spared.add(path)
            return path
        if self._beside is not None:
            path = str(paths.join(self._beside, str(name)))
            if run_of(path) == self._run:
                self.spared.add(path)
                return path
        return None

    def warn_of_refused(self) -> None:
        """Say which names were refused, if any were."""
        if self.refused:
            warnings.warn(
                f"the checkpoint that is resumed from names {len(self.refused)} other(s) that are "
                f"not in its folder, such as {self.refused[0]}: they are left alone, and count "
                "neither as the best nor as the newest",
                stacklevel=2,
            )

    def locate_last(self, name: object) -> str:
        """Return where this run's own `last.ckpt` is, or ""."""
        path = in_folder(self._folder, name)
        if path is None or not _LAST.fullmatch(str(name)) or not paths.exists(path):
            return ""
        may_move = (
            (self._run, "") if paths.target_of(path) != paths.to_location(path) else (self._run,)
        )
        return path if run_of(path) in may_move else ""
