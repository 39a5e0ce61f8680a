"""SkippedInit: builds a model without the first values of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class SkippedInit(TorchFunctionMode):
    """A context in which functions of `torch.nn.init` return their tensor as it is.

    Parameters hold whatever is in their memory, and no random number is drawn: for a model whose
    weights are loaded next.

    Example:
        >>> import torch
        >>> state = torch.get_rng_state()
        >>> with SkippedInit():
        ...     layer = torch.nn.Linear(4, 4)
        >>> torch.equal(torch.get_rng_state(), state)
        True
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call any other function."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
