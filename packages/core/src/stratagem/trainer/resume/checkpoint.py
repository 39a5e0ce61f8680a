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
from collections.abc import Iterable
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
from stratagem.trainer.resume.rank_state import FORM as RANK_FORM, state_of_rank

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.trainer.run import Run
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


class Saves:
    """Saves the checkpoints of a run.

    Args:
        run: what is saved.

    Attributes:
        deferred: the checkpoints to save after the current optimizer step.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
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
        run = self._run
        if run.is_within_step and not weights_only:
            self.deferred.append(path)
            return
        # A run that resumes from this checkpoint does not write these rows again.
        run.rows.flush()
        weights = weights or self.weights()
        checkpoint = collect_checkpoint(run, weights, weights_only=weights_only)
        save = run.profiling.wrap("save_checkpoint", run.runtime.checkpoint_writer.save)
        save(checkpoint, path)
        restarts = run.resume_point.restarts
        if restarts is not None and not weights_only:
            run.strategy.checkpoint_io.when_durable(lambda: restarts.saved(path))

    def weights(self) -> Weights:
        """Return the model's state for a checkpoint; called on every rank."""
        return collect_weights(self._run)

    def flush_deferred(self) -> None:
        """Save the checkpoints that were requested within the last optimizer step."""
        deferred, self.deferred = self.deferred, []
        for path in dict.fromkeys(deferred):
            self.save(path, weights_only=False)

    def save_interrupted(self) -> str | None:
        """Save a checkpoint before a signal ends the run; return its path."""
        trainer = self._run.trainer
        saver = trainer.checkpoint_callback
        if saver is None or saver.dirpath is None or trainer.options.fast_dev_run:
            return None
        path = saver.save_to_resume_from(trainer, "interrupted")
        trainer.checkpoint_writer.finish()
        return path


def collect_weights(run: Run) -> Weights:
    """Return the model's state; called on every rank."""
    prepared = run.require_prepared()
    state = model_state(run.strategy, prepared)
    return Weights(state, nonfinite_weights(run.strategy, prepared, state))


def collect_checkpoint(run: Run, weights: Weights, *, weights_only: bool) -> dict[str, Any]:
    """Return a checkpoint of the run; called on every rank.

    Tensors in it alias the live ones.

    Args:
        run: what is saved.
        weights: the model's state.
        weights_only: leave optimizer and loop state out.

    Raises:
        CheckpointContentError: something that the user stores is not weights-only-safe data; says
            whose.
    """
    trainer, module, strategy = run.trainer, run.module, run.strategy
    prepared = run.require_prepared()
    checkpoint: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "stratagem_version": __version__,
        "run": run.resume_point.run_id,
        "strategy": trainer.plan.strategy.name,
        "world_size": strategy.ranks.world_size,
        "epoch": run.state.epoch,
        "global_step": run.state.global_step,
        "state_dict": weights.state,
        **_hyper_parameters(module, ""),
        **({} if run.datamodule is None else _hyper_parameters(run.datamodule, "datamodule_")),
        **({"nonfinite": weights.nonfinite} if weights.nonfinite else {}),
    }
    if not weights_only:
        if run.step is not None and run.step.is_under_way and strategy.ranks.is_global_zero:
            warnings.warn(
                "this checkpoint is saved within an optimizer step that an error has ended: a run "
                "that resumes from it takes that step's batches again, but with the RNG states "
                "and the buffers (such as those of batch norm) of the error's time, and values "
                "that the step has logged count twice",
                stacklevel=3,
            )
        callbacks = {c.state_key: c.state_dict() for c in trainer.callbacks}
        for key, state in callbacks.items():
            _require_plain(state, f"the state of the callback {key}")
        run.limits.note_delayed_stop(run.state)
        checkpoint.update(
            progress=run.state.state_dict(),
            optimizer_states=[
                strategy.optimizer_state(prepared, optimizer) for optimizer in prepared.optimizers
            ],
            lr_schedulers=run.schedulers.state(),
            precision=strategy.precision.state_dict(),
            ranks=gather_states(strategy.ranks, state_of_rank(run)),
            callbacks={key: state for key, state in callbacks.items() if state},
        )
        if own := strategy_state(strategy, prepared, prepared.optimizers):
            checkpoint["strategy_state"] = own
        if run.datamodule is not None:
            checkpoint["datamodule"] = run.datamodule.state_dict()
    trainer._extend_checkpoint(checkpoint)
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
        CheckpointNotFoundError, CheckpointCorruptError, CheckpointMismatchError: says why.
    """
    return check_trainer_checkpoint(writer.load(path), path)


def restore_model(
    run: Run, prepared: PreparedModel, checkpoint: dict[str, Any], path: str | Path
) -> None:
    """Load the weights; called on every rank.

    Raises:
        CheckpointMismatchError: they are another model's.
    """
    trainer, module = run.trainer, run.module
    for callback in run.callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
    module.on_load_checkpoint(checkpoint)
    with naming(path):
        # Removed from the dict, so that it is freed before the optimizers' states are loaded.
        state = checkpoint.pop("state_dict")
        run.strategy.load_model_state(prepared, state, strict=module.strict_loading is not False)


def restore_training(
    run: Run, prepared: PreparedModel, checkpoint: dict[str, Any], path: str | Path
) -> None:
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
    strategy = run.strategy
    for what, saved, own in (
        ("optimizers", checkpoint["optimizer_states"], prepared.optimizers),
        ("schedulers", checkpoint["lr_schedulers"], run.schedulers.configs),
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
        run.schedulers.load_state(checkpoint["lr_schedulers"])
    with naming(path), as_mismatch("the precision"):
        strategy.precision.load_state_dict(checkpoint["precision"])
    states = checkpoint["callbacks"]
    for callback in run.trainer.callbacks:
        if callback.state_key in states:
            with naming(path), as_mismatch(f"the callback {callback.state_key}"):
                saved_by_it = states[callback.state_key]
                if type(callback).__module__.partition(".")[0] in _OF_ONE_FORM:
                    check_kinds(callback.state_dict(), saved_by_it, f"{type(callback).__name__}'s")
                callback.load_state_dict(saved_by_it)
    _warn_of_missing(states, run.trainer, path)
    if run.datamodule is not None and "datamodule" in checkpoint:
        with naming(path), as_mismatch("the DataModule"):
            run.datamodule.load_state_dict(checkpoint["datamodule"])
    state, every = run.state, run.trainer.options.reload_dataloaders_every_n_epochs
    state.load_state_dict(checkpoint["progress"])
    run.trainer.should_stop |= state.stop_delayed
    if every and state.epoch >= every and run.fit_data is not None:
        # The loaders of the resumed epoch were made in an earlier one.
        run.fit_data.reopen(state.epoch - state.epoch % every)
    if "ranks" in checkpoint and run.rank_state is not None:
        with naming(path), as_mismatch("the data, the random numbers or the epoch of a rank"):
            run.rank_state.resume(RankStates(checkpoint["ranks"], RANK_FORM))
    # Last, because it may depend on all other state.
    own = checkpoint.get("strategy_state", {})
    load_strategy_state(strategy, prepared, prepared.optimizers, own)


def _warn_of_missing(states: Iterable[str], trainer: Trainer, path: str | Path) -> None:
    """Warn on rank 0 about states of callbacks that this Trainer does not have."""
    own = {callback.state_key for callback in trainer.callbacks}
    # What a ModelCheckpoint has kept is of a folder of its own, and one without it goes on as well.
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
