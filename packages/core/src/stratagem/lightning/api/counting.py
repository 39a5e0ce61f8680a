"""Classes of Lightning's names that what Stratagem makes by itself is an instance of, too."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from typing import Any


class Counting(ABCMeta):
    """The type of a class whose attribute `counts` says what else is one of its instances.

    Scripts ask `isinstance(trainer.accelerator, CPUAccelerator)` of what was chosen by name.
    Subclasses of such a class have instances of their own only.

    Example:
        >>> class Even(int, metaclass=Counting):
        ...     counts = staticmethod(lambda number: number % 2 == 0)
        >>> isinstance(2, Even), isinstance(3, Even)
        (True, False)
    """

    def __instancecheck__(cls, instance: object) -> bool:
        counts: Callable[[Any], bool] | None = vars(cls).get("counts")
        return super().__instancecheck__(instance) or (counts is not None and counts(instance))


def instances_of(kind: type, *names: str) -> Any:
    """Return a `counts`: instances of a class, and of one of these names if any is given."""
    return staticmethod(
        lambda one: isinstance(one, kind) and (not names or getattr(one, "name", None) in names)
    )
