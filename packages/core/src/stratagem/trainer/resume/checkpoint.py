"""The contents of a Trainer's checkpoint: collecting and restoring them.

======================  ==========================================================================
key                     value
======================  ==========================================================================
format_version          the version of this table; other versions are refused
stratagem_version       the version of Stratagem that saved the checkpoint
run                     the ID of the run that saved it; a resumed run keeps the ID
strategy, world_size    of the run that saved it; other strategies and sizes can load it
state_dict              weights and buffers by name
nonfinite               the name of a tensor in state_dict with NaN or infinity, if any
optimizer_states        the state of each optimizer, by parameter names
lr_schedulers           the state of each scheduler
precision               the state of the precision, such as a loss scale
strategy_state          the strategy's own state, by the name of its class, if any
epoch, global_step      for users: the current epoch, from 0, and the optimizer steps taken
progress                the progress of the training loop
ranks                   for each rank: RNG states, position in the data, values of the epoch
                        (`RankStates`, `EpochState`)
callbacks, datamodule   the states of callbacks and of the DataModule
hyper_parameters        the hyperparameters of save_hyperparameters
hparams_name            the argument that held all of them as one dict, if any
hparams_configs         the positions of OmegaConf's configs in them, if any
datamodule_...          the same three entries for the DataModule, if any
======================  ==========================================================================
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stratagem import __version__
from stratagem.checkpoint.trainer_format import FORMAT_VERSION, check_trainer_checkpoint
from stratagem.errors import CheckpointContentError, CheckpointMismatchError, naming
from stratagem.module.hyperparameters import HyperParametersMixin, savable
from stratagem.runtime.checkpoint_writer import (
    CheckpointWriter,
    load_strategy_state,
    model_state,
    nonfinite_weights,
    strategy_state,
)
from stratagem.state.rank_states import RankStates, gather_states
from stratagem.state.safe_data import find_offending_value
from stratagem.state.state_checks import as_mismatch, check_kinds
from stratagem.state.state_dict import with_names
from stratagem.storage import paths
from stratagem.trainer.context import Limits, RunContext
from stratagem.trainer.resume.rank_state import FORM as RANK_FORM, state_of_rank

if TYPE_CHECKING:
    from stratagem.callbacks import Callback
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.trainer.loaders.train_loader import FitData
    from stratagem.trainer.resume.find import ResumePoint
    from stratagem.trainer.resume.rank_state import RankState
    from stratagem.trainer.step.schedulers import Schedulers
    from stratagem.trainer.step.step import Step
    from stratagem.trainer.trainer import Trainer


_OF_ONE_FORM = ("stratagem", "stratagem_extras")
"""The packages whose callbacks have states of one form; those of others may change their kinds."""


class Weights(NamedTuple):
    """The state of a model for a checkpoint.

    Attributes:
        state: weights and buffers by name, which alias the live tensors.
        nonfinite: the name of a tensor that is not finite on some rank; "" if all are finite.
    """

    state: dict[str, Any]
    nonfinite: str


@dataclass(frozen=True, eq=False)
class Contents(RunContext):
    """The objects with state in a checkpoint, both for saving and for restoring.

    Attributes:
        prepared: the prepared model.
        schedulers: the learning rate schedulers.
        data: in a fit, this rank's data.
        former: the state of this rank in the last fit, if this run is no fit.
        step: in a fit, the optimizer step, which may have begun.
        resume_point: where the run has resumed, and the ID of the run.
    """

    prepared: PreparedModel
    schedulers: Schedulers
    data: FitData | None
    former: RankState | None
    step: Step | None
    resume_point: ResumePoint

    @property
    def rank_state(self) -> RankState | None:
        """The RNG states and the position in the data; reloaded loaders have another."""
        return self.former if self.data is None else self.data.rank_state


class Saves:
    """Saves the checkpoints of a run.

    Args:
        contents: returns the contents of a checkpoint.
        is_within_step: returns whether an optimizer step has begun, but is not yet complete.

    Attributes:
        deferred: the checkpoints to save after the current optimizer step.
    """

    def __init__(
        self, contents: Callable[[], Contents], is_within_step: Callable[[], bool]
    ) -> None:
        self._contents = contents
        self._is_within_step = is_within_step
        self.deferred: list[paths.Location] = []

    def save(
        self, path: paths.Location, *, weights_only: bool, weights: Weights | None = None
    ) -> None:
        """Save a checkpoint; within an optimizer step, save it after the step.

        Args:
            path: the file or folder of the checkpoint.
            weights_only: if True, save at once, without the state of the training.
            weights: the model's state, if the caller already has it.
        """
        if self._is_within_step() and not weights_only:
            self.deferred.append(path)
            return
        contents = self._contents()
        save = contents.profiling.wrap("save_checkpoint", self._save)
        save(contents, path, weights_only, weights or self.weights())
        restarts = contents.resume_point.restarts
        if restarts is not None and not weights_only:
            contents.strategy.checkpoint_io.when_durable(lambda: restarts.saved(path))

    def _save(self, contents: Contents, path: paths.Location, only: bool, weights: Weights) -> None:
        # A run that resumes from this checkpoint does not write these rows again.
        contents.rows.flush()
        checkpoint = collect_checkpoint(contents, weights, weights_only=only)
        contents.trainer.checkpoint_writer.save(checkpoint, path)

    def weights(self) -> Weights:
        """Return the model's state for a checkpoint; called on every rank."""
        contents = self._contents()
        state = model_state(contents.strategy, contents.prepared)
        return Weights(state, nonfinite_weights(contents.strategy, contents.prepared, state))

    def flush_deferred(self) -> None:
        """Save the checkpoints that were requested within the last optimizer step."""
        deferred, self.deferred = self.deferred, []
        for path in dict.fromkeys(deferred):
            self.save(path, weights_only=False)


