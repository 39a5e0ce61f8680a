"""Methods that user code overrides, that Lightning calls, and that are not called here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from stratagem.errors import UserCodeError


def refuse_uncalled_overrides(objects: Iterable[object]) -> None:
    """Refuse objects whose classes override a method that only Lightning calls.

    Without this check, what such a method does would be left out silently.

    Args:
        objects: callbacks, loggers, a model and so on.

    Raises:
        UserCodeError: names the class and its methods.

    Example:
        >>> from stratagem_lightning.pytorch.callbacks import ModelCheckpoint
        >>> class Mine(ModelCheckpoint):
        ...     __module__ = "mine"
        ...
        ...     def _save_topk_checkpoint(self, trainer, monitor_candidates):
        ...         pass
        >>> refuse_uncalled_overrides([Mine()])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        stratagem.errors.UserCodeError: Mine overrides _save_topk_checkpoint of ModelCheckpoint...
    """
    for each in objects:
        bases = type(each).__mro__
        for number, base in enumerate(bases):
            uncalled = _uncalled().get(base.__name__, frozenset())
            if not uncalled or not _is_ours(base):
                continue
            users = [kind for kind in bases[:number] if not _is_ours(kind)]
            found = sorted({name for kind in users for name in vars(kind) if name in uncalled})
            # A class of ours between the two may have it.
            found = [name for name in found if not hasattr(base, name)]
            if found:
                raise UserCodeError(
                    f"{type(each).__name__} overrides {', '.join(found)} of {base.__name__}, which "
                    "Lightning calls and Stratagem does not: the run would differ silently. Move "
                    "the code into a hook (such as on_validation_end) or a method that both have"
                )


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0].startswith("stratagem")


@cache
def _uncalled() -> dict[str, frozenset[str]]:
    """Return the methods by the name of the class; scripts/uncalled.py writes the file."""
    text = files(__package__).joinpath("uncalled.txt").read_text(encoding="utf-8")
    rows = (line.split(": ") for line in text.splitlines())
    return {name: frozenset(methods.split()) for name, methods in rows}
