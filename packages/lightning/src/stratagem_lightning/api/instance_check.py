"""Second names of classes and attributes, as Lightning has them."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from stratagem_lightning.api.utilities.warnings import rank_zero_deprecation


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


def renamed(name: str, kind: Any, check: Callable[[], None] = lambda: None) -> Any:
    """Return a class under the name that it had before: making an object warns.

    Args:
        name: the earlier name.
        kind: the class.
        check: called before an object is made.

    Example:
        >>> class Now(metaclass=InstanceCheck):
        ...     pass
        >>> Before = renamed("Before", Now)
        >>> isinstance(Now(), Before), Before.__name__
        (True, 'Before')
    """

    def make(cls: Any, *args: Any, **options: Any) -> Any:
        if cls is not earlier:
            return kind.__new__(cls, *args, **options)  # a user's subclass
        rank_zero_deprecation(f"The `{name}` is deprecated: its name is `{kind.__name__}` now")
        check()
        return kind(*args, **options)

    is_instance = vars(kind).get("is_instance", of_class(kind))
    inherited = {"is_instance": is_instance, "__module__": __name__, "__doc__": kind.__doc__}
    earlier = InstanceCheck(name, (kind,), {**inherited, "__new__": make})
    return earlier


def of_class(kind: type, *names: str) -> Any:
    """Return an `is_instance` for a class, and for one of these names if any is given."""
    return staticmethod(
        lambda one: isinstance(one, kind) and (not names or getattr(one, "name", None) in names)
    )


class Shown(property):
    """A property that a subclass may read, and that nothing here asks for.

    If a user's class overrides it, the run is refused: Lightning would ask the override.
    """


def second_name(name: str, instead: Any = None) -> Any:
    """Return a property that reads and sets an attribute of another name.

    Args:
        name: of the attribute.
        instead: the value in place of None.

    Example:
        >>> class Saver:
        ...     every = None
        ...     _every = second_name("every", 0)
        >>> saver = Saver()
        >>> before, saver._every = saver._every, 3
        >>> before, saver.every
        (0, 3)
    """

    def read(self: Any) -> Any:
        value = getattr(self, name)
        return instead if value is None else value

    return property(read, lambda self, value: setattr(self, name, value))
