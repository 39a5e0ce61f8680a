"""Validation, testing and predicting."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from stratagem.data.combined_loader import CombinedLoader
from stratagem.data.sharding import UNKNOWN, iterator_of
from stratagem.interfaces.contract_checks import context_of
from stratagem.launch.process import printable
from stratagem.trainer.hooks import Hook, is_users, positional_parameters
from stratagem.trainer.loaders.loaders import EvaluationLoader, set_epoch_of
from stratagem.trainer.metrics.log_buffer import LogBuffer
from stratagem.trainer.metrics.metrics import EpochMetrics, Metrics
from stratagem.trainer.step.batches import batch_converter, training_batches
from stratagem.trainer.step.step import EndOfEpoch

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.trainer.context import RunContext
    from stratagem.trainer.loaders.train_loader import FitData

Turns = Callable[[int, EvaluationLoader, Iterator[Any]], Generator[Any, None, None]]
_STEPS = {"validation": "validation_step", "test": "test_step", "predict": "predict_step"}


def evaluate(
    context: RunContext,
    prepared: PreparedModel,
    loaders: list[EvaluationLoader],
    what: str,
    *,
    is_sanity_check: bool = False,
    at_end: Callable[[EpochMetrics], None] | None = None,
) -> EpochMetrics:
    """Run validation or testing over all loaders; return the epoch's metrics.

    Args:
        context: the objects of the run.
        prepared: the prepared model.
        loaders: the loaders of this rank.
        what: "validation" or "test".
        is_sanity_check: if True, logged values are dropped.
        at_end: called with the metrics before loggers and the last hooks get them.
    """
    hooks, module = context.hooks, context.module
    if is_sanity_check:
        rows, latest = LogBuffer((), context.strategy.accelerator), context.latest.emptied()
    else:
        rows, latest = context.rows, context.latest
    metrics = Metrics(context.strategy, rows, latest, of_evaluation=True, module=module)
    first = _begin_reading(context, loaders)
    with module.logging_to(metrics), _EvaluationMode(context, what):
        with _inference(context):
            hooks.call(f"on_{what}_start")
        with context_of(context.strategy.evaluation, prepared), _inference(context):
            hooks.call(f"on_{what}_epoch_start")
            for _ in _run_batches(context, prepared, loaders, what, metrics, first):
                pass
            metrics.reduce_epoch()
            hooks.call(f"on_{what}_epoch_end")
        epoch = metrics.end_epoch()
        if at_end is not None:
            at_end(epoch)
        # At the last optimizer step, as the values of a training epoch.
        metrics.rows.write(epoch.for_loggers, context.state.logged_step, context.state.epoch)
        with module.logging_to(None):
            hooks.call(f"on_{what}_end")
    return epoch


def predict(
    context: RunContext, prepared: PreparedModel, loaders: list[EvaluationLoader]
) -> list[list[Any]]:
    """Return this rank's predictions for each loader: lists of batches, empty unless kept."""
    hooks = context.hooks
    metrics = Metrics(
        context.strategy, LogBuffer((), context.strategy.accelerator), context.latest.emptied()
    )
    predictions: list[list[Any]] = [[] for _ in loaders]
    context.progress.predictions = predictions
    first = _begin_reading(context, loaders)
    with _EvaluationMode(context, "predict"):
        with _inference(context):
            hooks.call("on_predict_start")
        with context_of(context.strategy.evaluation, prepared), _inference(context):
            hooks.call("on_predict_epoch_start")
            reading = _run_batches(context, prepared, loaders, "predict", metrics, first)
            for loader_idx, output in reading:
                if context.job.keeps_predictions:
                    predictions[loader_idx].append(output)
                del output  # before the next one is computed
            hooks.call("on_predict_epoch_end")
        hooks.call("on_predict_end")
    return predictions


