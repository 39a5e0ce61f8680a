"""Throughput of a loop of your own, and the FLOPs of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stratagem.lite import Lite
from stratagem_extras.callbacks import throughput
from stratagem_lightning.api.utilities.phrases import in_lightnings_words


class Throughput(throughput.Throughput):
    """Rates over a window of the latest batches; Stratagem's, with Lightning's exceptions."""

    update = in_lightnings_words(throughput.Throughput.update)

    def compute(self) -> dict[str, float]:
        """Return totals, and rates once the window is full."""
        metrics = super().compute()
        if len(self._counts) == self._counts.maxlen:
            return metrics
        totals = ("time", "batches", "samples", "lengths")
        return {name: value for name, value in metrics.items() if name in totals}


class ThroughputMonitor(Throughput):
    """Throughput that writes to the loggers of a Fabric or Lite.

    Args:
        fabric: a Fabric or Lite with loggers.
        **options: the arguments of `Throughput`.
    """

    def __init__(self, fabric: Lite, **options: Any) -> None:
        super().__init__(world_size=fabric.world_size, **options)
        self._lite = fabric
        self.step = -1

    def compute_and_log(self, step: int | None = None, **options: Any) -> dict[str, float]:
        """Return the totals and rates, and log them.

        Args:
            step: for the loggers; None: the calls of this, counted from 0.
            **options: for `compute`.
        """
        self.step = self.step + 1 if step is None else step
        metrics = self.compute(**options)
        self._lite.log_dict(metrics=metrics, step=self.step)
        return metrics


def measure_flops(
    model: nn.Module,
    forward_fn: Callable[[], Any],
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> int:
    """Return the floating-point operations of a forward, and of the backward with a loss.

    Args:
        model: the model that the function calls; unused.
        forward_fn: runs the model.
        loss_fn: computes the loss from the return value of `forward_fn`.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model, x = torch.nn.Linear(2, 3), torch.randn(4, 2)
        >>> measure_flops(model, lambda: model(x))
        48
    """
    counter = FlopCounterMode(display=False)
    with counter:
        if loss_fn is None:
            forward_fn()
        else:
            torch.autograd.backward(loss_fn(forward_fn()))
    return int(counter.get_total_flops())
