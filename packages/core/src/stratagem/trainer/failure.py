"""What a run does when an error ends it: explain, call hooks, keep what was logged and saved."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from stratagem.launch.rank import this_rank
from stratagem.launch.streams import printable
from stratagem.runtime.device_errors import explain_device_error
from stratagem.trainer.resume.find import newest_checkpoint

if TYPE_CHECKING:
    from stratagem.trainer.run import Run


def end_failed(run: Run, error: BaseException) -> None:
    """Do what is left to do for a run that an error ends; the caller raises that error further.

    Whatever fails here is printed: it would take the place of the error that it results from.
    """
    optimizers = () if run.prepared is None else run.prepared.optimizers
    explain_device_error(error, run.strategy, run.module, optimizers)
    if this_rank.device_is_lost:
        run.rows.leave_device()
    of_data = () if run.datamodule is None else (run.datamodule.on_exception,)
    for hook in (*run.hooks.of("on_exception"), *of_data):
        _attempt(lambda hook=hook: hook(error))  # type: ignore[misc]
    # What was saved before the error becomes durable.
    _attempt(run.strategy.checkpoint_io.wait_at_error)
    if isinstance(error, KeyboardInterrupt) and run.strategy.ranks.is_global_zero:
        print(printable(_interrupted(run), sys.stderr.encoding), file=sys.stderr, flush=True)


def _interrupted(run: Run) -> str:
    """Return in two lines where Ctrl-C ended a run, and how to go on."""
    if run.stage != "fit":
        number = run.evaluated_batches
        batches = f"{number} batch" if number == 1 else f"{number} batches"
        return f"\nstratagem: {run.stage} was interrupted, after {batches}"
    progress = run.progress
    saved = newest_checkpoint(run.trainer)
    follows = "there is no checkpoint yet"
    if saved:
        follows = f"trainer.fit(..., ckpt_path={saved!r}) goes on from its checkpoint"
    return (
        f"\nstratagem: interrupted in epoch {progress.epoch}, after step {progress.global_step}"
        f"\nstratagem: {follows}"
    )


def _attempt(function: Callable[[], object]) -> None:
    try:
        function()
    # The run ends with its own error; this one would take its place.
    except Exception as error:
        print(f"stratagem: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
