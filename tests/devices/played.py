"""torch.mps and torch.xpu, played: the simulated device with the functions of torch's own modules.

The device's module keeps only names that `torch.mps` or `torch.xpu` has, and a call must fit the
signature that torch's function has. `mps` and `xpu` make the accelerators of our distributions for
this device.
"""

from __future__ import annotations

import functools
import inspect
import platform
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import simulated
import torch
from simulated.process_group import BACKEND, register
from torch.overrides import TorchFunctionMode

from stratagem.discovery import Availability
from stratagem_mps.accelerator import MPSAccelerator
from stratagem_xpu.accelerator import XPUAccelerator

ASKED_BY_TORCH = {
    *("_is_in_bad_fork", "_lazy_init", "manual_seed_all", "get_amp_supported_dtype"),
    *("current_device", "device", "set_device"),
}
"""Names that torch itself looks up in the module of a device that it does not know."""


def enforcing(real: Callable[..., Any], play: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that refuses arguments that the real function does not take."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def played(*args: Any, **options: Any) -> Any:
        signature.bind(*args, **options)
        return play(*args, **options)

    return played


def play(real: types.ModuleType, further: dict[str, Callable[..., Any]]) -> None:
    """Make the simulated device's module one like `real`, with further functions of it."""
    module = simulated.load()
    for name, function in {**vars(module), **further}.items():
        if name in ASKED_BY_TORCH or name.startswith("__"):
            continue
        ours = getattr(real, name, None)
        if ours is None:
            assert name not in further, f"{real.__name__} has no {name}"
            delattr(module, name)
        elif callable(function) and not isinstance(ours, type):
            setattr(module, name, enforcing(ours, function))
    dtypes = [torch.bfloat16, torch.float16]
    setattr(module, "get_amp_supported_dtype", lambda: dtypes)  # noqa: B010 - a module of any kind


class NoFloat64(TorchFunctionMode):
    """Refuses tensors of float64 on the device, as torch does for Metal."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_wide = isinstance(result, torch.Tensor) and result.dtype is torch.float64
        if is_wide and result.device.type == simulated.NAME:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
                "float64. Please use float32 instead."
            )
        return result


class PlayedMPS(MPSAccelerator):
    """The accelerator of stratagem-backend-mps for the simulated device, of which it sees one."""

    def availability(self) -> Availability:
        """Return one device."""
        return Availability(1, "a played Mac")


class PlayedXPU(XPUAccelerator):
    """The accelerator of stratagem-backend-xpu for the simulated devices."""

    process_group_backend = BACKEND


@functools.cache
def _played_mps() -> None:
    def allocated() -> int:
        stats: dict[str, Any] = torch.accelerator.memory_stats(0)
        return int(stats.get("allocated_bytes.all.current", 0))

    play(
        torch.mps,
        {
            "current_allocated_memory": allocated,
            "driver_allocated_memory": lambda: allocated() + 2**20,
            "recommended_max_memory": lambda: torch.ops.simulated.memory_limit(0),
        },
    )
    refusing: Any = NoFloat64()
    refusing.__enter__()
    setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))  # noqa: B010 - typed


@functools.cache
def _played_xpu() -> None:
    def properties(device: Any = None) -> Any:
        return SimpleNamespace(total_memory=torch.ops.simulated.memory_limit(device.index))

    play(torch.xpu, {"get_device_properties": properties})
    register(simulated.NAME)


def mps() -> PlayedMPS:
    """Return the accelerator `mps` on the simulated device."""
    _played_mps()
    return PlayedMPS(simulated.NAME)


def xpu() -> PlayedXPU:
    """Return the accelerator `xpu` on the simulated devices."""
    _played_xpu()
    return PlayedXPU(simulated.NAME)
