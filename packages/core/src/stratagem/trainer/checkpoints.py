"""What a Trainer's checkpoint holds, and how it is put back.

======================  ==========================================================================
key                     value
======================  ==========================================================================
format_version          of this table; a newer one is refused
stratagem_version       that saved it
strategy, world_size    under which it was saved; it loads under any other
state_dict              weights and buffers by name
optimizer_states        one for each optimizer, by parameter names
lr_schedulers           one for each scheduler
precision               such as a loss scale
epoch, global_step      as users read them: epochs begun, optimizer steps taken
progress                where the loop stands
ranks                   of each rank, random numbers and where its loader stands
callbacks, datamodule   their states
hyper_parameters        what save_hyperparameters kept
======================  ==========================================================================
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem._plain_data import find_culprit
from stratagem._version import __version__
from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from stratagem.trainer.resume import state_of_rank

if TYPE_CHECKING:
    from stratagem.interfaces.strategy import Prepared, Strategy
    from stratagem.trainer.run import Run
    from stratagem.trainer.trainer import Trainer

FORMAT_VERSION = 1


def collect(run: Run, prepared: Prepared, *, weights_only: bool) -> dict[str, Any]:
    """Return a checkpoint of the run as it is; called on every rank.

    Tensors in it alias the live ones.

    Raises:
        CheckpointContentError: something that the user stores is not plain data; says whose.
    """
    trainer, module, strategy = run.trainer, run.module, run.strategy
    checkpoint: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "stratagem_version": __version__,
        "strategy": trainer.plan.strategy.name,
        "world_size": strategy.world_size,
        "epoch": run.progress.epoch,
        "global_step": run.progress.global_step,
        "state_dict": strategy.model_state(prepared),
        "hyper_parameters": dict(module.hyper_parameters),
    }
    _require_plain(checkpoint["hyper_parameters"], f"the hyperparameters of {_kind(module)}")
    if not weights_only:
        if run.step is not None and run.step.is_under_way and strategy.is_global_zero:
            warnings.warn(
                "this checkpoint is saved within an optimizer step that an error has ended: a run "
                "that resumes from it takes that step's batches again, but with the random numbers "
                "and the buffers (such as those of batch norm) of the error's time",
                stacklevel=3,
            )
        callbacks = {c.state_key: c.state_dict() for c in trainer.callbacks}
        for key, state in callbacks.items():
            _require_plain(state, f"the state of the callback {key}")
        checkpoint.update(
            progress=run.progress.state_dict(),
            optimizer_states=[
                strategy.optimizer_state(prepared, optimizer) for optimizer in prepared.optimizers
            ],
            lr_schedulers=[c.scheduler.state_dict() for c in run.schedulers],
            precision=strategy.precision.state_dict(),
            ranks=strategy.gather_plain(state_of_rank(run)),
            callbacks={key: state for key, state in callbacks.items() if state},
        )
        if run.datamodule is not None:
            checkpoint["datamodule"] = run.datamodule.state_dict()
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def read(strategy: Strategy, path: str | Path) -> dict[str, Any]:
    """Return the checkpoint at `path`; called on every rank.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError, CheckpointMismatchError: says why.
    """
    checkpoint = strategy.load_checkpoint(path)
    check_format(checkpoint, path)
    return checkpoint


def check_format(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Refuse what is no Trainer's checkpoint, or one of a newer format.

    Raises:
        CheckpointCorruptError: it is of a newer format.
        CheckpointMismatchError: it has no weights.
    """
    version = checkpoint.get("format_version", FORMAT_VERSION)
    if version > FORMAT_VERSION:
        raise CheckpointCorruptError(
            f"{str(path)!r} has format version {version}, made by stratagem "
            f"{checkpoint.get('stratagem_version')}; this is stratagem {__version__}, which reads "
            f"up to version {FORMAT_VERSION}: upgrade stratagem-core"
        )
    if "state_dict" not in checkpoint:
        raise CheckpointMismatchError(
            f"{str(path)!r} has no 'state_dict'; it has {', '.join(map(str, checkpoint))}: "
            "expected a checkpoint that a Trainer saved (one of Lite's is loaded with Lite.load)"
        )


