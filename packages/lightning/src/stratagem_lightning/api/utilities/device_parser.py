"""Which GPUs a number, a list or a text means, as Lightning reads it."""

from __future__ import annotations

import torch

from stratagem.errors import ConfigurationError
from stratagem_lightning.api.utilities.exceptions import UserTypeError


def parse_gpu_ids(
    gpus: int | str | list[int] | None, include_cuda: bool = False, include_mps: bool = False
) -> list[int] | None:
    """Return the indices of GPUs, or None for no GPU.

    Args:
        gpus: a number of GPUs, -1 for all, a list of indices, or such a value as text.
        include_cuda: look for NVIDIA's GPUs.
        include_mps: look for Apple's GPU.

    Raises:
        UserTypeError: `gpus` has another type.
        ConfigurationError: a text has no numbers, this machine does not have these GPUs, or an
            index is repeated.

    Example:
        >>> parse_gpu_ids(0), parse_gpu_ids("0")
        (None, None)
    """
    if isinstance(gpus, bool) or not isinstance(gpus, (int, str, list, tuple, type(None))):
        raise UserTypeError(
            f"gpus={gpus!r}: expected a number of GPUs, -1, a list of their indices, or a text "
            "with one of these"
        )
    if gpus is None or gpus == 0 or str(gpus).strip() in ("0", "[]"):
        return None
    there = list(range(torch.cuda.device_count())) if include_cuda else []
    if include_mps and torch.backends.mps.is_available():
        there = there or [0]
    try:
        wanted = _indices(gpus, there)
    except (IndexError, ValueError):
        raise ConfigurationError(
            f"gpus={gpus!r}: expected a number of GPUs, -1, or indices such as '0,1'"
        ) from None
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(there):
        raise ConfigurationError(
            f"You requested gpus={gpus!r}, and this machine has {there or 'none'}: expected each "
            "of these at most once; accelerator='auto', devices='auto' takes what is there"
        )
    return wanted


def _indices(gpus: int | str | list[int] | tuple[int, ...], there: list[int]) -> list[int]:
    if isinstance(gpus, str):
        parts = [int(part) for part in gpus.split(",") if part.strip()]
        gpus = parts if "," in gpus else parts[0]
    if isinstance(gpus, int):
        return there if gpus == -1 else list(range(gpus))
    return list(gpus)
