"""The names that TPUs had before they were XLA devices."""

from __future__ import annotations

from functools import partial

from stratagem import accelerators, strategies
from stratagem_lightning.api.instance_check import renamed
from stratagem_lightning.api.plugins.torch_xla import require_torch_xla

TPUAccelerator = renamed(
    "TPUAccelerator", accelerators.XLAAccelerator, partial(require_torch_xla, "TPUAccelerator")
)
SingleTPUStrategy = renamed(
    "SingleTPUStrategy",
    strategies.SingleXLAStrategy,
    partial(require_torch_xla, "SingleTPUStrategy"),
)