def run_training_data_without_grad(
    context: RunContext, prepared: PreparedModel, data: FitData
) -> None:
    """Run `training_step` on each batch of an epoch in training mode, without gradients.

    This updates the statistics that a forward pass changes, such as those of batch norm.
    """
    # Training is over: a checkpoint has the RNG states and the position of before.
    data.rank_state.keep(**data.rank_state.state())
    loader = data.loader
    metrics = Metrics(
        context.strategy, LogBuffer((), context.strategy.accelerator), context.latest.emptied()
    )
    metrics.in_step = True
    convert = batch_converter(context.strategy, context.module, context.datamodule)
    step, epoch = context.module.training_step, context.state.epoch
    takes = 2 if positional_parameters(step).most > 1 else 1
    forward = context.strategy.precision.forward_context() or nullcontext()
    loader.set_epoch(epoch)
    loader.begin_epoch(epoch, 0)
    context.module.train()
    batches = training_batches(loader, convert, metrics)
    feed = context.trainer.make_batch_feed(step, batches, loader.end, takes)
    call = partial(prepared.module, "training_step")
    with context.module.logging_to(metrics), torch.no_grad():
        for _ in feed:
            try:
                with forward:
                    feed.run(call)
            except EndOfEpoch:
                break


def _run_batches(
    context: RunContext,
    prepared: PreparedModel,
    loaders: list[EvaluationLoader],
    what: str,
    metrics: Metrics,
    first: Iterator[Any] | None,
) -> Iterator[tuple[int, Any]]:
    """Yield (loader index, result of the step) for every batch."""
    method = _STEPS[what]
    step = getattr(context.module, method)
    takes = _arguments_taken(step, 3 if len(loaders) > 1 else 2)
    forward = context.strategy.precision.forward_context() or nullcontext()
    on_start = _with_index(context.hooks.of(f"on_{what}_batch_start"), 3)
    on_end = _with_index(context.hooks.of(f"on_{what}_batch_end"), 4)
    call = partial(context.profiling.of_strategy(method, prepared.evaluation_module), method)
    turns: Turns = _batches_within_limit
    if context.strategy.ranks.world_size > 1:
        from stratagem.strategies import EvaluationTurns  # ranks may have different numbers

        turns = EvaluationTurns(context.strategy, prepared, loaders, method).batches
    reading = _read(context, loaders, method, turns, metrics, first)
    count = sum(loader.batches for loader in loaders)
    feed = context.trainer.make_batch_feed(step, reading, count, takes)
    # Closed here, so that after an error no rank waits for this one's step.
    with closing(reading):
        for batch, batch_idx, loader_idx in feed:
            for hook in on_start:
                hook(batch, batch_idx, loader_idx)
            try:
                with forward:
                    output = feed.run(call)
            except EndOfEpoch:
                break
            batch, batch_idx, loader_idx = feed.last
            for hook in on_end:
                hook(output, batch, batch_idx, loader_idx)
            if metrics.row:
                metrics.row.setdefault("step", context.progress.batches)
                metrics.end_step(context.state.logged_step, context.state.epoch)
            context.progress.batches += 1
            yield loader_idx, output
            del output  # before the next one is computed
        for _ in reading:
            pass  # without a batch of its own, this rank follows the others to their last one
    metrics.begin_loader(None)


def _begin_reading(context: RunContext, loaders: list[EvaluationLoader]) -> Iterator[Any] | None:
    """Hand the epoch to the loaders; return the first one's iterator if hooks come after it."""
    for loader in loaders:
        set_epoch_of(loader.loader, context.state.epoch)
    before_hooks = loaders and context.policy.reads_before_hooks
    return _batches_of(loaders[0].loader) if before_hooks else None


