"""CheckpointNames: the names under which a run saves in its folder, which no other run has."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from stratagem.checkpoint.catalog import SUFFIX
from stratagem.errors import CheckpointSaveError, ConfigurationError
from stratagem.storage import paths
from stratagem.storage.claims import Claim, claim

if TYPE_CHECKING:
    from stratagem.interfaces.ranks import Ranks


def filled(
    filename: str, values: Mapping[str, Any], *, with_names: bool = True, equals: str = "="
) -> str:
    """Return a file name with values in the place of its braces.

    Args:
        filename: with names in braces.
        values: by name.
        with_names: write the name before each value.
        equals: stands between them.

    Raises:
        ConfigurationError: there is no value of a name in it.

    Example:
        >>> from stratagem.callbacks.checkpoints.names import filled
        >>> filled("{epoch}-{val/acc:.2f}", {"epoch": 3, "val/acc": 0.917})
        'epoch=3-val_acc=0.92'
    """

    def fill(match: re.Match[str]) -> str:
        name, _, form = match.group(1).partition(":")
        if name not in values:
            raise ConfigurationError(
                f"ModelCheckpoint(filename={filename!r}) uses {name!r}, but there is only "
                f"{', '.join(sorted(values))}"
            )
        text = format(values[name], form)
        return f"{name.replace('/', '_')}{equals}{text}" if with_names else text

    return re.sub(r"\{([^}]+)\}", fill, filename)


def is_version_of(path: str, name: str) -> bool:
    """Whether a checkpoint has a name that `CheckpointNames.choose` makes of one.

    Example:
        >>> is_version_of("kept/last-v2.ckpt", "last"), is_version_of("kept/3-last.ckpt", "last")
        (True, False)
    """
    versions = rf"{re.escape(name)}(-v\d+)?{re.escape(SUFFIX)}"
    return re.fullmatch(versions, paths.name_of(path)) is not None


class CheckpointNames:
    """Chooses names on rank 0, and broadcasts them.

    A name is claimed until something is there, so that two runs which choose at the same moment do
    not choose the same one.

    Args:
        replaces: choose a name that something has, too.
    """

    def __init__(self, *, replaces: bool = False) -> None:
        self._replaces = replaces
        self._claims: list[Claim] = []
        self._claim_on_last: Claim | None = None
        self._moves_last = False

    def choose(
        self, ranks: Ranks, folder: paths.Location, name: str, own: Collection[str] = ()
    ) -> str:
        """Return a path that nothing has and nobody is about to have; called on every rank.

        It is `folder/name.ckpt`, or with `-v1`, `-v2` and so on after the name. Where names are
        replaced, something may have it.

        Args:
            ranks: of the run.
            folder: where the checkpoint is saved.
            name: without its ending.
            own: paths of this run that the checkpoint may replace.

        Raises:
            CheckpointSaveError: the folder cannot be written to.
        """
        path, problem = "", ""
        if ranks.is_global_zero:
            try:
                path = self._claim(folder, name, own)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        path, problem = ranks.broadcast([path, problem])
        if problem:
            raise CheckpointSaveError(f"cannot save in {str(folder)!r}: {problem}")
        return str(path)

    def _claim(self, folder: paths.Location, name: str, own: Collection[str]) -> str:
        # Listed once: to look at one name after the other takes a listing for each.
        taken = () if self._replaces else paths.names(folder)
        version = 0
        while True:
            versioned = (f"{name}-v{version}" if version else name) + SUFFIX
            path = paths.join(folder, versioned)
            replaces = self._replaces or str(path) in own
            is_free = replaces or versioned not in taken
            claimed = claim(path, may_exist=replaces) if is_free else None
            if claimed is not None:
                self._claims.append(claimed)
                return str(claimed.path)
            version += 1

    def may_move(self, ranks: Ranks, last: str) -> bool:
        """Return whether `last.ckpt` of a run is this process's to move; called on every rank.

        Of two that have resumed from one checkpoint, and both think so, the first is right.
        """
        # It may be this process that has claimed it, while the first link is still to be made.
        chosen = any(str(claimed.path) == last for claimed in self._claims)
        if ranks.is_global_zero and not self._moves_last and not chosen:
            # A run that was killed may be resumed on another machine at once, and moves its `last`.
            claimed = claim(last, may_exist=True, from_unseen=True)
            self._moves_last = claimed is not None
            if claimed is not None and claimed.ends_with_process:
                self._claim_on_last = claimed
            elif claimed is not None:
                # It would outlive a run that is killed, and keep `last` from the one that resumes.
                claimed.release()
        return bool(ranks.broadcast(self._moves_last or chosen))

    def release(self) -> None:
        """Give back the names of what is there by now: nobody takes those any more."""
        kept = []
        for claimed in self._claims:
            if paths.exists(claimed.path):
                claimed.release()
            else:
                kept.append(claimed)  # it is still being written
        self._claims = kept

    def release_all(self) -> None:
        """Give everything back, at the end of a run."""
        for claimed in (*self._claims, self._claim_on_last):
            try:
                if claimed is not None:
                    claimed.release()
            except OSError:
                pass  # a marker is left, which is void soon; there may be an error that matters
        self._claims, self._claim_on_last, self._moves_last = [], None, False
