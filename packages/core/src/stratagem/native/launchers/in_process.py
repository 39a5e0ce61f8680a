"""InProcessLauncher: the current process, alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.interfaces.launcher import Launcher, Result
from stratagem.plan.plan import RunPlan


class InProcessLauncher(Launcher):
    """Calls the function here."""

    def launch(
        self, plan: RunPlan, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Return `function(*args, **kwargs)`."""
        return function(*args, **kwargs)
