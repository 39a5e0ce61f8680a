"""Classes of Lightning's names that what Stratagem makes by itself is an instance of, too."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from typing import Any


class InstanceCheck(ABCMeta):
    """The type of a class whose `is_instance` adds objects to `isinstance`.

    Scripts ask `isinstance(trainer.accelerator, CPUAccelerator)` of what was chosen by name.
    Subclasses of such a class have instances of their own only.

    Example:
        >>> class Even(int, metaclass=InstanceCheck):
        ...     is_instance = staticmethod(lambda number: number % 2 == 0)
        >>> isinstance(2, Even), isinstance(3, Even)
        (True, False)
    """

    def __instancecheck__(cls, instance: object) -> bool:
        check: Callable[[Any], bool] | None = vars(cls).get("is_instance")
        return super().__instancecheck__(instance) or (check is not None and check(instance))


def of_class(kind: type, *names: str) -> Any:
    """Return an `is_instance` for a class, and for one of these names if any is given."""
    return staticmethod(
        lambda one: isinstance(one, kind) and (not names or getattr(one, "name", None) in names)
    )
