"""Ray for Stratagem: `Trainer(strategy="ddp", plugins="ray", accelerator="cpu", devices=2)`.

`RayLauncher(...)` in the place of the name takes options.
"""

from stratagem_ray.environment import RayEnvironment
from stratagem_ray.launcher import RayLauncher

__all__ = ["RayEnvironment", "RayLauncher"]
