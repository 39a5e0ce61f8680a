"""InProcessLauncher and ExternalLauncher, which start no process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.interfaces.launcher import Launcher, Result
from stratagem.launch.rank import run_as_rank
from stratagem.plan.plan import RunPlan


class InProcessLauncher(Launcher):
    """Calls the function here."""

    def launch(
        self, plan: RunPlan, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Return `function(*args, **kwargs)`."""
        return function(*args, **kwargs)


class ExternalLauncher(Launcher):
    """Calls the function in this process, which is already a rank."""

    def launch(
        self, plan: RunPlan, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Return `function(*args, **kwargs)`; an exception is reported to who started this rank."""
        return run_as_rank(function, *args, **kwargs)
