"""CheckpointNames: checkpoint names that are unique to a run in its folder."""

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


_IN_BRACES = re.compile(r"\{([^}]+)\}")


class NotYet:
    """A value that is not known yet: "none" in every format."""

    def __format__(self, form: str) -> str:
        return "none"


def names_in(filename: str) -> list[str]:
    """Return the names of the values in a file name.

    Example:
        >>> from stratagem.callbacks.checkpoints.names import names_in
        >>> names_in("{epoch}-{val/acc:.2f}")
        ['epoch', 'val/acc']
    """
    return [text.partition(":")[0] for text in _IN_BRACES.findall(filename)]


def filled(
    filename: str, values: Mapping[str, Any], *, with_names: bool = True, equals: str = "="
) -> str:
    """Return a file name with its names in braces replaced by values.

    Args:
        filename: a file name with names in braces.
        values: the values by name.
        with_names: whether to write the name before each value.
        equals: the separator of name and value.

    Raises:
        ConfigurationError: a name in braces has no value.

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

    return _IN_BRACES.sub(fill, filename)


def is_version_of(path: str, name: str) -> bool:
    """Return whether a checkpoint's name is a version of `name`, as `CheckpointNames.choose` makes.

    Example:
        >>> is_version_of("kept/last-v2.ckpt", "last"), is_version_of("kept/3-last.ckpt", "last")
        (True, False)
    """
    versions = rf"{re.escape(name)}(-v\d+)?{re.escape(SUFFIX)}"
    return re.fullmatch(versions, paths.name_of(path)) is not None


class CheckpointNames:
    """Chooses names on rank 0, and broadcasts them.

    A name is claimed until its checkpoint exists, so that two runs that choose at the same moment
    choose different names.

    Args:
        replaces: whether to choose names of existing checkpoints too.
    """

    def __init__(self, *, replaces: bool = False) -> None:
        self._replaces = replaces
        self._claims: list[Claim] = []
        self._claim_on_last: Claim | None = None
        self._moves_last = False

    def choose(
        self, ranks: Ranks, folder: paths.Location, name: str, own: Collection[str] = ()
    ) -> str:
        """Return a path that no file has and no other run has claimed; called on every rank.

        The path is `folder/name.ckpt`, or has `-v1`, `-v2` and so on after the name. If names are
        replaced, the path may exist.

        Args:
            ranks: the ranks of the run.
            folder: the folder of the checkpoint.
            name: the name without suffix.
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
        # List the folder once: a check of each name would list it each time.
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
        """Return whether this run may move `last.ckpt`; called on every rank.

        If two runs have resumed from the same checkpoint, only the first may.
        """
        # This process may have claimed the name itself, before the first link is made.
        chosen = any(str(claimed.path) == last for claimed in self._claims)
        if ranks.is_global_zero and not self._moves_last and not chosen:
            # A killed run may be resumed on another machine at once, and must move its `last`.
            claimed = claim(last, may_exist=True, from_unseen=True)
            self._moves_last = claimed is not None
            if claimed is not None and claimed.ends_with_process:
                self._claim_on_last = claimed
            elif claimed is not None:
                # The claim would outlive a killed run, and block `last` for the resumed run.
                claimed.release()
        return bool(ranks.broadcast(self._moves_last or chosen))

    def release(self) -> None:
        """Release the claims on names whose checkpoints exist."""
        kept = []
        for claimed in self._claims:
            if paths.exists(claimed.path):
                claimed.release()
            else:
                kept.append(claimed)  # the checkpoint is still being written
        self._claims = kept

    def release_all(self) -> None:
        """Release all claims, at the end of a run."""
        for claimed in (*self._claims, self._claim_on_last):
            try:
                if claimed is not None:
                    claimed.release()
            except OSError:
                pass  # the marker expires soon; do not hide an error that ends the run
        self._claims, self._claim_on_last, self._moves_last = [], None, False
