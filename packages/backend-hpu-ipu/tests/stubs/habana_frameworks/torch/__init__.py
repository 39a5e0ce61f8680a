"""Importing it makes `hpu` a device of torch's, in the mode that the environment says."""

from __future__ import annotations

import os
from typing import Any

import simulated
import torch

LAZY = os.environ.get("PT_HPU_LAZY_MODE", "1") == "1"
"""Read once."""

calls: list[tuple[str, Any]] = []
"""What was called, in order."""

simulated.load("hpu")


def is_acquired() -> bool:
    """Whether the process has taken its device: it does so with the first tensor there."""
    return bool(torch.ops.simulated.is_initialized())
