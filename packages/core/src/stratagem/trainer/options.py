"""What the Trainer's arguments may be, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.train_step import GradientClip
from stratagem.trainer.divergence import DEFAULT_INTERVAL


def check_limit(name: str, limit: int | float | None) -> int | float:
    """Return a limit: a number of batches (int) or a fraction of them (float from 0 to 1).

    Raises:
        ConfigurationError: it is neither.
    """
    if limit is None:
        return 1.0
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise ConfigurationError(
            f"{name}={limit!r}: expected a number of batches (int) or a fraction (float)"
        )
    if isinstance(limit, int) and limit >= 0:
        return limit
    if isinstance(limit, float) and 0.0 <= limit <= 1.0:
        return limit
    raise ConfigurationError(
        f"{name}={limit!r}: expected a number of batches of at least 0 (int), or a fraction from "
        "0.0 to 1.0 (float)"
    )


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name}={value!r}: expected a whole number of at least {least}")


def check_fast_dev_run(value: bool | int) -> int:
    """Return the number of batches of a quick run; 0: none."""
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(
            f"fast_dev_run={value!r}: expected True, False, or a number of batches"
        )
    return int(value)


def check_divergence(value: bool | int) -> int:
    """Return after how many steps ranks are compared; 0: never."""
    if value is True:
        return DEFAULT_INTERVAL
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(
            f"detect_divergence={value!r}: expected True, False, or a number of steps"
        )
    return int(value)


def check_accumulation(value: int | Mapping[int, int]) -> dict[int, int]:
    """Return the number of batches in an optimizer step, by first epoch."""
    schedule = {0: value} if isinstance(value, int) else dict(value)
    for first, count in schedule.items():
        check_whole("accumulate_grad_batches (an epoch)", first, 0)
        check_whole("accumulate_grad_batches", count, 1)
    schedule.setdefault(0, 1)
    return schedule


def gradient_clip(value: float | None, algorithm: str) -> GradientClip | None:
    """Return how to clip, or None."""
    if algorithm not in ("norm", "value"):
        raise ConfigurationError(
            f"gradient_clip_algorithm={algorithm!r}: expected 'norm' or 'value'"
        )
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ConfigurationError(f"gradient_clip_val={value!r}: expected a number above 0, or None")
    return (
        GradientClip(float(value), "value" if algorithm == "value" else "norm") if value else None
    )


def seconds(value: Any) -> float | None:
    """Return max_time in seconds, or None."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return timedelta(**value).total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) == 4 and all(part.isdigit() for part in parts):
        days, hours, minutes, seconds = map(int, parts)
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    raise ConfigurationError(
        f"max_time={value!r}: expected a timedelta, 'DD:HH:MM:SS', a dict of its arguments, or "
        "seconds"
    )


def check_deterministic(value: bool | str) -> bool | str:
    """Return a bool or "warn"; refuse anything else."""
    if value not in (True, False, "warn"):
        raise ConfigurationError(f"deterministic={value!r}: expected True, False or 'warn'")
    return value


def set_determinism(
    accelerator: Accelerator, *, deterministic: bool | str, benchmark: bool
) -> Callable[[], None]:
    """Set torch's modes and the accelerator's; return what restores them."""
    if not deterministic and not benchmark:
        return lambda: None
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    restore_kernels = accelerator.configure_kernels(
        benchmark=benchmark and not deterministic, deterministic=bool(deterministic)
    )
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")

    def restore() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        restore_kernels()

    return restore
