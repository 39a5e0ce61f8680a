"""PyTorch/XLA itself: imported once its version is checked, and told how to log."""

from __future__ import annotations

import os
import sys
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem_xla.installation import availability, version_problem


def import_torch_xla() -> Any:
    """Return the package `torch_xla`.

    Raises:
        ConfigurationError: torch_xla is missing, does not fit torch, or has no configured device.
    """
    there = sys.modules.get("torch_xla")
    if there is not None:
        return there
    problem = version_problem()
    if not problem:
        found = availability()
        problem = "" if found.count else found.reason
    if problem:
        raise ConfigurationError(f"PyTorch/XLA cannot be used here: {problem}")
    # Below level 2, XLA warns at each compilation about the successor of its partitioner.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import torch_xla

    return torch_xla


def start_spmd() -> None:
    """Let all devices of this process act as one, which compiled programs are divided over.

    Raises:
        ConfigurationError: a device is in use already, by itself.
    """
    torch_xla = import_torch_xla()
    if torch_xla.runtime.is_spmd():
        return
    if torch_xla._XLAC._xla_get_spmd_config_is_locked():
        raise ConfigurationError(
            "this process has used an XLA device by itself already (strategy 'single_xla', or a "
            "tensor that was put there), and tensors there cannot be divided any more: use one of "
            "the two in a process, and put no tensor on a device before the launch"
        )
    torch_xla.runtime.use_spmd()


def check_no_spmd() -> None:
    """Raise if a single device is used while all devices act as one (SPMD).

    Raises:
        ConfigurationError: this process has used a strategy for all devices.
    """
    if import_torch_xla().runtime.is_spmd():
        raise ConfigurationError(
            "this process has used all XLA devices as one already (strategy 'xla' or 'xla_fsdp'), "
            "so that 'single_xla' has none of its own: use one of the two in a process"
        )
