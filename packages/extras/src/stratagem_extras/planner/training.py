"""The training run of a plan: batch, loss and optimizer of a model without a Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from stratagem.discovery import nearest_of
from stratagem.errors import ConfigurationError, format_text


def first_batch(batch: Any) -> Any:
    """Return a batch, or the first batch of a loader.

    Raises:
        ConfigurationError: the loader is empty.
    """
    if isinstance(batch, (Tensor, Mapping, Sequence)) or not isinstance(batch, Iterable):
        return batch
    with _disable_current_modes():  # a loader reads values
        for first in batch:
            return first
    raise ConfigurationError(f"batch={type(batch).__name__}: expected a loader with a batch in it")


def default_loss(module: nn.Module, batch: Any) -> Tensor:
    """Return the tensor of a model's output that a step calls backward on.

    Raises:
        ConfigurationError: the model returns no tensor.
    """
    if callable(step := getattr(module, "training_step", None)):
        for name in ("log", "log_dict"):
            setattr(module, name, _nothing)
        result = step(batch, 0) if len(inspect.signature(step).parameters) > 1 else step(batch)
        return result["loss"] if isinstance(result, dict) else result  # type: ignore[no-any-return]
    if isinstance(batch, dict):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, (tuple, list)) else module(batch)
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return loss
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    trained = next((leaf for leaf in leaves if leaf.requires_grad), None)
    if trained is None:
        found = "no tensor"
        if leaves:
            kinds = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
            found = f"no tensor from which gradients flow back, only {kinds}"
        raise ConfigurationError(
            f"{type(module).__name__} returned {format_text(type(output).__name__, 80)} with "
            f"{found}, so that a plan knows no loss: let training_step return the loss, or pass "
            "loss=..., a function of the model and a batch, to plan_memory"
        )
    return trained.float().mean()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for `log`, since no Trainer is there."""


def optimizer_maker(
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] | None,
) -> Callable[[nn.Module], Optimizer]:
    """Return a function that makes a model's optimizer; `optimizer` is as for `plan_memory`.

    Raises:
        ConfigurationError: torch.optim has no class of this name.
    """
    if optimizer is None:
        return _own_optimizer
    if isinstance(optimizer, str):
        known = {
            name.casefold(): value
            for name, value in vars(torch.optim).items()
            if isinstance(value, type) and issubclass(value, Optimizer)
        }
        found = known.get(optimizer.casefold())
        if found is None:
            near = nearest_of(optimizer, [c.__name__ for c in known.values()])
            raise ConfigurationError(
                f"optimizer={optimizer!r}: expected a class of torch.optim, such as 'AdamW', or a "
                "function of the parameters" + (f". Did you mean {near!r}?" if near else "")
            )
        make: Callable[..., Optimizer] = found
    else:
        make = optimizer
    return lambda module: _known_steps(make([p for p in module.parameters() if p.requires_grad]))


def _known_steps(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with a step that a plan can run.

    Raises:
        ConfigurationError: the step calls the model itself, as LBFGS does.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return optimizer
    kept = ""
    if copies := 2 * optimizer.defaults.get("history_size", 0):
        kept = f", and add its history, which grows to {copies} times the size of the parameters"
    raise ConfigurationError(
        f"{type(optimizer).__name__} runs the model several times in each step, which a plan does "
        f"not follow: plan with optimizer='SGD'{kept}"
    )


def _own_optimizer(module: nn.Module) -> Optimizer:
    """Return the first optimizer of `configure_optimizers`, or AdamW where there is none."""
    try:
        configured: Any = getattr(module, "configure_optimizers", list)()
    except NotImplementedError:
        configured = None  # a Module without optimizers
    while isinstance(configured, (list, tuple, dict)) and configured:
        configured = configured["optimizer"] if isinstance(configured, dict) else configured[0]
    if isinstance(configured, Optimizer):
        return _known_steps(configured)
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
