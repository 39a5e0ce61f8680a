"""The device."""

from __future__ import annotations

import torch

from habana_frameworks import torch as sdk


def is_available() -> bool:
    return True


def device_count() -> int:
    return 2


def get_device_name(device: object = None) -> str:
    return "GAUDI2"


def synchronize() -> None:
    torch.accelerator.synchronize()
    sdk.calls.append(("synchronize", None))


def memory_stats(device: object = None) -> dict[str, int]:
    if not sdk.is_acquired():
        raise RuntimeError("memory_stats: no device is acquired")
    stats = torch.accelerator.memory_stats(0)
    in_use = stats["allocated_bytes.all.current"]
    most = stats["allocated_bytes.all.peak"]
    return {"Limit": 96 * 2**30, "InUse": in_use, "MaxInUse": most, "NumAllocs": 7}
