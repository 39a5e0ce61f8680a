"""The learning rate finder: losses over a range of learning rates, and which rate they suggest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer

_SMOOTHING = 0.98


class LRFinder:
    """The result of `Tuner.lr_find`.

    Args:
        mode: "exponential" or "linear".
        lr_min, lr_max: the range.
        num_training: steps in it.

    Attributes:
        results: {"lr": [...], "loss": [...]}: the rate of each step, and the smoothed loss there.

    Example:
        >>> from stratagem_extras.tuner.lr_finder import LRFinder
        >>> finder = LRFinder("exponential", 1e-3, 1.0, 4)
        >>> finder.results = {"lr": [0.001, 0.01, 0.1, 1.0], "loss": [3.0, 2.9, 1.0, 4.0]}
        >>> finder.suggestion(skip_begin=0, skip_end=1)
        0.1
    """

    def __init__(
        self,
        mode: Literal["exponential", "linear"],
        lr_min: float,
        lr_max: float,
        num_training: int,
    ) -> None:
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._suggested: int | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: `lr_min` of the first, `lr_max` of the last.

        The second step takes two parts of the range, as with Lightning's finder.
        """
        part = (step + 1) / self.num_training if step else 0.0
        if self.mode == "linear":
            return self.lr_min + part * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** part)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate of the steepest fall of the loss, or None with too few steps.

        Args:
            skip_begin, skip_end: the numbers of steps to skip, where the loss is not meaningful.
        """
        losses = self.results["loss"]
        kept = [
            (index, losses[index])
            for index in range(skip_begin, len(losses) - skip_end)
            if math.isfinite(losses[index])
        ]
        self._suggested = None
        if len(kept) < 2:
            return None
        slopes = torch.gradient(torch.tensor([loss for _, loss in kept]))[0]
        self._suggested = kept[int(slopes.argmin())][0]
        return self.results["lr"][self._suggested]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plot loss over learning rate; return matplotlib's figure.

        Args:
            suggest: mark the learning rate of `suggestion()`.
            show: open a window.
            ax: matplotlib's axes to plot into; None: a new figure.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ConfigurationError(
                "LRFinder.plot needs matplotlib, which is not installed: pip install matplotlib"
            ) from error
        if ax is None:
            figure, ax = plt.subplots()
        else:
            figure = ax.figure
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None:
            index = self._suggested
            assert index is not None
            ax.plot(
                self.results["lr"][index],
                self.results["loss"][index],
                markersize=10,
                marker="o",
                color="red",
            )
        if show:
            plt.show()
        return figure


class Sweep(Callback):
    """Trains each step at the next learning rate of a finder, and notes the smoothed loss.

    Args:
        finder: provides the rates, and receives the results.
        early_stop_threshold: stop when the loss exceeds this multiple of the best loss; None:
            never.
    """

    def __init__(self, finder: LRFinder, early_stop_threshold: float | None) -> None:
        self._finder = finder
        self._threshold = early_stop_threshold
        self._average = 0.0
        self._best = math.inf

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Let nothing else set learning rates."""
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"lr_find takes one optimizer; {type(module).__name__}.configure_optimizers() "
                f"returned {len(trainer.optimizers)}"
            )
        trainer.run.schedulers.suspend()
        self._set_rate(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note rate and loss after each optimizer step."""
        if trainer.is_within_step or batch is None or outputs["loss"] is None:
            return
        results, step = self._finder.results, len(self._finder.results["lr"])
        loss = float(trainer.ranks.all_reduce(outputs["loss"].detach().float()))
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        # Without the last factor the first averages would be too small.
        smoothed = self._average / (1 - _SMOOTHING ** (step + 2))
        results["lr"].append(self._finder.rate(step))
        results["loss"].append(smoothed)
        if self._threshold is not None and step > 0 and smoothed > self._threshold * self._best:
            trainer.should_stop = True
        if smoothed < self._best or step == 0:
            self._best = smoothed
        self._set_rate(trainer)

    def _set_rate(self, trainer: Trainer) -> None:
        rate = self._finder.rate(len(self._finder.results["lr"]))
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate
