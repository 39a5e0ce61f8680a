"""Observed: the callbacks and loggers of a loop of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.runtime.ranked import Ranked
from stratagem.runtime.request import as_list


class Observed(Ranked):
    """Calls the user's callbacks, and writes to the user's loggers.

    Args:
        callbacks: objects whose methods `call` finds; one, several or None.
        loggers: where `log` writes; one, several or None.
    """

    def __init__(self, callbacks: object, loggers: object) -> None:
        self._callbacks = as_list(callbacks)
        self._loggers = as_list(loggers)

    @property
    def loggers(self) -> list[Any]:
        """Where `log` writes."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger.

        Raises:
            ConfigurationError: there is none.
        """
        if not self._loggers:
            raise ConfigurationError(
                f"{type(self).__name__} has no logger: expected one of the argument loggers, "
                "received none; pass loggers=CSVLogger() or another one"
            )
        return self._loggers[0]

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Write a value to every logger, on rank 0."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write several values to every logger, on rank 0.

        Raises:
            ConfigurationError: a value is no number, and no tensor of one element.
        """
        if not self.is_global_zero:
            return
        for logger in self._loggers:
            logger.log_metrics(numbers_of(metrics), step)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                raise ConfigurationError(
                    f"call({hook_name!r}): {type(callback).__name__}.{hook_name} is a "
                    f"{type(method).__name__}; expected a method"
                )
            method(*args, **kwargs)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return values as floats.

    Raises:
        ConfigurationError: one is no number, and no tensor of one element; names it.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = getattr(value, "shape", None)
            received = repr(value) if shape is None else f"one of shape {tuple(shape)}"
            raise ConfigurationError(
                f"log_dict: {name!r}: expected a number or a tensor of one element, received "
                f"{received}: log its mean, or each part by a name of its own"
            ) from error
    return numbers
