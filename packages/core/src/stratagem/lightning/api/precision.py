"""Precision by the classes that Lightning has for it."""

from __future__ import annotations

from typing import Any

from stratagem import precision
from stratagem.errors import ConfigurationError


class DoublePrecision(precision.TruePrecision):
    """float64 throughout: "64-true"."""

    def __init__(self) -> None:
        super().__init__("64-true")


class HalfPrecision(precision.TruePrecision):
    """float16 or bfloat16 throughout.

    Args:
        precision: "16-true" or "bf16-true".
    """

    def __init__(self, precision: str = "16-true") -> None:
        super().__init__(precision)


class MixedPrecision(precision.MixedPrecision):
    """float32 parameters, bfloat16 where autocast finds it safe.

    Args:
        precision: "bf16-mixed"; "16-mixed" is given to the Trainer by name.
        device: as Lightning asks for it; the accelerator's is used.
        scaler: for "16-mixed" only.

    Raises:
        ConfigurationError: it is another precision.
    """

    def __init__(self, precision: str, device: str = "cuda", scaler: Any = None) -> None:
        if precision != "bf16-mixed" or scaler is not None:
            raise ConfigurationError(
                f"MixedPrecision({precision!r}, scaler={scaler!r}): expected 'bf16-mixed' and no "
                "scaler; pass precision='16-mixed' to the Trainer or Fabric, in the place of this "
                "object: a GPU's backend scales the loss"
            )
        super().__init__(precision)


def FSDPPrecision(precision: str, scaler: Any = None) -> Any:
    """Return the precision of that name; a sharding strategy needs no other one.

    Raises:
        ConfigurationError: it is none that a class here has, or there is a scaler.
    """
    if precision.endswith("mixed"):
        return MixedPrecision(precision, scaler=scaler)
    return _true(precision)


def _true(name: str) -> Any:
    return precision.TruePrecision(name)
