"""MicroBatch: a micro-batch of an optimizer step that may overlap with others."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem.errors import PluginError
from stratagem.interfaces.stepping import TrainStep


class MicroBatch:
    """A micro-batch of an optimizer step that may overlap with others; see `TrainStep.open`.

    A step may open the next micro-batch before the last one has ended, and end them in any order.
    The methods are named as in `TrainStep`. Each one first makes this micro-batch the current one,
    so that hooks receive its batch and its index, and logged values count for it.

    Args:
        step: the step that the micro-batch belongs to.
        micro_batch: the micro-batch, as it was read from the loader.

    Attributes:
        batch: the micro-batch on the device, converted.

    Example:
        >>> import torch
        >>> from stratagem import Lite
        >>> from stratagem.strategies import SingleDeviceStrategy, TrainStep
        >>> class TwoInFlight(SingleDeviceStrategy):
        ...     def train_step(self, prepared, step, micro_batches):
        ...         opened = [step.open(each) for each in micro_batches]
        ...         losses = [each.loss() for each in opened]
        ...         for each, loss in zip(opened, losses):
        ...             each.before_backward(loss)
        ...             self.backward(prepared, loss / len(losses))
        ...             each.after_backward()
        ...             each.end()
        ...         self.finish_step(prepared, step)
        >>> lite = Lite(accelerator="cpu", strategy=TwoInFlight())
        >>> lite.launch()
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> prepared = lite.strategy.prepare(net, [torch.optim.SGD(net.parameters(), lr=0.5)])
        >>> class Square(TrainStep):
        ...     def loss(self, part, *, converted=False):
        ...         return prepared.module(part).square().mean()
        >>> lite.strategy.train_step(prepared, Square(), [torch.ones(4, 1), torch.ones(2, 1)])
        >>> abs(net.weight.item()) < 1e-4
        True
    """

    def __init__(self, step: TrainStep, micro_batch: Any) -> None:
        self._step: TrainStep | None = step
        self._micro_batch = micro_batch
        self._suspended: Any = None
        self.batch: Any = None
        self.batch = self._resumed().begin(micro_batch)

    def loss(self, part: Any = None) -> Tensor | None:
        """Return the loss of the micro-batch, or of a part of `batch`; None skips it."""
        return self._resumed().loss(self.batch if part is None else part, converted=True)

    def before_backward(self, loss: Tensor) -> None:
        """Call before a backward, with its loss."""
        self._resumed().before_backward(loss)

    def after_backward(self) -> None:
        """Call after a backward."""
        self._resumed().after_backward()

    def end(self) -> None:
        """Call once, after all work on the micro-batch."""
        step = self._resumed()
        step.end(self._micro_batch)
        step.current = self._step = self.batch = self._micro_batch = self._suspended = None

    def _resumed(self) -> TrainStep:
        """Return the step, with this micro-batch as its current one.

        Raises:
            PluginError: the micro-batch has ended.
        """
        step = self._step
        if step is None:
            raise PluginError("the micro-batch has ended: call end() after all other work on it")
        if step.current is not self:
            if step.current is not None:
                step.current._suspended = step.suspend()
            step.current = self
            step.resume(self._suspended)
        return step
