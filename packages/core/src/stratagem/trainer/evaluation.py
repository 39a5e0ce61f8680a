"""Validation, testing and predicting."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from stratagem.errors import UserCodeError
from stratagem.trainer.metrics import EpochValues, LatestValues, Metrics
from stratagem.trainer.rows import Rows
from stratagem.trainer.step import takes_batch_idx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.trainer.loaders import EvaluationLoader
    from stratagem.trainer.run import Run

_STEPS = {"validation": "validation_step", "test": "test_step", "predict": "predict_step"}


def evaluate(
    run: Run,
    prepared: PreparedModel,
    loaders: list[EvaluationLoader],
    what: str,
    *,
    is_sanity_check: bool = False,
) -> EpochValues:
    """Run validation or testing over all loaders; return the values of the epoch.

    Args:
        run: what is evaluated.
        prepared: its model.
        loaders: of this rank.
        what: "validation" or "test".
        is_sanity_check: what it logs goes nowhere.
    """
    hooks, module = run.hooks, run.module
    if is_sanity_check:
        metrics = Metrics(run.strategy, Rows((), run.strategy.accelerator), LatestValues())
    else:
        metrics = Metrics(run.strategy, run.rows, run.latest)
    with module.logging_to(metrics):
        hooks.call(f"on_{what}_start")
        with _Evaluating(run, prepared):
            hooks.call(f"on_{what}_epoch_start")
            for _ in _run_batches(run, prepared, loaders, what, metrics):
                pass
            metrics.reduce_epoch()
            hooks.call(f"on_{what}_epoch_end")
        epoch = metrics.end_epoch()
        if run.stage == "fit" and not is_sanity_check:
            run.schedulers.step_after_validation(epoch.values)
        # At the last optimizer step, as the values of a training epoch.
        last_step = max(0, run.progress.global_step - 1)
        metrics.rows.write({"epoch": run.progress.epoch, **epoch.for_loggers}, last_step)
        hooks.call(f"on_{what}_end")
    return epoch


def predict(run: Run, prepared: PreparedModel, loaders: list[EvaluationLoader]) -> list[list[Any]]:
    """Return this rank's predictions: a list of batches for each loader; empty if none is kept."""
    hooks = run.hooks
    metrics = Metrics(run.strategy, Rows((), run.strategy.accelerator), LatestValues())
    predictions: list[list[Any]] = [[] for _ in loaders]
    hooks.call("on_predict_start")
    with _Evaluating(run, prepared):
        hooks.call("on_predict_epoch_start")
        for loader_idx, output in _run_batches(run, prepared, loaders, "predict", metrics):
            if run.job.keeps_predictions:
                predictions[loader_idx].append(output)
            del output  # before the next one is computed
        hooks.call("on_predict_epoch_end")
    hooks.call("on_predict_end")
    return predictions


def _run_batches(
    run: Run,
    prepared: PreparedModel,
    loaders: list[EvaluationLoader],
    what: str,
    metrics: Metrics,
) -> Iterator[tuple[int, Any]]:
    """Yield (loader index, what the step returned) for every batch."""
    method = _STEPS[what]
    takes = _extra_arguments(getattr(run.module, method), several=len(loaders) > 1)
    convert = run.strategy.input_converter()
    context = run.strategy.precision.forward_context()
    on_start = run.hooks.of(f"on_{what}_batch_start")
    on_end = run.hooks.of(f"on_{what}_batch_end")
    call = prepared.evaluation_module
    for loader_idx, loader in enumerate(loaders):
        metrics.begin_loader(loader_idx if len(loaders) > 1 else None)
        limit = None if loader.batches == float("inf") else int(loader.batches)
        batch_idx = -1
        for batch_idx, batch in enumerate(islice(iter(loader.loader), limit)):
            if convert is not None:
                batch = convert(batch)
            metrics.batch = batch
            for hook in on_start:
                hook(batch, batch_idx, loader_idx)
            arguments = (batch, batch_idx, loader_idx)[:takes]
            if context is None:
                output = call(method, *arguments)
            else:
                with context:
                    output = call(method, *arguments)
            for hook in on_end:
                hook(output, batch, batch_idx, loader_idx)
            if metrics.row:
                metrics.end_step(run.evaluated_batches)
            run.evaluated_batches += 1
            yield loader_idx, output
            del output  # before the next one is computed
        if batch_idx == -1 and limit != 0:
            raise UserCodeError(f"{loader.name} yielded no batch; expected at least one")
    metrics.begin_loader(None)


def _extra_arguments(method: Any, *, several: bool) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) a step takes."""
    if not takes_batch_idx(method):
        return 1
    return 3 if several else 2


class _Evaluating(AbstractContextManager[None]):
    """Evaluation mode without gradients; every submodule gets its own mode back afterwards."""

    def __init__(self, run: Run, prepared: PreparedModel) -> None:
        self._modes = [(part, part.training) for part in run.module.modules()]
        self._module = run.module
        inference = run.trainer.inference_mode and run.strategy.accelerator.inference_mode
        self._context: Any = torch.inference_mode() if inference else torch.no_grad()
        self._strategys = run.strategy.evaluation(prepared)

    def __enter__(self) -> None:
        self._strategys.__enter__()
        self._module.eval()
        self._context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)
        for part, mode in self._modes:
            part.training = mode
        self._strategys.__exit__(*exception)
