"""Steps that read their batches themselves: `training_step(self, dataloader_iter)` and others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.trainer.step.contract_check import takes_own_steps
from stratagem.trainer.step.hooked_step import needs_closure, step_hooks_of
from stratagem.trainer.step.step import EndOfEpoch, Step

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.trainer.loaders.train_loader import TrainLoader
    from stratagem.trainer.metrics.metrics import Metrics
    from stratagem.trainer.run import Run


def reads_itself(step: Callable[..., Any] | None) -> bool:
    """Whether a step takes `dataloader_iter` in the place of a batch.

    Example:
        >>> reads_itself(lambda dataloader_iter: next(dataloader_iter))
        True
    """
    return step is not None and "dataloader_iter" in inspect.signature(step).parameters


class DataLoaderIter(Iterator[tuple[Any, int, int]]):
    """What such a step is given: each `next` is `(batch, batch_idx, dataloader_idx)`.

    Args:
        batches: yields them.
        count: how many there are; infinity: not known.

    Attributes:
        fetched: how many were read.
        last: what was read last; before, (None, 0, 0).
        done: whether there are no more, as far as is known.

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

    def turns(self) -> Iterator[tuple[Any, int, int]]:
        """Yield what was read last, as long as there is more."""
        while not self.done:
            before = self.fetched
            yield self.last
            self.check_read(before)

    def check_read(self, before: int) -> None:
        """Check that a step has read a batch.

        Args:
            before: how many were read before it.

        Raises:
            UserCodeError: it has not, so that there would always be more.
        """
        if self.fetched == before and not self.done:
            raise UserCodeError(
                "a step took no batch from dataloader_iter, so that it would be called for ever: "
                "call next(dataloader_iter) in each"
            )

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


def read_to_train(
    loader: TrainLoader, convert: Callable[[Any], Any] | None, metrics: Metrics, done: int = 0
) -> Iterator[tuple[Any, int, int]]:
    """Yield each batch as `training_step` gets it, its number, and 0, its loader's.

    Args:
        loader: in an epoch.
        convert: makes the step's batch of the loader's.
        metrics: is told of each, for its size.
        done: batches of the epoch before the first.
    """
    for number, (batch,) in enumerate(loader.steps(1), start=done):
        if convert is not None:
            batch = convert(batch)
        metrics.batch = batch
        yield batch, number, 0


class EndOfData(EndOfEpoch):
    """Raised where `training_step` has asked for a batch, and there is none."""


class ReadingStep(Step):
    """A step whose `training_step` reads its batches itself, as many as it likes.

    They count as trained on once the step is taken, so that a run which is resumed goes on behind
    them. A batch that a model keeps for its next step is not seen from here.
    """

    def __init__(self, run: Run, prepared: PreparedModel) -> None:
        _check(run, prepared)
        super().__init__(run, prepared)

    def micro_batches(self, loader: TrainLoader, accumulate: int) -> Iterator[Collection[Any]]:
        """Yield what batches are read from, as long as it has any."""
        done = self._progress.batches
        batches = read_to_train(loader, self._convert, self._logged, done)
        source = DataLoaderIter(batches, loader.end - done)
        return ((source,) for _ in source.turns())

    def begin(self, micro_batch: DataLoaderIter) -> Any:
        """Return what batches are read from, after the hooks of the start.

        The hooks are given the batch before: which ones this step will read is not known yet.
        """
        self._begun += 1
        self._batch = micro_batch
        batch, batch_idx, _ = micro_batch.last
        for hook in self._on_batch_start:
            returned = hook(batch, batch_idx)
            if type(returned) is int and returned == -1:
                raise EndOfEpoch
        return micro_batch

    def loss(self, part: DataLoaderIter, *, converted: bool = False) -> Tensor | None:
        """Return the loss of what `training_step` reads."""
        before = part.fetched
        try:
            loss = super().loss(part, converted=True)
        except StopIteration:
            raise EndOfData from None
        part.check_read(before)
        self._micro_batches = part.fetched - before
        self._batch, self.batch_idx, _ = part.last
        return loss


def _check(run: Run, prepared: PreparedModel) -> None:
    """Refuse what needs a batch before `training_step` reads one.

    Raises:
        ConfigurationError: says what.
    """
    options, module = run.trainer.step_options, run.module
    loader = run.train_loader
    problem = ""
    if options.compilation is not None and options.compilation.whole_step:
        problem = f"{options.compilation} takes the whole step into one graph"
    elif options.most_micro_batches > 1:
        problem = "accumulate_grad_batches counts batches that the Trainer reads"
    elif loader is not None and loader.compares_ranks:
        problem = "ranks that may have different numbers of batches compare theirs before each step"
    elif takes_own_steps(type(run.strategy)):
        problem = f"the strategy {run.runtime.plan.strategy.name!r} takes the step as a whole"
    elif module.automatic_optimization and (own := step_hooks_of(module)):
        problem = f"it overrides {' and '.join(own)}"
    elif module.automatic_optimization and any(map(needs_closure, prepared.optimizers)):
        problem = "its optimizer computes the loss several times in a step"
    if problem:
        raise ConfigurationError(
            f"{type(module).__name__}.training_step takes dataloader_iter, and {problem}: leave "
            "that out, let training_step take batch and batch_idx, or step by hand "
            "(automatic_optimization = False)"
        )
