"""The search for the largest batch size that fits."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map

from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer

_log = logging.getLogger(__name__)


def search(
    fits: Callable[[int], int | None],
    *,
    mode: str,
    start: int,
    trials: int,
    margin: float,
    most: int,
    predict: Callable[[int], int] = int,
    always_has_margin: bool = False,
) -> int | None:
    """Return the largest size that fits, or None if the search found no such size.

    Args:
        fits: tries a size, and returns the tried size, which is smaller if the dataset has fewer
            samples; None: the size does not fit.
        mode: "power" doubles; "binsearch" then bisects between a size that fits and a size that
            does not.
        start: the first size.
        trials: the largest number of trials; 0: the first size is returned without a trial.
        margin: the fraction by which "binsearch" reduces the size after an out-of-memory error.
        most: the largest size to try.
        predict: called with the first size that fits; returns the largest size that is expected to
            fit, from which the search continues. By default it returns its argument.
        always_has_margin: whether "binsearch" takes the margin off, even if memory never ran out.

    Example:
        >>> def fits(size):
        ...     return size if size <= 100 else None
        >>> options = {"start": 2, "trials": 25, "margin": 0.0, "most": 8192}
        >>> search(fits, mode="power", **options), search(fits, mode="binsearch", **options)
        (64, 100)
    """
    good: int | None = None if trials else start
    bad: int | None = None
    size = start
    for _ in range(trials):
        tried = fits(size)
        if tried is None:
            bad = size
        else:
            good = tried
            if tried < size or tried >= most:
                break  # no more data, or the size has reached its limit
        if bad is None:
            expected = predict(size) if size == start else 0
            size *= 2
            while 2 * size <= expected:
                size *= 2
            size = min(size, most)
        elif good is None:
            size = bad // 2
            if size < 1:
                return None
        elif mode == "power":
            if bad <= 2 * good:
                return good
            size = bad // 2
        elif bad - good <= 1:
            break
        else:
            size = (good + bad) // 2
    if good is None or mode == "power" or not (bad or always_has_margin):
        return good
    return max(1, int(good * (1.0 - margin)))


def predicted_size(trainer: Trainer, model: Module, loader: Any, size: int) -> int:
    """Return the number of samples of a batch that a plan predicts to fit; 0: unknown.

    The plan is made for a batch and for a batch of twice the size. Their difference is the memory
    of the additional samples. A third plan, for the resulting size, corrects the result.

    Args:
        trainer: a Trainer of one device.
        model: the model, prepared for a fit.
        loader: a loader with batches of `size` samples; one batch is read.
        size: the number of samples.
    """
    device = trainer.strategy.accelerator.availability()
    if (capacity := device.memory) is None or not device.indexed:
        return 0  # a host that is full ends the process
    from stratagem.strategies import StepMemory
    from stratagem_extras.planner.plan import plan_memory

    batch = next(iter(loader))

    def held(times: int) -> int:
        plan = plan_memory(
            model,
            lambda: tree_map(lambda part: _repeated(part, size, times), batch),
            precision=trainer.plan.precision.name,
            device_memory=capacity,
            strategies=["single_device"],
        )
        return plan.strategies[0].on_device

    found, room = 0, StepMemory.USABLE * capacity
    try:
        one = held(1)
        for _ in range(2):  # samples of a small batch may not be part of a step's peak memory
            times = found or 2
            if (more := held(times) - one) <= 0:
                break
            found = max(2, 1 + int((times - 1) * (room - one) / more))
    except ConfigurationError as error:  # no plan can be made of this model
        _log.debug("no batch size is predicted: %s", error)
    return size * found


def _repeated(part: Any, size: int, times: int) -> Any:
    """Return a tensor of so many samples as one of some times as many."""
    samples = isinstance(part, Tensor) and part.dim() > 0 and len(part) == size
    return part.repeat(times, *itertools.repeat(1, part.dim() - 1)) if samples else part
