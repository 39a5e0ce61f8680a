"""RetentionPolicy: decides what a save writes, links and removes; keeps the best and the newest.

Nothing here reads or writes files: `ModelCheckpoint` executes a `SavePlan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

from stratagem.callbacks.checkpoints.names import is_version_of
from stratagem.checkpoint.forms import require_form
from stratagem.storage import paths

_FORM = {"best_k_models": {str: float}, "latest": [str], "nonfinite?": str}

ChoosePath = Callable[[str, Collection[str]], str]
"""Returns a path for a file name: a new one, or one of the given paths that may be replaced."""


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A save that is due.

    Attributes:
        filename: the file name of the checkpoint, without suffix.
        metric: the monitored value of a best checkpoint, or None.
        is_finite: whether the weights are finite.
        link_name: the file name of the link to the newest checkpoint, without suffix; "" if the
            link does not move.
        link: the current path of the link, or "".
        protected: paths that must not be replaced or removed.
    """

    filename: str
    metric: float | None
    is_finite: bool = True
    link_name: str = ""
    link: str = ""
    protected: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """The steps of a save, in order: write, link, remove.

    Attributes:
        path: the path of the checkpoint to write.
        metric: the monitored value of a best checkpoint, or None.
        link: the path of the link to move to the new checkpoint, or "" if it does not move.
        remove: the paths to remove after that.
        policy: the policy with the new checkpoint.
    """

    path: str
    metric: float | None
    link: str
    remove: tuple[str, ...]
    policy: RetentionPolicy


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
        >>> policy = RetentionPolicy("min", top_k=1, latest_k=1)
        >>> for filename, metric in [("a", 0.3), ("b", 0.2), ("c", None)]:
        ...     plan = policy.plan(
        ...         SaveEvent(filename=filename, metric=metric), lambda name, _: name, bool
        ...     )
        ...     policy = plan.policy
        ...     print(plan.path, plan.remove)
        a ()
        b ('a',)
        c ()
        >>> policy.best, policy.latest
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

    def plan(
        self, event: SaveEvent, choose_path: ChoosePath, may_move: Callable[[str], bool]
    ) -> SavePlan:
        """Return the plan of a save; the policy itself does not change.

        Args:
            event: the save that is due.
            choose_path: a function that chooses the path of a new file.
            may_move: a function that returns whether this run may move a link.
        """
        policy, link, old_link = self.copy(), "", ""
        policy._make_room(event)
        left = policy.all_paths()
        replaced = [path for path in dict.fromkeys(self.all_paths()) if path not in left]
        # Under an unchanged name, the new checkpoint replaces the one that it would remove.
        replaceable = [old for old in replaced if event.is_finite and old not in event.protected]
        path = choose_path(event.filename, replaceable)
        policy._add(path, event)
        if event.is_finite and event.link_name:
            link, old_link = _plan_link(event, choose_path, may_move)
        kept = {"", path, *event.protected}
        remove = tuple(old for old in (old_link, *replaced) if old not in kept)
        return SavePlan(path=path, metric=event.metric, link=link, remove=remove, policy=policy)

    def _make_room(self, event: SaveEvent) -> None:
        """Forget the checkpoints that a new one replaces; non-finite ones replace no other."""
        if event.is_finite or self._top_k != -1:
            self.nonfinite = ""
        if not event.is_finite:
            return
        if event.metric is not None and self._top_k != -1:
            # A loop, since a resumed state may name any number of checkpoints.
            while len(self.best) >= self._top_k:
                del self.best[self.worst_path()]
        self.latest = self.latest[1 - self._latest_k :] if self._latest_k > 1 else []

    def _add(self, path: str, event: SaveEvent) -> None:
        metric = event.metric if event.is_finite else math.nan
        if not event.is_finite and self._top_k != -1:
            self.nonfinite = path
        elif metric is not None:
            self.best[path] = metric
        if event.is_finite and self._latest_k:
            self.latest.append(path)

    def all_paths(self) -> list[str]:
        """Return the paths of all checkpoints that are kept."""
        return [*self.best, *self.latest, *filter(None, [self.nonfinite])]

    def copy(self) -> RetentionPolicy:
        """Return a copy of the policy."""
        copied = copy(self)
        copied.best, copied.latest = dict(self.best), list(self.latest)
        return copied

    def add_to_resume_from(self, path: str) -> None:
        """Add a checkpoint that is kept until another one is saved."""
        self.latest.append(path)

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
            locate: a function that returns the current path of a checkpoint, or None for a missing
                file.

        Raises:
            CheckpointMismatchError: the state does not have the form that `state_dict` returns.
        """
        require_form(state, _FORM, "the state of ModelCheckpoint")
        best = [(locate(name), value) for name, value in state["best_k_models"].items()]
        self.best = {path: value for path, value in best if path is not None}
        self.latest = [path for path in map(locate, state["latest"]) if path is not None]
        nonfinite = state.get("nonfinite")
        self.nonfinite = (locate(nonfinite) or "") if nonfinite else ""


def _plan_link(
    event: SaveEvent, choose_path: ChoosePath, may_move: Callable[[str], bool]
) -> tuple[str, str]:
    """Return the path of the link, and the path of a link under another name to remove, or ""."""
    is_own = bool(event.link) and may_move(event.link)
    if is_own and is_version_of(event.link, event.link_name):
        return event.link, ""
    return choose_path(event.link_name, ()), event.link if is_own else ""
