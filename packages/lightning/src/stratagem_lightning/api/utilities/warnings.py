"""Lightning's warnings, and how they are turned off."""

from __future__ import annotations

import warnings
from typing import Any

from stratagem.launch import rank_zero_only, rank_zero_warn


class PossibleUserWarning(UserWarning):
    """Something that may be meant so, and may be a mistake."""


class LightningDeprecationWarning(DeprecationWarning):
    """Something that a later version will not have."""


class WarningCache(set[str]):
    """Says each message once."""

    def warn(self, message: str, stacklevel: int = 5, **options: Any) -> None:
        """Warn, unless this message was a warning before."""
        if message not in self:
            self.add(message)
            rank_zero_warn(message, stacklevel=stacklevel, **options)

    def deprecation(self, message: str, stacklevel: int = 6, **options: Any) -> None:
        """Warn of a feature that a later version will remove, once."""
        self.warn(message, stacklevel, **{"category": LightningDeprecationWarning, **options})


@rank_zero_only
def rank_zero_deprecation(message: str, stacklevel: int = 5, **options: Any) -> None:
    """Warn of a feature that a later version will remove, on rank 0."""
    warnings.warn(message, LightningDeprecationWarning, stacklevel=stacklevel, **options)


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return a message, prefixed with the rank if it is known."""
    return message if rank is None else f"[rank: {rank}] {message}"


def disable_possible_user_warnings(module: str = "") -> None:
    """Suppress PossibleUserWarning from now on.

    Args:
        module: a regular expression for the modules that warn; "" for all modules.
    """
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
