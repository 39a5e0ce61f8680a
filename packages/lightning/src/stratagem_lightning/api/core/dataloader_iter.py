"""Steps that read their batches themselves: `training_step(self, dataloader_iter)` and others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.trainer import (
    BatchFeed,
    EndOfEpoch,
    needs_closure,
    step_hooks_of,
    takes_own_steps,
    training_batches,
)
from stratagem_lightning.api.core.steps import BackwardStep

if TYPE_CHECKING:
    from stratagem.trainer import StepContext, TrainLoader


def takes_dataloader_iter(step: Callable[..., Any] | None) -> bool:
    """Whether a step takes `dataloader_iter` in place of a batch.

    Example:
        >>> takes_dataloader_iter(lambda dataloader_iter: next(dataloader_iter))
        True
    """
    return step is not None and "dataloader_iter" in inspect.signature(step).parameters


class DataLoaderIter(Iterator[tuple[Any, int, int]]):
    """The iterator that such a step receives: each `next` is `(batch, batch_idx, dataloader_idx)`.

    Args:
        batches: the batches of all loaders.
        count: the number of batches; infinity: unknown.

    Attributes:
        fetched: the number of batches that were read.
        last: the last batch; before the first, (None, 0, 0).
        done: whether the last batch was read, as far as this is known.

    Example:
        >>> batches = DataLoaderIter(iter([("a", 0, 0), ("b", 1, 0)]), 2)
        >>> [next(batches), batches.done, next(batches), batches.done]
        [('a', 0, 0), False, ('b', 1, 0), True]
    """

    def __init__(self, batches: Iterator[tuple[Any, int, int]], count: float) -> None:
        self._batches = batches
        self._count = count
        self.fetched = 0
        self.last: tuple[Any, int, int] = (None, 0, 0)
        self.done = count <= 0

    def pass_to(self, step: Callable[[DataLoaderIter], Any]) -> Any:
        """Call a step with this iterator; return the step's result.

        Raises:
            EndOfData: the step asks for a batch after the last batch.
            UserCodeError: the step has read no batch, so that an endless loop would follow.
        """
        before = self.fetched
        try:
            returned = step(self)
        except StopIteration:
            raise EndOfData from None
        if self.fetched == before and not self.done:
            raise UserCodeError(
                "a step took no batch from dataloader_iter, so that it would be called for ever: "
                "call next(dataloader_iter) in each"
            )
        return returned

    def __next__(self) -> tuple[Any, int, int]:
        if self.done:
            raise StopIteration
        try:
            self.last = next(self._batches)
        except StopIteration:
            self.done = True
            raise
        self.fetched += 1
        self.done = self.fetched >= self._count
        return self.last


class EndOfData(EndOfEpoch):
    """Raised if a step requests a batch after the last one."""

    data_has_ended = True


class IterFeed(BatchFeed):
    """Passes a `DataLoaderIter` to a step that runs without an optimizer step.

    The hooks at the start of a batch receive the previous batch, since the step has not read its
    own batch yet.

    Args:
        source: the iterator that the step reads from.
    """

    def __init__(self, source: DataLoaderIter) -> None:
        super().__init__(source, 0)
        self._source = source

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        while not self._source.done:
            yield self.last

    def run(self, step: Callable[..., Any]) -> Any:
        """Call the step with the iterator; return the step's result."""
        returned = self._source.pass_to(step)
        self.last = self._source.last
        return returned


class ReadingStep(BackwardStep):
    """An optimizer step with a `training_step` that reads its batches itself.

    The batches count as trained once the step is taken, so that a resumed run continues after them.
    A batch that a model keeps for its next step counts as trained too.

    Raises:
        ConfigurationError: the run needs a batch before `training_step` reads one.
    """

    def __init__(self, context: StepContext) -> None:
        _check(context)
        super().__init__(context)

    def micro_batches(self, loader: TrainLoader, accumulate: int) -> Iterator[Collection[Any]]:
        """Yield the iterator over the epoch's batches for each step, as long as it has any."""
        done = self.state.batches
        batches = training_batches(loader, self.convert, self.metrics, done)
        source = DataLoaderIter(batches, loader.end - done)
        while not source.done:
            yield (source,)

    def begin(self, micro_batch: DataLoaderIter) -> Any:
        """Return the iterator, after the hooks of the start, which receive the batch before."""
        self.begun += 1
        self.batch = micro_batch
        batch, batch_idx, _ = micro_batch.last
        for hook in self.on_batch_start:
            returned = hook(batch, batch_idx)
            if type(returned) is int and returned == -1:
                raise EndOfEpoch
        return micro_batch

    def loss(self, part: DataLoaderIter, *, converted: bool = False) -> Tensor | None:
        """Return the loss of the batches that `training_step` reads."""
        before = part.fetched
        loss: Tensor | None = part.pass_to(partial(super().loss, converted=True))
        self.uncounted = part.fetched - before
        self.batch, self.batch_idx, _ = part.last
        return loss


def _check(context: StepContext) -> None:
    """Raise for a run that needs a batch before `training_step` reads one.

    Raises:
        ConfigurationError: the message names the option that needs a batch.
    """
    options, module = context.trainer.options.step_options, context.module
    problem = ""
    if options.most_micro_batches > 1:
        problem = "accumulate_grad_batches counts batches that the Trainer reads"
    elif context.data.loader.compares_ranks:
        problem = "ranks that may have different numbers of batches compare theirs before each step"
    elif takes_own_steps(type(context.strategy)):
        problem = f"the strategy {context.trainer.plan.strategy.name!r} takes the step as a whole"
    elif module.automatic_optimization and (own := step_hooks_of(module)):
        problem = f"it overrides {' and '.join(own)}"
    elif module.automatic_optimization and any(map(needs_closure, context.prepared.optimizers)):
        problem = "its optimizer computes the loss several times in a step"
    if problem:
        raise ConfigurationError(
            f"{type(module).__name__}.training_step takes dataloader_iter, and {problem}: leave "
            "that out, let training_step take batch and batch_idx, or step by hand "
            "(automatic_optimization = False)"
        )
