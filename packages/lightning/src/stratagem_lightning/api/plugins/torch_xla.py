"""Whether torch_xla is there."""

from __future__ import annotations

import importlib.util

from stratagem.errors import MissingPackageError


def require_torch_xla(who: str) -> None:
    """Raise an error if torch_xla is not installed.

    Args:
        who: the name of the class that needs it.

    Raises:
        MissingPackageError: torch_xla is missing; the message names the package to install.
    """
    if importlib.util.find_spec("torch_xla") is None:
        raise MissingPackageError(
            f"{who} needs torch_xla, which is not installed here: pip install "
            "stratagem-backend-xla, and torch_xla in an environment of its own"
        )
