"""Imports the Gaudi SDK where it is first used, in the mode that was asked for."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from stratagem.errors import ConfigurationError

LAZY_VARIABLE = "PT_HPU_LAZY_MODE"


def is_loaded() -> bool:
    """Whether the SDK has been imported in this process, by whomever."""
    return "habana_frameworks.torch.core" in sys.modules


def load_sdk(lazy_mode: bool | None = None) -> Any:
    """Import the SDK, which registers `hpu` as a device of torch; return `habana_frameworks.torch`.

    Args:
        lazy_mode: collect operations into graphs, and run each at a `mark_step`; None: the mode of
            the environment, or the SDK's default. The SDK reads the mode once, during its import.

    Raises:
        ConfigurationError: the SDK cannot be imported, or was imported in the other mode.
    """
    if lazy_mode is not None and not is_loaded():
        os.environ[LAZY_VARIABLE] = str(int(lazy_mode))
    # The boundary at which whatever a broken SDK raises becomes an error that names it.
    try:
        sdk = importlib.import_module("habana_frameworks.torch")
        for part in ("core", "hpu"):
            importlib.import_module(f"habana_frameworks.torch.{part}")
    except Exception as error:
        raise ConfigurationError(
            "accelerator='hpu' needs the Gaudi SDK, which cannot be imported "
            f"({type(error).__name__}: {error}): install the one for this driver, with the build "
            "of torch that it needs, as https://docs.habana.ai says"
        ) from error
    if lazy_mode is not None and bool(sdk.core.is_lazy()) != lazy_mode:
        raise ConfigurationError(
            f"HPUAccelerator(lazy_mode={lazy_mode}), but the Gaudi SDK was imported before, in "
            f"the other mode: import it later, or set {LAZY_VARIABLE}={int(lazy_mode)} before "
            "Python starts"
        )
    return sdk
