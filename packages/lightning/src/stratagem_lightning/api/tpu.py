"""The names that TPUs had before they were XLA devices."""

from __future__ import annotations

from functools import partial
from typing import Any

from stratagem import accelerators, strategies
from stratagem_lightning.api.instance_check import renamed
from stratagem_lightning.api.plugins.torch_xla import require_torch_xla

# Served by the backend that provides them; without it, their names are placeholders.
_Accelerator: Any = accelerators.XLAAccelerator  # type: ignore[attr-defined]
_Strategy: Any = strategies.SingleXLAStrategy  # type: ignore[attr-defined]
TPUAccelerator = renamed(
    "TPUAccelerator", _Accelerator, partial(require_torch_xla, "TPUAccelerator")
)
SingleTPUStrategy = renamed(
    "SingleTPUStrategy",
    _Strategy,
    partial(require_torch_xla, "SingleTPUStrategy"),
)
