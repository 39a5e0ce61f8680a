"""The report of a fit: its devices and model at the start, and its result at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from stratagem.discovery.installed import version_of
from stratagem.storage.paths import relative

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer import Trainer


def beginning(trainer: Trainer) -> list[str]:
    """Return the lines for the start of a fit: devices, model, resumed checkpoint, folders."""
    plan, run = trainer.plan, trainer.run
    processes = "one process" if trainer.world_size == 1 else f"{trainer.world_size} processes"
    lines = [
        f"fit on {plan.accelerator.name}: strategy {plan.strategy.name}, {processes}, "
        f"precision {trainer.strategy.precision.name}"
    ]
    if not any(getattr(callback, "prints_parameters", False) for callback in trainer.callbacks):
        lines.append(_parameters(run.module))
    if run.resume_point.path is not None:
        at = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
        lines.append(f"resumed from {relative(run.resume_point.path)}, at {at}")
    lines += _folders(trainer)
    lines.append(run.job.unused_validation())
    return [f"stratagem: {line}" for line in lines if line]


def ending(trainer: Trainer) -> list[str]:
    """Return the lines for the end of a fit: the reason, and the checkpoints to use."""
    took = f"{_counted(trainer.current_epoch, 'epoch')}, {_counted(trainer.global_step, 'step')}"
    lines = [f"training ended after {took}: {_reason(trainer)}"]
    for saver in trainer.checkpoint_callbacks:
        path, score = saver.best_model_path, saver.best_model_score
        if path:
            best = "" if score is None else f" ({saver.monitor} {score:.4g})"
            lines.append(f"{'best' if best else 'newest'} checkpoint{best}: {relative(path)}")
    lines += filter(None, (getattr(c, "ending", "") for c in trainer.callbacks))
    logs = [one.log_dir for one in trainer.loggers if one.log_dir]
    if logs and Path(logs[0], "metrics.csv").exists() and version_of("stratagem-extras"):
        lines.append(f"to see its logs: stratagem report {relative(logs[0])!r}")
    return [f"stratagem: {line}" for line in lines]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _parameters(module: Module) -> str:
    numbers = [(full_numel(p), p.requires_grad) for p in module.parameters()]
    whole = sum(number for number, _ in numbers)
    trained = sum(number for number, is_trained in numbers if is_trained)
    of_them = "" if trained == whole else f", {short_count(trained)} of them trained"
    return f"{type(module).__name__} has {short_count(whole)} parameters{of_them}"


def full_numel(parameter: Tensor) -> int:
    """Return the number of elements of a parameter over all ranks; 0 if uninitialized.

    Example:
        >>> import torch
        >>> full_numel(torch.nn.Parameter(torch.zeros(2, 3)))
        6
    """
    if isinstance(parameter, UninitializedParameter):
        return 0
    # A DTensor's numel counts all shards. An engine that partitions parameters leaves an empty one,
    # with its number of elements in `ds_numel`.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def short_count(number: int) -> str:
    """Return a number as text with a few digits and a unit.

    Example:
        >>> short_count(1234567)
        '1.2 M'
    """
    if number < 1000:
        return str(number)
    power = min((len(str(number)) - 1) // 3, 4)
    return f"{number / 1000**power:.1f} {' KMBT'[power]}"


def _folders(trainer: Trainer) -> list[str]:
    logs = [relative(logger.log_dir) for logger in trainer.loggers if logger.log_dir]
    saved = [relative(saver.dirpath) for saver in trainer.checkpoint_callbacks if saver.dirpath]
    if logs and saved == [f"{logs[0]}/checkpoints"]:
        return [f"logs and checkpoints go to {', '.join(logs)}"]
    both = (("logs", logs), ("checkpoints", saved))
    return [f"{what} go to {', '.join(folders)}" for what, folders in both if folders]


def _reason(trainer: Trainer) -> str:
    options, step = trainer.options, trainer.run.step
    if limit := trainer.run.limits.reached(trainer.run.state):
        has_begun = step is not None and step.last_batch_idx >= 0
        late = f" was reached before the first step; pass a larger {limit} to train further"
        return f"{limit}={getattr(options, limit)}{'' if has_begun else late}"
    names = ("stopping_reason_message", "stopping_reason")
    reasons = (getattr(c, name, None) for c in trainer.callbacks for name in names)
    if reason := next(filter(None, reasons), None):
        return str(reason)
    if options.max_time is not None and trainer.run.interruption.is_time_up():
        return f"max_time={options.max_time:g} seconds"
    if trainer.num_training_batches == 0:
        return "there is no batch to train on"
    when = " before the minimum of training" if trainer.run.state.stop_delayed else ""
    return f"Trainer.should_stop was set{when}"
