"""TrainStep: what a front end hands to `Strategy.train_step`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stratagem.plan.step_options import GradientClip


class TrainStep:
    """What one optimizer step consists of; the strategy decides when each part happens.

    For each micro-batch: `forward`, then `before_backward`, `after_backward` around its backward,
    then `after_micro_batch` (for the last one, after the optimizer step). Once, after the last
    backward: `before_optimizer_step`, with gradients unscaled and not yet clipped, and
    `after_optimizer_step`, with gradients not yet cleared.

    A strategy that runs the whole step as one program calls `forward` and `after_micro_batch` if
    it can, and leaves out the events that it has no place for.

    Example:
        >>> import torch
        >>> from stratagem import Lite
        >>> from stratagem.strategies import TrainStep
        >>> lite = Lite(accelerator="cpu")
        >>> lite.launch()
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> prepared = lite.strategy.prepare(net, [torch.optim.SGD(net.parameters(), lr=0.5)])
        >>> class Square(TrainStep):
        ...     def forward(self, micro_batch):
        ...         return prepared.module(micro_batch).square().mean()
        >>> for _ in range(20):
        ...     lite.strategy.train_step(prepared, Square(), [torch.ones(4, 1)])
        >>> abs(net.weight.item()) < 1e-4
        True
    """

    clip: GradientClip | None = None

    def forward(self, micro_batch: Any) -> Tensor | None:
        """Return the micro-batch's loss, a scalar with a gradient; None skips it."""
        raise NotImplementedError

    def before_backward(self, loss: Tensor) -> None:
        """Told the loss before its backward."""

    def after_backward(self) -> None:
        """Told after each backward."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Told when all gradients are there, before they are clipped."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Told after the optimizer step, before gradients are cleared; counts the step."""

    def after_micro_batch(self, micro_batch: Any) -> None:
        """Told when all work on a micro-batch is done."""
