"""Find the checkpoints of a resumed run that still exist, and those that this run owns.

The names come from an untrusted file. Only plain names are used, in the run's own folder or beside
the checkpoint that the user named. Only checkpoints in the run's own folder with a readable
manifest of this run are ever removed or replaced.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from stratagem.checkpoint.catalog import run_of
from stratagem.errors import format_value
from stratagem.storage import paths

_LAST = re.compile(r"last(-v\d+)?\.ckpt")


def leads_to(named: str | os.PathLike[str], path: str) -> bool:
    """Return whether a user's path leads to a checkpoint, directly or by a link.

    Example:
        >>> leads_to("runs/step=3.ckpt", "runs/step=4.ckpt")
        False
    """
    at, checkpoint = paths.parse_user_path(named), paths.to_location(path)
    if not isinstance(at, Path) or not isinstance(checkpoint, Path):
        return str(at) == str(checkpoint)
    try:
        return at.samefile(checkpoint)
    except OSError:  # a file is gone
        return False


def in_folder(folder: paths.Location, name: object) -> str | None:
    """Return the path of a name in a folder, if the name does not lead out of the folder."""
    return str(paths.join(folder, name)) if paths.is_name(name) else None


class ResumedCheckpoints:
    """Finds the checkpoints that a state names; used on rank 0.

    Args:
        folder: the folder in which this run saves.
        resumed_from: the checkpoint that the user named, or None.
        run: the name of the run.

    Attributes:
        protected: existing checkpoints that this run must not remove.
        refused: names that lead out of a folder.
    """

    def __init__(
        self, folder: paths.Location, resumed_from: paths.Location | None, run: str
    ) -> None:
        self._folder = folder
        self._run = run
        # A name from a file never causes a download.
        self._beside = resumed_from.absolute().parent if isinstance(resumed_from, Path) else None
        self.protected: set[str] = set()
        self.refused: list[str] = []

    def locate(self, name: object) -> str | None:
        """Return the path of a checkpoint, if it exists and belongs to this run."""
        path = in_folder(self._folder, name)
        if path is None:
            self.refused.append(format_value(name))
            return None
        saver = run_of(path)
        # Formats other than core's do not record the run.
        if saver in (self._run, "") and paths.exists(path):
            if saver == "" or paths.target_of(path) != paths.to_location(path):
                self.protected.add(path)
            return path
        if self._beside is not None:
            path = str(paths.join(self._beside, str(name)))
            if run_of(path) == self._run:
                self.protected.add(path)
                return path
        return None

    def warn_of_refused(self) -> None:
        """Warn of refused names, if any."""
        if self.refused:
            warnings.warn(
                f"the checkpoint that is resumed from names {len(self.refused)} other(s) that are "
                f"not in its folder, such as {self.refused[0]}: they are left alone, and count "
                "neither as the best nor as the newest",
                stacklevel=2,
            )

    def locate_last(self, name: object) -> str:
        """Return the path of this run's own `last.ckpt`, or ""."""
        path = in_folder(self._folder, name)
        if path is None or not _LAST.fullmatch(str(name)) or not paths.exists(path):
            return ""
        is_link = paths.target_of(path) != paths.to_location(path)
        may_move = (self._run, "") if is_link else (self._run,)
        return path if run_of(path) in may_move else ""
