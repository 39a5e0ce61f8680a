"""LossStep: an optimizer step of a hand-written loop, whose order the strategy decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from stratagem.errors import UserCodeError
from stratagem.interfaces.stepping import TrainStep
from stratagem.plan.step_options import GradientClip
from stratagem.runtime.loss_factors import weighted

Loss = Callable[[Any], "Tensor | None"]


class LossStep(TrainStep):
    """The part of a user's loop in `Strategy.train_step`.

    Args:
        loss: the user's function; returns the loss of a micro-batch, or None to skip it.
        factors: a factor for each micro-batch, by which its loss is multiplied; None: 1 each.
        clip: how gradients are clipped; None: not at all.
    """

    def __init__(
        self, loss: Loss, factors: Sequence[float | Tensor] | None, clip: GradientClip | None
    ) -> None:
        self.clip = clip
        self.losses: list[Tensor] = []
        """The losses so far, multiplied by their factors, without gradients."""
        self._loss = loss
        self._factors = factors
        self._index = self._opened = 0

    def loss(self, part: Any, *, converted: bool = False) -> Tensor | None:
        """Return the user's loss, multiplied by its factor."""
        loss = self._loss(part)
        if loss is None:
            return None
        if not isinstance(loss, Tensor):
            raise UserCodeError(
                f"step(): loss(micro_batch) returned a {type(loss).__name__}; expected a scalar "
                "tensor with a gradient, or None to skip the micro-batch"
            )
        return loss if self._factors is None else weighted(loss, self._factors[self._index])

    def suspend(self) -> int:
        """Return the index of the current micro-batch."""
        return self._index

    def resume(self, suspended: int | None) -> None:
        """Restore the index of an opened micro-batch; None: it is about to begin."""
        if suspended is None:
            suspended, self._opened = self._opened, self._opened + 1
        self._index = suspended

    def before_backward(self, loss: Tensor) -> None:
        """Keep the loss."""
        self.losses.append(loss.detach())

    def end(self, micro_batch: Any) -> None:
        """Count the micro-batch."""
        self._index += 1
