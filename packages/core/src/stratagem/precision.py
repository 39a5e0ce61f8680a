"""Precision classes, and the base to subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.interfaces.precision import (
        EnginePrecision as EnginePrecision,
        Precision as Precision,
        default_dtype as default_dtype,
    )
    from stratagem.one_device.precision import (
        MixedPrecision as MixedPrecision,
        TruePrecision as TruePrecision,
    )
else:
    __getattr__, __dir__ = exporter(__name__, "precision")
