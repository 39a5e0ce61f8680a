"""From a request to a plan: what runs where, and why. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.plan.cluster import CLUSTER_VARIABLE as CLUSTER_VARIABLE
    from stratagem.plan.components import (
        parse_devices as parse_devices,
        probe_accelerator as probe_accelerator,
    )
    from stratagem.plan.resolution import resolve as resolve
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
