"""StepOptions: how optimizer steps are taken, as the Trainer was asked for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal, final

from stratagem.discovery.capabilities import Capabilities
from stratagem.errors import ConfigurationError

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes that torch documents; it may know more."""
_KNOWN = ("backend", "dynamic", "fullgraph", "mode", "options")


@final
@dataclass(frozen=True)
class Compilation:
    """How torch.compile is used on a model.

    Attributes:
        arguments: torch.compile's own: `mode`, `backend`, `dynamic`, `fullgraph`, `options`.

    Example:
        >>> from stratagem.strategies import Compilation
        >>> Compilation.parse({"dynamic": True})
        Compilation(arguments={'dynamic': True})
        >>> Compilation.parse(False) is None
        True
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Any) -> Compilation | None:
        """Return the compilation that `compile=given` requests, or None.

        Args:
            given: False or None; True; a dict of torch.compile's arguments; or a Compilation.

        Raises:
            ConfigurationError: the value has another type, or an unknown argument.
        """
        if given is None or given is False:
            return None
        if given is True:
            return cls()
        if isinstance(given, Compilation):
            return given
        if isinstance(given, str | Mapping) and "step" in given:
            raise ConfigurationError(
                f"compile={given!r}: a whole step is no longer compiled into one graph: pass "
                "compile=True or a dict of torch.compile's arguments, which compile the model"
            )
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"compile={given!r}: expected True, False, or a dict of torch.compile's "
                f"arguments{_meant(given)}"
            )
        if unknown := sorted(map(str, given.keys() - set(_KNOWN))):
            raise ConfigurationError(
                f"compile={dict(given)!r} has {', '.join(unknown)}; expected some of "
                f"{', '.join(_KNOWN)}"
            )
        return cls(arguments=dict(given))

    @property
    def needs_compiler(self) -> bool:
        """Whether code is generated that a C++ compiler builds, for models on the CPU."""
        return bool(self.arguments.get("backend", "inductor") == "inductor")

    def __str__(self) -> str:
        """The argument as it is typed."""
        return f"compile={dict(self.arguments) or True!r}"


def check_compiles(strategy: str, capabilities: Capabilities, compilation: Compilation) -> None:
    """Check that a strategy can have its model compiled.

    Raises:
        ConfigurationError: it cannot.
    """
    if "model" not in capabilities.compiles:
        raise ConfigurationError(
            f"{compilation}: a model under the strategy {strategy!r} cannot be compiled by "
            "torch.compile: leave compile out, or use another strategy such as 'ddp' or 'fsdp'"
        )


def _meant(given: Any) -> str:
    """Return what a string may have been meant for."""
    if not isinstance(given, str):
        return ""
    what = "mode" if given in MODES else "backend"
    return f"; did you mean compile={ {what: given}!r}?"


@final
@dataclass(frozen=True)
class GradientClip:
    """How gradients are clipped before an optimizer step.

    Attributes:
        value: the largest norm, or the largest absolute value of an element.
        algorithm: "norm" or "value".
        norm_type: which norm; 2.0: Euclidean.
        error_if_nonfinite: raise if the norm is NaN or infinite.

    Raises:
        ConfigurationError: `value` is NaN, which would make every gradient NaN.

    Example:
        >>> from stratagem.strategies import GradientClip
        >>> GradientClip(0.5).algorithm
        'norm'
    """

    value: float
    algorithm: Literal["norm", "value"] = "norm"
    norm_type: float = 2.0
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        # Only of a float: a tensor would have to be waited for.
        if isinstance(self.value, float) and math.isnan(self.value):
            raise ConfigurationError(
                f"gradients cannot be clipped to a {self.algorithm} of nan: expected a number of "
                "at least 0"
            )


def gradient_clip(value: float | None, algorithm: str) -> GradientClip | None:
    """Return the options of gradient clipping, or None.

    Args:
        value: the largest norm or value of gradients; None or 0: no clipping.
        algorithm: "norm" or "value".

    Raises:
        ConfigurationError: the algorithm is unknown, or the value is negative or no number.
    """
    if algorithm not in ("norm", "value"):
        raise ConfigurationError(
            f"gradient_clip_algorithm={algorithm!r}: expected 'norm' or 'value'"
        )
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        expected = "a number above 0, or None or 0 for no clipping"
        raise ConfigurationError(f"gradient_clip_val={value!r}: expected {expected}")
    return (
        GradientClip(float(value), "value" if algorithm == "value" else "norm") if value else None
    )


@final
@dataclass(frozen=True)
class StepOptions:
    """How a front end takes its optimizer steps; `Strategy.bind` finds it in the components.

    Attributes:
        clip: how gradients are clipped; None: not at all.
        accumulation: micro-batches in a step, by first epoch.
        sync_batchnorm: whether batch norm layers take their statistics over all ranks.
        compilation: how torch.compile is used; None: not at all.
        activation_checkpointing: the modules that compute their activations again in backward, as
            the `Trainer` describes them; None: no module.

    Example:
        >>> from stratagem.strategies import StepOptions
        >>> StepOptions(accumulation={0: 1, 4: 8}).most_micro_batches
        8
    """

    clip: GradientClip | None = None
    accumulation: Mapping[int, int] = field(default_factory=lambda: {0: 1})
    sync_batchnorm: bool = False
    compilation: Compilation | None = None
    activation_checkpointing: Any = None

    def micro_batches_in(self, epoch: int) -> int:
        """Return the number of micro-batches in a step of an epoch."""
        return self.accumulation[max(first for first in self.accumulation if first <= epoch)]

    def steps_in(self, epochs: int, batches: int) -> int:
        """Return the number of steps in these epochs of this number of batches.

        Example:
            >>> from stratagem.strategies import StepOptions
            >>> StepOptions(accumulation={0: 1, 4: 8}).steps_in(epochs=6, batches=10)
            44
        """
        firsts = [first for first in sorted(self.accumulation) if first < epochs]
        return sum(
            (until - first) * math.ceil(batches / self.accumulation[first])
            for first, until in pairwise([*firsts, epochs])
        )

    @property
    def most_micro_batches(self) -> int:
        """The largest number of micro-batches in a step, in whatever epoch."""
        return max(self.accumulation.values())


def seconds(value: Any, name: str = "max_time") -> float | None:
    """Return a time in seconds, or None.

    Args:
        value: a timedelta, "DD:HH:MM:SS", a dict of timedelta's arguments, seconds, or None.
        name: the name of the value in the error.

    Raises:
        ConfigurationError: the value has another form.

    Example:
        >>> seconds("00:01:00:30")
        3630.0
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    parts = value.split(":") if isinstance(value, str) else []
    try:
        if isinstance(value, Mapping):
            return timedelta(**value).total_seconds()
        if len(parts) == 4 and all(part.isdigit() for part in parts):
            days, hours, minutes, seconds = map(int, parts)
            time = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
            return time.total_seconds()
    except (TypeError, ValueError, OverflowError):
        pass  # other keys or values, or more days than a timedelta holds
    raise ConfigurationError(
        f"{name}={value!r}: expected a timedelta, text of the format DD:HH:MM:SS, a dict of its "
        "arguments, or seconds"
    )
