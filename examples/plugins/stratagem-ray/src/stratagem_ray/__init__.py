"""Ray for Stratagem: `Trainer(strategy="ddp", plugins="ray", accelerator="cpu", devices=2)`.

`RayLauncher(...)` in the place of the name takes options.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem_ray.environment import RayEnvironment as RayEnvironment
    from stratagem_ray.launcher import RayLauncher as RayLauncher
else:
    # When they are used: importing `plugin` imports this module, and has to be quick.
    _HOMES = {"RayEnvironment": "environment", "RayLauncher": "launcher"}

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'stratagem_ray' has no attribute {name!r}")
        return getattr(importlib.import_module(f"stratagem_ray.{_HOMES[name]}"), name)


__all__ = ["RayEnvironment", "RayLauncher"]
