"""The hooks of a Module that do a piece of the optimizer step; the base does what the Trainer does.

So an override may call `super()` for the rest. The Trainer calls them where one is overridden, and
otherwise does the same by a shorter way.
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
    """What a Module may do of an optimizer step itself, and what it does that with.

    With automatic optimization, where one of `optimizer_step`, `optimizer_zero_grad`, `backward`
    and `configure_gradient_clipping` is overridden, each step goes in this order:
        1. `on_train_batch_start`.
        2. `optimizer_step`, around what follows; with accumulation in the last batch only.
        3. `training_step`.
        4. `on_before_zero_grad`, `optimizer_zero_grad`; in the first of accumulated batches only.
        5. `on_before_backward`, `backward`, `on_after_backward`.
        6. `on_before_optimizer_step`, `configure_gradient_clipping`, the optimizer's own step.
        7. `lr_scheduler_step`, of schedulers that step by steps; `on_train_batch_end`.

    With manual optimization only `backward` is called, by `manual_backward`.
    """

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step the optimizer; only with automatic optimization.

        An override calls the closure, by itself or through `optimizer.step`. Each call counts as
        one step, `Trainer.global_step`, also if it does not step the optimizer.

        Args:
            epoch: counted from 0.
            batch_idx: of the last batch of the step.
            optimizer: its `step` goes through the strategy; hooks and clipping come before.
            optimizer_closure: computes loss and gradients, and returns the loss.

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
        """Clear the gradients before a step's first backward; only with automatic optimization."""
        optimizer.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from `loss`, scaled if the precision does that."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients, unscaled by now, with the Trainer's options."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler with the value that it monitors; None: it monitors none."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- to be called

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters through the strategy.

        Args:
            optimizer: one of the Module's.
            gradient_clip_val: largest norm or value; None: the Trainer's; 0: nothing is clipped.
            gradient_clip_algorithm: "norm" or "value"; None: the Trainer's.

        Raises:
            ConfigurationError: the strategy's engine clips itself.
            UserCodeError: the Trainer was asked for something else.
        """
        trainer: Any = self.trainer
        asked = trainer.step_options.clip
        if trainer.plan.capabilities.engine_clips:
            raise ConfigurationError(
                f"the strategy {trainer.plan.strategy.name!r} clips gradients itself: pass "
                "gradient_clip_val to the Trainer in place of calling clip_gradients()"
            )
        for name, value, of_trainer in (
            ("gradient_clip_val", gradient_clip_val, trainer.gradient_clip_val),
            ("gradient_clip_algorithm", gradient_clip_algorithm, trainer.gradient_clip_algorithm),
        ):
            if asked is not None and value is not None and value != of_trainer:
                raise UserCodeError(
                    f"self.clip_gradients({name}={value!r}) and Trainer({name}={of_trainer!r}) "
                    "differ: pass it to one of them only"
                )
        clip = asked or gradient_clip(gradient_clip_val, gradient_clip_algorithm or "norm")
        if clip is None:
            return
        inner = getattr(optimizer, "optimizer", optimizer)
        strategy = trainer.strategy
        # With automatic optimization that is done before the hooks.
        if strategy.precision.scales_loss and not self.automatic_optimization:
            strategy.precision.unscale_gradients(inner)
        strategy.clip_gradients(trainer.run.require_prepared(), inner, clip)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients, of those of all optimizers.

        For several optimizers in manual optimization; `untoggle_optimizer` restores the others.
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
        """Let parameters require gradients again as before `toggle_optimizer`."""
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
