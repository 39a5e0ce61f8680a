"""StepModule: lets any method of a model run inside the forward of what a strategy wraps."""

from __future__ import annotations

from typing import Any

from torch import nn


class StepModule(nn.Module):
    """Calls a method of `module`, by name, as its own forward.

    DDP and FSDP act in the forward of the module that they wrap. Wrapping this one, they act around
    `training_step` and whatever else is called, not only around the model's `forward`.

    Args:
        module: the user's.

    Example:
        >>> import torch
        >>> from stratagem.strategies import StepModule
        >>> class Net(torch.nn.Linear):
        ...     def training_step(self, batch):
        ...         return self(batch).square().mean()
        >>> StepModule(Net(2, 1))("training_step", torch.zeros(3, 2)).shape
        torch.Size([])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return `module.<method>(*args, **kwargs)`."""
        if method == "forward":
            return self.module(*args, **kwargs)
        return getattr(self.module, method)(*args, **kwargs)

    # The canonical names are the model's own, without a prefix for this module.
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's parameters with their own names."""
        return self.module.named_parameters(*args, **kwargs)
