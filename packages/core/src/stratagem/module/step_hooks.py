"""The hooks of a Module that run a part of the optimizer step.

Their defaults do the same as the Trainer, so an override may call `super()` for the rest. The
Trainer calls these hooks if a Module overrides one, or if the optimizer needs a closure, as LBFGS
does; otherwise it takes a faster path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.plan.step_options import gradient_clip


class StepHooks(nn.Module):
    """Hooks with which a Module customizes the optimizer step, and methods for use in them.

    With automatic optimization, if `optimizer_step`, `optimizer_zero_grad`, `backward` or
    `configure_gradient_clipping` is overridden, each step runs in this order:
        1. `on_train_batch_start`.
        2. `optimizer_step`, around the calls 3 to 6; with accumulation, only in the last batch.
        3. `training_step`.
        4. `on_before_zero_grad`, `optimizer_zero_grad`; with accumulation, only in the first batch.
        5. `on_before_backward`, `backward`, `on_after_backward`.
        6. `on_before_optimizer_step`, `configure_gradient_clipping`, the optimizer's own step.
        7. `lr_scheduler_step`, for schedulers with the interval "step"; `on_train_batch_end`.

    With manual optimization, only `backward` is called, by `manual_backward`.
    """

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step the optimizer; called only with automatic optimization.

        An override has to call the closure, directly or through `optimizer.step`. Each call of this
        hook adds 1 to `Trainer.global_step`, even if it does not step the optimizer. A call without
        a loss, or with a step that loss scaling skipped, does not count.

        Args:
            epoch: the current epoch, counted from 0.
            batch_idx: the index of the last batch of the step.
            optimizer: the optimizer. Its `step` runs hooks and gradient clipping, and then steps
                through the strategy.
            optimizer_closure: a function that computes the loss and gradients, and returns the
                loss.

        Example:
            >>> import torch
            >>> from stratagem import Module
            >>> class WarmsUp(Module):
            ...     def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            ...         for group in optimizer.param_groups:
            ...             group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 500)
            ...         super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Clear the gradients before a step's first backward pass; for automatic optimization."""
        optimizer.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass from `loss`, which the precision may have scaled."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients, which are already unscaled, with the Trainer's options."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler; `metric` is the value that it monitors, if any."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- methods to call

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters through the strategy.

        Args:
            optimizer: an optimizer of this Module.
            gradient_clip_val: the largest norm or value; 0 disables clipping. Default: the
                Trainer's.
            gradient_clip_algorithm: "norm" or "value". Default: the Trainer's.

        Raises:
            ConfigurationError: if the strategy's engine clips gradients itself.
            UserCodeError: if the Trainer's options differ from these.
        """
        trainer: Any = self.trainer
        own = trainer.options.step_options.clip
        if trainer.plan.capabilities.engine_clips:
            raise ConfigurationError(
                f"the strategy {trainer.plan.strategy.name!r} clips gradients itself: pass "
                "gradient_clip_val to the Trainer in place of calling clip_gradients()"
            )
        requested = {
            "gradient_clip_val": (gradient_clip_val, getattr(own, "value", None)),
            "gradient_clip_algorithm": (gradient_clip_algorithm, getattr(own, "algorithm", None)),
        }
        for name, (value, of_trainer) in requested.items():
            if own is not None and value is not None and value != of_trainer:
                raise UserCodeError(
                    f"self.clip_gradients({name}={value!r}) and Trainer({name}={of_trainer!r}) "
                    "differ: pass it to one of them only"
                )
        clip = own or gradient_clip(gradient_clip_val, gradient_clip_algorithm or "norm")
        if clip is None:
            return
        inner = getattr(optimizer, "optimizer", optimizer)
        strategy = trainer.strategy
        # With automatic optimization, gradients are unscaled before the hooks.
        if strategy.precision.scales_loss and not self.automatic_optimization:
            strategy.precision.unscale_gradients(inner)
        strategy.clip_gradients(trainer.run.require_prepared(), inner, clip)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Turn gradients off for all parameters that only other optimizers update.

        This is for manual optimization with several optimizers. `untoggle_optimizer` restores the
        parameters.
        """
        trainer: Any = self.trainer
        before = self.__dict__.setdefault("_untoggled", {})
        for one in trainer.optimizers:
            for parameter in _parameters(one):
                before.setdefault(parameter, parameter.requires_grad)
                parameter.requires_grad = False
        for parameter in _parameters(optimizer):
            parameter.requires_grad = before[parameter]

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Restore the `requires_grad` of parameters from before `toggle_optimizer`."""
        for parameter, required in self.__dict__.pop("_untoggled", {}).items():
            parameter.requires_grad = required

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Toggle an optimizer within this context.

        Example:
            >>> from stratagem import Module
            >>> class Two(Module):
            ...     automatic_optimization = False
            ...     def training_step(self, batch, batch_idx):
            ...         for optimizer in self.optimizers():
            ...             with self.toggled_optimizer(optimizer):
            ...                 self.manual_backward(self(batch).mean())
            ...                 optimizer.step()
            ...                 optimizer.zero_grad()
        """
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
