"""The states of all random numbers of a process, as plain data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the devices' random numbers.

    NumPy's is there if NumPy is imported, the devices' if they are in use. A generator that user
    code has made for itself is not.

    Example:
        >>> import torch
        >>> state = random_state()
        >>> first = torch.rand(1)
        >>> set_random_state(state)
        >>> bool(torch.rand(1) == first)
        True
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        # As a tensor: an array of NumPy's is no plain data.
        keys = torch.from_numpy(keys.astype("int64"))
        state["numpy"] = [kind, keys, int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = state["numpy"]
        words = keys.numpy().astype("uint32")
        sys.modules["numpy"].random.set_state((kind, words, position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
