"""The report of a fit: what it trains on, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.data import TensorDataset

from stratagem.callbacks.progress.model_summary import ModelSummary, full_numel, short_count
from stratagem.launch.process import available_cores

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer import Trainer


def beginning(trainer: Trainer) -> list[str]:
    """Return on what a fit trains, what it goes on from, and where its files go."""
    plan, run = trainer.plan, trainer.run
    processes = "one process" if trainer.world_size == 1 else f"{trainer.world_size} processes"
    lines = [
        f"fit on {plan.accelerator.name}: strategy {plan.strategy.name}, {processes}, "
        f"precision {trainer.strategy.precision.name}"
    ]
    if not any(isinstance(callback, ModelSummary) for callback in trainer.callbacks):
        lines.append(_parameters(run.module))
    if run.resume_point.path is not None:
        at = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
        lines.append(f"goes on from {run.resume_point.path}, at {at}")
    lines += _folders(trainer)
    lines += _hints(trainer)
    return [f"stratagem: {line}" for line in lines]


def ending(trainer: Trainer) -> list[str]:
    """Return why a fit ended, and what it left."""
    lines = [
        f"training ended after {_counted(trainer.current_epoch, 'epoch')}, "
        f"{_counted(trainer.global_step, 'step')}: "
        f"{_reason(trainer)}"
    ]
    for saver in trainer.checkpoint_callbacks:
        path, score = saver.best_model_path, saver.best_model_score
        if path and score is not None:
            lines.append(f"best checkpoint ({saver.monitor} {score:.4g}): {path}")
        elif path:
            lines.append(f"newest checkpoint: {path}")
    return [f"stratagem: {line}" for line in lines]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _parameters(module: Module) -> str:
    numbers = [(full_numel(p), p.requires_grad) for p in module.parameters()]
    whole = sum(number for number, _ in numbers)
    trained = sum(number for number, is_trained in numbers if is_trained)
    of_them = "" if trained == whole else f", {short_count(trained)} of them trained"
    return f"{type(module).__name__} has {short_count(whole)} parameters{of_them}"


def _folders(trainer: Trainer) -> list[str]:
    logs = [logger.log_dir for logger in trainer.loggers if logger.log_dir]
    saved = [str(saver.dirpath) for saver in trainer.checkpoint_callbacks if saver.dirpath]
    if logs and saved == [str(Path(logs[0]) / "checkpoints")]:
        return [f"logs and checkpoints go to {', '.join(logs)}"]
    both = (("logs", logs), ("checkpoints", saved))
    return [f"{what} go to {', '.join(folders)}" for what, folders in both if folders]


def _hints(trainer: Trainer) -> list[str]:
    """Return what seems not to be meant, as far as it costs nothing to find out."""
    run, hints = trainer.run, []
    has_loader = run.job.val_loaders is not None or run.module.defines("val_dataloader")
    if has_loader and not run.module.defines("validation_step"):
        hints.append(
            f"there is a loader for validation, but {type(run.module).__name__} has no "
            "validation_step, so there is no validation"
        )
    loader, cores = trainer.train_dataloader, available_cores() // len(trainer.plan.devices)
    in_memory = isinstance(getattr(loader, "dataset", None), TensorDataset)
    if getattr(loader, "num_workers", None) == 0 and cores > 2 and not in_memory:
        hints.append(
            "batches are read between the steps; DataLoader(num_workers=...) reads them meanwhile "
            f"(about {cores} cores a process are there)"
        )
    return hints


def _reason(trainer: Trainer) -> str:
    options = trainer.options
    if trainer.global_step == options.max_steps:
        return f"max_steps={options.max_steps}"
    if trainer.current_epoch == options.max_epochs:
        return f"max_epochs={options.max_epochs}"
    names = ("stopping_reason_message", "stopping_reason")
    reasons = (getattr(c, name, None) for c in trainer.callbacks for name in names)
    if reason := next(filter(None, reasons), None):
        return str(reason)
    if options.max_time is not None and trainer.run.interruption.is_time_up():
        return f"max_time={options.max_time:g} seconds"
    if trainer.num_training_batches == 0:
        return "there is no batch to train on"
    return "Trainer.should_stop was set"
