"""TrainStep: what a front end hands to `Strategy.train_step`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stratagem.plan.step_options import GradientClip


class TrainStep:
    """What one optimizer step consists of; the strategy decides when each piece happens.

    For each micro-batch, in this order:
        1. `begin(micro_batch)`, once: converts it, and calls the hooks of its start.
        2. `loss(batch, converted=True)` of what `begin` returned; or several times, of parts of it,
           or not at all on a rank that has no loss to compute (a stage of a pipeline).
        3. `before_backward(loss)` and `after_backward()`, around each backward.
        4. `end(micro_batch)`, once.

    Then once, after the last backward: `before_optimizer_step`, with gradients unscaled and not yet
    clipped, and `after_optimizer_step`, with gradients not yet cleared (or, where loss scaling left
    the step out, `optimizer_step_was_skipped`). `Strategy.accumulate_all`
    does the first part, `Strategy.finish_step` the second.

    A strategy that runs the whole step as one program calls `begin` and `end` of each micro-batch,
    `after_optimizer_step`, and leaves out the hooks that it has no place for.

    Attributes:
        clip: how gradients are to be clipped; None: not at all.

    Example:
        >>> import torch
        >>> from stratagem import Lite
        >>> from stratagem.strategies import TrainStep
        >>> lite = Lite(accelerator="cpu")
        >>> lite.launch()
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> prepared = lite.strategy.prepare(net, [torch.optim.SGD(net.parameters(), lr=0.5)])
        >>> class Square(TrainStep):
        ...     def loss(self, part, *, converted=False):
        ...         return prepared.module(part).square().mean()
        >>> for _ in range(20):
        ...     lite.strategy.train_step(prepared, Square(), [torch.ones(4, 1)])
        >>> abs(net.weight.item()) < 1e-4
        True
    """

    clip: GradientClip | None = None

    def begin(self, micro_batch: Any) -> Any:
        """Return the micro-batch on the device, converted, after the hooks of its start."""
        return micro_batch

    def loss(self, part: Any, *, converted: bool = False) -> Tensor | None:
        """Return the loss of a micro-batch or of a part of it; calls user code and no hooks.

        It can be called again, for parts of a micro-batch or to learn shapes. What user code logs
        counts between `begin` and `end` only.

        Args:
            part: a micro-batch, or some of its samples.
            converted: whether it comes from what `begin` returned.

        Returns:
            A scalar with a gradient; None skips the micro-batch.
        """
        raise NotImplementedError

    def end(self, micro_batch: Any) -> None:
        """Called when all work on a micro-batch is done, but for the optimizer step."""

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss before its backward."""

    def after_backward(self) -> None:
        """Called after each backward."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called when all gradients are there, before they are clipped."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer step, before gradients are cleared; counts the step."""

    def optimizer_step_was_skipped(self, optimizer: Optimizer) -> None:
        """Called in the place of `after_optimizer_step` where loss scaling left the step out."""
