"""OptimizerInBackward: a parameter is stepped as soon as its gradient is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from stratagem.module import Module
    from stratagem.trainer import Trainer

_HOOKS_OF_CALLBACKS = "on_before_optimizer_step", "on_before_zero_grad", "on_after_backward"
_HOOKS_OF_GRADIENTS = (
    *_HOOKS_OF_CALLBACKS,
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
)


class OptimizerInBackward(Callback):
    """Steps each parameter within the backward pass, and then frees its gradient.

    The gradients of the whole model are not held together. The numbers, the optimizer's state and
    its checkpoints equal a fit without the callback, and schedulers work as usual.

    One device, and strategies that shard parameters in backward (fsdp, a mesh), step a parameter
    when its gradient is complete. Options by which a step depends on all gradients, or on a later
    moment, are refused when a fit begins: accumulation, gradient clipping, loss scaling (16-mixed),
    manual optimization (and with it several optimizers), hooks that read gradients, ddp, which
    averages gradients after backward, and DeepSpeed, which takes the steps in its engine.

    Raises:
        ConfigurationError: when a fit begins, for such an option; the message names it.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import OptimizerInBackward
        >>> trainer = Trainer(callbacks=OptimizerInBackward(), logger=False)
        >>> any(isinstance(callback, OptimizerInBackward) for callback in trainer.callbacks)
        True
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Check the options of the fit, then set the hooks of the parameters."""
        if why := _obstacle(trainer, module):
            raise ConfigurationError(f"OptimizerInBackward steps each parameter in backward: {why}")
        (optimizer,) = trainer.run.require_prepared().optimizers
        is_alone = trainer.world_size == 1
        stepper = _Stepper(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # The gradients of parameters that stay whole are averaged after backward.
                if is_alone or isinstance(parameter, DTensor):
                    hook = parameter.register_post_accumulate_grad_hook(stepper)
                    self._handles.append(hook)

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """Remove the hooks."""
        self._remove()

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Remove the hooks."""
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Stepper:
    """Steps one parameter of an optimizer and clears its gradient.

    Args:
        optimizer: it treats each parameter by itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = []
        self._group_of: dict[int, dict[str, Any]] = {}

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        if groups is not self._groups:
            self._groups = groups
            self._group_of = {id(p): group for group in groups for p in group["params"]}
        optimizer.param_groups = [{**self._group_of[id(parameter)], "params": [parameter]}]
        try:
            # Of the class: a scheduler counts the calls of the instance's own `step`.
            type(optimizer).step(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None


def _obstacle(trainer: Trainer, module: Module) -> str:
    """Return why steps in backward would not be those of the whole optimizer, or ""."""
    prepared, options = trainer.run.require_prepared(), trainer.options.step_options
    name = trainer.plan.strategy.name
    if trainer.plan.capabilities.engine_steps:
        return f"the engine of strategy={name!r} takes the steps. Use 'fsdp' or one device"
    if not module.automatic_optimization:
        return "automatic_optimization = False calls the optimizer itself. Leave the callback out"
    if any(count > 1 for count in dict(options.accumulation).values()):
        return (
            "gradients that are accumulated over batches are complete after the last of them. "
            "Leave accumulate_grad_batches out"
        )
    if options.clip is not None:
        return "clipping needs all gradients at once. Leave gradient_clip_val out"
    if trainer.strategy.precision.scales_loss:
        return (
            "a scaled loss needs all gradients for the check of overflows. Use "
            "precision='bf16-mixed'"
        )
    (optimizer,) = prepared.optimizers  # automatic optimization has one
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or isinstance(optimizer, LBFGS):
        return (
            f"{kind.__module__}.{kind.__qualname__} is not known to step each parameter by itself. "
            "Use an optimizer of torch.optim, except LBFGS"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"the {kind.__name__} has hooks of step(), which would be called for each parameter"
    if hooks := [hook for hook in _HOOKS_OF_GRADIENTS if module.defines(hook)]:
        return (
            f"{type(module).__name__}.{hooks[0]} works on gradients after backward, and they are "
            "freed by then. Leave it or the callback out"
        )
    for callback in trainer.callbacks:
        for hook in _HOOKS_OF_CALLBACKS:
            if getattr(type(callback), hook) is not getattr(Callback, hook):
                return (
                    f"{type(callback).__name__}.{hook} would find no gradients, since they are "
                    "freed by then. Leave it or the callback out"
                )
    if trainer.world_size > 1 and not any(
        isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]
    ):
        return (
            f"strategy={name!r} averages gradients over ranks after they are computed. Use 'fsdp', "
            "which averages them before"
        )
    return ""