def save_interrupted(trainer: Trainer) -> str | None:
    """Save a checkpoint before a signal ends the run; return its path."""
    saver = trainer.checkpoint_callback
    if saver is None or saver.dirpath is None or trainer.options.fast_dev_run:
        return None
    path = saver.save_to_resume_from(trainer, "interrupted")
    trainer.checkpoint_writer.finish()
    return path


def collect_checkpoint(
    contents: Contents, weights: Weights, *, weights_only: bool
) -> dict[str, Any]:
    """Return a checkpoint of the run; called on every rank.

    Tensors in it share memory with the live tensors.

    Args:
        contents: the objects to save.
        weights: the state of the model.
        weights_only: omit optimizer and loop state.

    Raises:
        CheckpointContentError: an object of the user is not weights-only-safe data; the message
            names its owner.
    """
    trainer, module, strategy = contents.trainer, contents.module, contents.strategy
    prepared, state, datamodule = contents.prepared, contents.state, contents.datamodule
    checkpoint: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "stratagem_version": __version__,
        "run": contents.resume_point.run_id,
        "strategy": trainer.plan.strategy.name,
        "world_size": strategy.ranks.world_size,
        "epoch": state.epoch,
        "global_step": state.global_step,
        "state_dict": weights.state,
        **_hyper_parameters(module, ""),
        **({} if datamodule is None else _hyper_parameters(datamodule, "datamodule_")),
        **({"nonfinite": weights.nonfinite} if weights.nonfinite else {}),
    }
    if not weights_only:
        step = contents.step
        if step is not None and step.is_under_way and strategy.ranks.is_global_zero:
            warnings.warn(
                "this checkpoint is saved within an optimizer step that an error has ended: a run "
                "that resumes from it takes that step's batches again, but with the RNG states "
                "and the buffers (such as those of batch norm) of the error's time, and values "
                "that the step has logged count twice",
                stacklevel=3,
            )
        callbacks = {c.state_key: c.state_dict() for c in trainer.callbacks}
        for key, own in callbacks.items():
            _require_plain(own, f"the state of the callback {key}")
        Limits(trainer).note_delayed_stop(state)
        checkpoint.update(
            progress=state.state_dict(),
            optimizer_states=[
                strategy.optimizer_state(prepared, optimizer) for optimizer in prepared.optimizers
            ],
            lr_schedulers=contents.schedulers.state(),
            precision=strategy.precision.state_dict(),
            ranks=gather_states(strategy.ranks, state_of_rank(strategy, contents.rank_state)),
            callbacks={key: own for key, own in callbacks.items() if own},
        )
        if of_strategy := strategy_state(strategy, prepared, prepared.optimizers):
            checkpoint["strategy_state"] = of_strategy
        if datamodule is not None:
            checkpoint["datamodule"] = datamodule.state_dict()
    trainer.extend_checkpoint(checkpoint)
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def _hyper_parameters(holder: HyperParametersMixin, prefix: str) -> dict[str, Any]:
    """Return a checkpoint's entries for hyperparameters; a model's are always there."""
    kept, _, places = savable(holder.hparams)
    entries: dict[str, Any] = {f"{prefix}hyper_parameters": kept} if kept or not prefix else {}
    if kept and holder.hparams_name:
        entries[f"{prefix}hparams_name"] = holder.hparams_name
    if places:
        entries[f"{prefix}hparams_configs"] = places
    return entries


def read_checkpoint(writer: CheckpointWriter, path: str | Path) -> dict[str, Any]:
    """Return the checkpoint at `path`; called on every rank.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError, CheckpointMismatchError: the checkpoint is
            missing, damaged or does not match; the message has the reason.
    """
    return check_trainer_checkpoint(writer.load(path), path)


