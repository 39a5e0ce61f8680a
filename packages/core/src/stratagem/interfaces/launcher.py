"""Launcher: how the processes of one node come to be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from stratagem.plan.plan import RunPlan

Result = TypeVar("Result")


class Launcher(ABC):
    """Makes a function run on every rank of this node.

    Call sequence: `launch(plan, function)` in the process that the user started, and, where ranks
    run the script again, in each of them. When it calls `function`, the cluster environment tells
    the right rank and world size. It may be called several times in one process.
    """

    @abstractmethod
    def launch(
        self, plan: RunPlan, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Run `function(*args, **kwargs)` on every rank; return what it returns on this one.

        Raises:
            RankFailedError: another rank ended with an error; names it and holds its traceback.
        """