def restore_model(run: Run, prepared: Prepared, checkpoint: dict[str, Any]) -> None:
    """Load the weights; called on every rank."""
    trainer, module = run.trainer, run.module
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
    module.on_load_checkpoint(checkpoint)
    run.strategy.load_model_state(prepared, checkpoint["state_dict"])


def restore_training(
    run: Run, prepared: Prepared, checkpoint: dict[str, Any], path: str | Path
) -> None:
    """Load everything but the weights; called on every rank.

    Raises:
        CheckpointMismatchError: it has only weights, or another number of optimizers.
    """
    if "progress" not in checkpoint:
        raise CheckpointMismatchError(
            f"{str(path)!r} holds weights only, so training cannot be resumed from it: load them "
            "with Module.load_from_checkpoint and fit without ckpt_path"
        )
    strategy = run.strategy
    for what, saved, own in (
        ("optimizers", checkpoint["optimizer_states"], prepared.optimizers),
        ("schedulers", checkpoint["lr_schedulers"], run.schedulers),
    ):
        if len(saved) != len(own):
            raise CheckpointMismatchError(
                f"{str(path)!r} was saved with {len(saved)} {what}, but configure_optimizers() "
                f"returns {len(own)}: return what it was saved with"
            )
    for optimizer, state in zip(prepared.optimizers, checkpoint["optimizer_states"], strict=True):
        strategy.load_optimizer_state(prepared, optimizer, state)
        # It has stepped before the checkpoint; schedulers warn where they see no step before them.
        optimizer._opt_called = True  # type: ignore[attr-defined]
    for config, state in zip(run.schedulers, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    strategy.precision.load_state_dict(checkpoint["precision"])
    states = checkpoint["callbacks"]
    for callback in run.trainer.callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    if run.datamodule is not None and "datamodule" in checkpoint:
        run.datamodule.load_state_dict(checkpoint["datamodule"])
    run.progress.load_state_dict(checkpoint["progress"])
    if "ranks" in checkpoint and run.rank_state is not None:
        run.rank_state.resume(checkpoint["ranks"])


def find(trainer: Trainer, asked: str | Path) -> Path:
    """Return the path that "best", "last" or a path means; the same on every rank.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    from stratagem.callbacks.model_checkpoint import ModelCheckpoint

    if asked not in ("best", "last"):
        return Path(asked)
    savers = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
    if not savers:
        raise CheckpointNotFoundError(
            f"ckpt_path={str(asked)!r} needs a ModelCheckpoint among the callbacks; there is none: "
            "pass a path"
        )
    found = ""
    if asked == "best":
        found = next((c.best_model_path for c in savers if c.best_model_path), "")
    else:
        found = next((c.last_model_path for c in savers if c.last_model_path), "")
        folders = [c.dirpath for c in savers if c.dirpath is not None]
        if not found:
            files = [file for folder in folders for file in folder.glob("*.ckpt")]
            found = str(max(files, key=lambda file: file.stat().st_mtime_ns)) if files else ""
    found = trainer.strategy.broadcast(found)
    if not found:
        raise CheckpointNotFoundError(
            f"ckpt_path={str(asked)!r}: no checkpoint has been saved yet in "
            f"{', '.join(str(c.dirpath) for c in savers)}: fit first, or pass a path. "
            "A new run saves in a new folder, unless ModelCheckpoint is given dirpath="
        )
    return Path(found)


def _require_plain(data: Any, whose: str) -> None:
    if culprit := find_culprit(data):
        raise CheckpointContentError(
            f"{whose} cannot be saved: {culprit}, which could not be loaded without executing "
            "code. Keep numbers, strings, tensors, and dicts, lists, tuples and sets of them; for "
            "hyperparameters, save_hyperparameters(ignore=[...]) leaves one out"
        )


def _kind(thing: object) -> str:
    return type(thing).__name__
