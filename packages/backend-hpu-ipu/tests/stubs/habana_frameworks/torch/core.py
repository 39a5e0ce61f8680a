"""Lazy mode."""

from __future__ import annotations

from habana_frameworks import torch as sdk


def is_lazy() -> bool:
    return sdk.LAZY


def mark_step(device_str: str = "", sync: bool = False) -> None:
    if not sdk.LAZY:
        raise RuntimeError("mark_step: there are no lazy graphs in eager mode")
    sdk.calls.append(("mark_step", None))
