"""Stratagem's backend for DeepSpeed; its plugin module says what it offers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem_deepspeed.fp32_file import (
        convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
    )
else:

    def __getattr__(name: str) -> Any:
        # Lazily: discovery imports this package, and must import no torch.
        if name == "convert_zero_checkpoint_to_fp32_state_dict":
            return getattr(import_module("stratagem_deepspeed.fp32_file"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["convert_zero_checkpoint_to_fp32_state_dict"]
