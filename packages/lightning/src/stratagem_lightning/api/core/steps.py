"""Steps that check, count and call hooks as Lightning does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stratagem.errors import UserCodeError
from stratagem.launch import rank_zero_info
from stratagem.trainer import Step
from stratagem_lightning.api.strategies.called import (
    overrides_backward_hooks,
    run_backward,
    scaled_loss,
)

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem.trainer import StepContext


class BackwardStep(Step):
    """A step that calls `pre_backward` and `post_backward` of a strategy around the hooks.

    Args:
        context: the objects of the fit.
    """

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        strategy: Any = context.strategy
        self._strategy = strategy
        vars(strategy).pop("backward", None)
        calls = overrides_backward_hooks(strategy)
        self._calls_around = calls and self.module.automatic_optimization
        if calls and not self._calls_around:
            strategy.backward = partial(run_backward, strategy)
        self._scaled: list[Tensor] = []

    def before_backward(self, loss: Tensor) -> None:
        """Call `pre_backward` with the divided loss, then the hooks."""
        if self._calls_around:
            divided = loss if self.expected == 1 else loss / self.expected
            self.clear_before_backward()
            self._scaled = [scaled_loss(self._strategy, divided)]
            self._strategy.pre_backward(divided)
        super().before_backward(loss)

    def after_backward(self) -> None:
        """Call the hooks, then `post_backward` with the scaled loss."""
        super().after_backward()
        if self._calls_around:
            self._strategy.post_backward(self._scaled.pop().detach())


class FitStep(BackwardStep):
    """A step that checks the results of manual optimization, and passes None without a batch.

    It says once that `should_stop` has to wait for a minimum of training.

    Args:
        context: the objects of the fit.
    """

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self._has_said_that_a_stop_waits = False
        self._hooks_of_end = self.on_batch_end
        self.on_batch_end = (self._call_hooks_of_end,) if self._hooks_of_end else ()

    def _call_hooks_of_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call `on_train_batch_end`, with None as outputs if the loader yielded None as a batch."""
        for hook in self._hooks_of_end:
            hook(None if batch is None else outputs, batch, batch_idx)

    def finish(self) -> None:
        """End the step.

        Raises:
            UserCodeError: in manual optimization, `training_step` returned something else than a
                tensor, a mapping or None.
        """
        if not self.module.automatic_optimization:
            self._check_manual_outputs()
        super().finish()
        if self.state.stop_requests and not self._has_said_that_a_stop_waits:
            self._say_if_a_stop_waits()

    def _check_manual_outputs(self) -> None:
        outputs = self.outputs
        if outputs is not None and not isinstance(outputs, (torch.Tensor, Mapping)):
            raise UserCodeError(
                f"{type(self.module).__name__}.training_step returned a {type(outputs).__name__}: "
                "in manual optimization it must return a Tensor or have no return"
            )

    def _say_if_a_stop_waits(self) -> None:
        if self.context.limits.has_minimum(self.state):
            return
        self._has_said_that_a_stop_waits, options = True, self.context.trainer.options
        rank_zero_info(
            "Trainer was signaled to stop but the required "
            f"`min_epochs={options.min_epochs or None}` or "
            f"`min_steps={options.min_steps or None}` has not been met. Training will "
            "continue until it is"
        )
