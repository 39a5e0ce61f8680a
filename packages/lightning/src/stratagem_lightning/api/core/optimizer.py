"""LightningOptimizer: an optimizer as hooks get it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from stratagem.runtime import LiteOptimizer
from stratagem_lightning.api.instance_check import InstanceCheck


class LightningOptimizer(metaclass=InstanceCheck):
    """An optimizer within a run; outside of one, a view of an optimizer.

    A view has the optimizer's class, state and groups, and steps it.

    Args:
        optimizer: the user's.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> view = LightningOptimizer(optimizer)
        >>> optimizer.param_groups[0]["lr"] = 0.5
        >>> view.param_groups[0]["lr"], isinstance(view, torch.optim.SGD)
        (0.5, True)
    """

    is_instance = staticmethod(lambda one: isinstance(one, (LiteOptimizer, _View)))

    def __new__(cls, optimizer: Optimizer) -> Any:
        """Return the view."""
        kind = type(optimizer)
        view: Any = type(f"Lightning{kind.__name__}", (_View, kind), {})
        made = object.__new__(view)
        object.__setattr__(made, "optimizer", optimizer)
        return made


class _View:
    """Reads, sets and calls what the optimizer has."""

    optimizer: Optimizer

    def __getattribute__(self, name: str) -> Any:
        if name in ("optimizer", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.optimizer, name, value)
