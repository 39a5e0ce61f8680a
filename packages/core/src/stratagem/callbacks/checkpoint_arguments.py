"""The arguments of a ModelCheckpoint, checked."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.callbacks.checkpoints.model_checkpoint import ModelCheckpoint


def check_arguments(given: ModelCheckpoint) -> None:
    """Check a ModelCheckpoint's arguments.

    Raises:
        ConfigurationError: one is out of range.
    """
    interval: object = given.train_time_interval
    if given.mode not in ("min", "max"):
        raise ConfigurationError(f"ModelCheckpoint(mode={given.mode!r}): expected 'min' or 'max'")
    if interval is not None and not isinstance(interval, timedelta):
        raise ConfigurationError(
            f"ModelCheckpoint(train_time_interval={interval!r}): expected a "
            "datetime.timedelta, such as timedelta(minutes=30)"
        )
    if given.save_top_k < -1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={given.save_top_k!r}): expected a number of checkpoints, "
            "or -1 for all"
        )
    for name, value, least in (
        ("keep_latest_k", given.keep_latest_k, 0),
        ("every_n_train_steps", given.every_n_train_steps, 0),
        ("every_n_epochs", given.every_n_epochs, 0),
    ):
        if value is not None and value < least:
            raise ConfigurationError(f"ModelCheckpoint({name}={value}): expected at least {least}")
