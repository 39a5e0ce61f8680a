"""MixedPrecision("16-mixed"): the backend's, by Lightning's name."""

from __future__ import annotations

from typing import Any

from stratagem import precision
from stratagem_lightning.api.plugins.precision import MixedPrecision

# Served by the backend that provides it; an error names the one to install.
_Float16Mixed: Any = precision.Float16Mixed  # type: ignore[attr-defined]


class Float16MixedPrecision(MixedPrecision, _Float16Mixed):  # type: ignore[misc]
    """The precision that `MixedPrecision("16-mixed")` makes."""