def restore_model(
    contents: Contents,
    callbacks: Iterable[Callback],
    checkpoint: dict[str, Any],
    path: str | Path,
) -> None:
    """Load the weights; called on every rank.

    Args:
        contents: the objects to restore.
        callbacks: the callbacks of the run, which may change the checkpoint.
        checkpoint: the checkpoint; its weights are removed.
        path: the path of the checkpoint, for errors.

    Raises:
        CheckpointMismatchError: the weights belong to another model.
    """
    trainer, module = contents.trainer, contents.module
    for callback in callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
    module.on_load_checkpoint(checkpoint)
    with naming(path):
        # Remove it from the dict, to free it before the states of the optimizers are loaded.
        state = checkpoint.pop("state_dict")
        strict = module.strict_loading is not False
        contents.strategy.load_model_state(contents.prepared, state, strict=strict)


def restore_training(contents: Contents, checkpoint: dict[str, Any], path: str | Path) -> None:
    """Load all state except the weights; called on every rank.

    Raises:
        CheckpointMismatchError: if the checkpoint has only weights, or another number of
            optimizers.
    """
    if "progress" not in checkpoint:
        raise CheckpointMismatchError(
            f"{str(path)!r} holds weights only, so training cannot be resumed from it: load them "
            "with Module.load_from_checkpoint and fit without ckpt_path"
        )
    trainer, strategy, prepared = contents.trainer, contents.strategy, contents.prepared
    schedulers, datamodule, data = contents.schedulers, contents.datamodule, contents.data
    for what, saved, own in (
        ("optimizers", checkpoint["optimizer_states"], prepared.optimizers),
        ("schedulers", checkpoint["lr_schedulers"], schedulers.configs),
    ):
        if len(saved) != len(own):
            raise CheckpointMismatchError(
                f"{str(path)!r} was saved with {len(saved)} {what}, but configure_optimizers() "
                f"returns {len(own)}: return what it was saved with"
            )
    for optimizer, state in zip(prepared.optimizers, checkpoint["optimizer_states"], strict=True):
        with naming(path):
            named = with_names(optimizer, prepared.original, state)
            strategy.load_optimizer_state(prepared, optimizer, named)
        # It has stepped before the checkpoint; schedulers warn where they see no step before them.
        optimizer._opt_called = True  # type: ignore[attr-defined]
    with naming(path):
        schedulers.load_state(checkpoint["lr_schedulers"])
    with naming(path), as_mismatch("the precision"):
        strategy.precision.load_state_dict(checkpoint["precision"])
    states = checkpoint["callbacks"]
    for callback in trainer.callbacks:
        if callback.state_key in states:
            with naming(path), as_mismatch(f"the callback {callback.state_key}"):
                saved_by_it = states[callback.state_key]
                if type(callback).__module__.partition(".")[0] in _OF_ONE_FORM:
                    check_kinds(callback.state_dict(), saved_by_it, f"{type(callback).__name__}'s")
                callback.load_state_dict(saved_by_it)
    _warn_of_missing(states, trainer, path)
    if datamodule is not None and "datamodule" in checkpoint:
        with naming(path), as_mismatch("the DataModule"):
            datamodule.load_state_dict(checkpoint["datamodule"])
    state, every = contents.state, trainer.options.reload_dataloaders_every_n_epochs
    state.load_state_dict(checkpoint["progress"])
    trainer.should_stop |= state.stop_delayed
    if every and state.epoch >= every and data is not None:
        # The loaders of the resumed epoch were made in an earlier one.
        data.reopen(state.epoch - state.epoch % every)
    rank_state = contents.rank_state
    if "ranks" in checkpoint and rank_state is not None:
        with naming(path), as_mismatch("the data, the random numbers or the epoch of a rank"):
            rank_state.resume(RankStates(checkpoint["ranks"], RANK_FORM))
    # Last, because it may depend on all other state.
    own = checkpoint.get("strategy_state", {})
    load_strategy_state(strategy, prepared, prepared.optimizers, own)


def _warn_of_missing(states: Iterable[str], trainer: Trainer, path: str | Path) -> None:
    """Warn on rank 0 about states of callbacks that this Trainer does not have."""
    own = {callback.state_key for callback in trainer.callbacks}
    # A ModelCheckpoint with another folder does not need the state of the former one.
    missing = [key for key in states if key not in own and not key.startswith("ModelCheckpoint")]
    if missing and trainer.is_global_zero:
        warnings.warn(
            f"{str(path)!r} holds the states of callbacks that this Trainer does not have: "
            f"{', '.join(missing)}; they are not restored. Pass those callbacks, with the same "
            "arguments, to go on with them",
            stacklevel=3,
        )


def _require_plain(data: Any, whose: str) -> None:
    if offending := find_offending_value(data):
        raise CheckpointContentError(
            f"{whose} cannot be saved: {offending}, which could not be loaded without executing "
            "code. Keep numbers, strings, tensors, and dicts, lists, tuples and sets of them; for "
            "hyperparameters, save_hyperparameters(ignore=[...]) leaves one out"
        )