def _read(
    context: RunContext,
    loaders: list[EvaluationLoader],
    method: str,
    turns: Turns,
    metrics: Metrics,
    first: Iterator[Any] | None,
) -> Generator[tuple[Any, int, int], None, None]:
    """Yield each converted batch with its index and the index of its loader."""
    reading = f"{method.removesuffix('_step').replace('validation', 'val')}_next"
    reads = partial(context.profiling.reads, reading)
    for loader_idx, loader in enumerate(loaders):
        convert = batch_converter(context.strategy, context.module, context.datamodule, loader_idx)
        if convert is not None:
            convert = context.profiling.of_strategy("batch_to_device", convert)
        metrics.begin_loader(loader_idx if len(loaders) > 1 else None)
        batches = _batches_of(loader.loader) if first is None else first
        first = None
        own = turns(loader_idx, loader, reads(batches))
        with closing(own):
            for batch_idx, batch in enumerate(own):
                if convert is not None:
                    batch = convert(batch)
                metrics.batch = batch
                yield batch, batch_idx, loader_idx


def _batches_within_limit(
    index: int, loader: EvaluationLoader, batches: Iterator[Any]
) -> Generator[Any, None, None]:
    """Yield the batches of a loader; on several ranks, `EvaluationTurns.batches` does so.

    Raises:
        UserCodeError: the loader yielded no batch.
    """
    limit, is_empty = None if loader.batches == UNKNOWN else int(loader.batches), True
    for batch in islice(batches, limit):
        is_empty = False
        yield batch
        del batch  # before the next one is read
    if is_empty and limit != 0:
        raise loader.no_batch_error()


def _batches_of(loader: Any) -> Iterator[Any]:
    if hasattr(loader, "read_part"):
        loader = copy.copy(loader)  # the copy moves on, so that each evaluation reads all
    return loader.batches() if isinstance(loader, CombinedLoader) else iterator_of(loader)


def _arguments_taken(method: Callable[..., Any], most: int) -> int:
    """Return the number of arguments of (batch, batch_idx, dataloader_idx) to pass to a step.

    Args:
        method: the step.
        most: the number of useful arguments. A step with more required arguments receives more.
    """
    takes = positional_parameters(method)
    return min(3, max(takes.needed, min(takes.most, most)))


def _with_index(hooks: Sequence[Hook], arguments: int) -> list[Hook]:
    """Return hooks that take this number of arguments; the last is the loader's index."""

    def without_index(hook: Hook) -> Hook:
        return lambda *arguments: hook(*arguments[:-1])

    return [
        hook if positional_parameters(hook).most >= arguments else without_index(hook)
        for hook in hooks
    ]


class _EvaluationMode(AbstractContextManager[None]):
    """A context of evaluation mode without gradients; restores each submodule's mode at its end."""

    def __init__(self, context: RunContext, what: str) -> None:
        self._progress = context.progress
        self._module = context.module
        self._what = what

    def __enter__(self) -> None:
        self._progress.what = self._what
        self._modes = [(part, part.training) for part in self._module.modules()]
        self._gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        getattr(self._module, f"on_{self._what}_model_eval")()

    def __exit__(self, *exception: Any) -> None:
        self._progress.what = ""
        torch.set_grad_enabled(self._gradients)
        leave = f"on_{self._what}_model_train"
        if is_users(self._module, leave):
            getattr(self._module, leave)()
            return
        for part, mode in self._modes:
            part.training = mode


def _inference(context: RunContext) -> AbstractContextManager[Any]:
    """Return inference mode, if it is requested and the device and the precision support it.

    It is never used within a fit, because training may use a tensor that validation has created.
    """
    strategy = context.strategy
    able = strategy.accelerator.inference_mode and strategy.precision.inference_mode
    wanted = context.trainer.options.inference_mode and context.job.stage != "fit" and able
    return torch.inference_mode() if wanted else nullcontext()


def print_values(stage: str, values: Mapping[str, float]) -> None:
    """Print the values of an evaluation, a line for each."""
    names = [printable(name, sys.stdout.encoding) for name in values]
    width = max(map(len, names), default=0)
    lines = [f"{n:<{width}}  {value:.6g}" for n, value in zip(names, values.values(), strict=True)]
    print("\n  ".join([f"{stage}:", *lines]))
