"""Job: the request of a run, and its result if it ran in other processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

from stratagem.compile import adopt_compiled, own_module
from stratagem.errors import ConfigurationError
from stratagem.module.datamodule import DataModule
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.interfaces.checkpoint_io import CheckpointIO
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.interfaces.ranks import Ranks
    from stratagem.interfaces.strategy import Strategy
    from stratagem.module.module import Module
    from stratagem.trainer.context import FitState
    from stratagem.trainer.metrics.metrics import LatestMetrics
    from stratagem.trainer.trainer import Trainer


Stage = Literal["fit", "validate", "test", "predict"]


@dataclass(frozen=True)
class Job:
    """One request to fit, validate, test or predict.

    The launcher passes the Job to each rank.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        model: the Module.
        datamodule: the DataModule. None: the data comes from `loaders` or from the Module.
        loaders: the user's loaders for training, or for the stage's evaluation.
        val_loaders: the user's loaders for validation in a fit.
        keeps_predictions: whether the results of `predict_step` are kept until the end.
        ckpt_path: the checkpoint to resume from, or to load weights from: a path, "last" or "best".
    """

    stage: Stage
    model: Module
    datamodule: DataModule | None = None
    loaders: Any = None
    val_loaders: Any = None
    ckpt_path: str | Path | None = None
    keeps_predictions: bool = True

    @classmethod
    def of(
        cls,
        stage: Stage,
        model: Module,
        loaders: Any,
        datamodule: DataModule | str | Path | None,
        ckpt_path: str | Path | None,
        val_loaders: Any = None,
    ) -> Job:
        """Return a Job, with each argument assigned to a field by its type.

        Users may pass a DataModule as loaders. They may also pass a checkpoint as the datamodule,
        since the third argument of `validate` in Lightning is a checkpoint.

        Raises:
            ConfigurationError: if both loaders and a datamodule are given, or if an argument has a
                wrong type.
        """
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        if isinstance(datamodule, (str, Path)) and ckpt_path is None:
            datamodule, ckpt_path = None, datamodule
        if ckpt_path is not None and not isinstance(ckpt_path, (str, Path)):
            raise ConfigurationError(
                f"ckpt_path={ckpt_path!r}: expected a path, a URL, 'best' or 'last'"
            )
        if ckpt_path not in (None, "best", "last"):
            ckpt_path = paths.parse_user_path(ckpt_path)
        for passed in (loaders, datamodule):
            if isinstance(passed, type):
                raise ConfigurationError(
                    f"expected data for {stage}(), received the class {passed.__name__}: pass an "
                    f"instance: {passed.__name__}(...)"
                )
        if datamodule is not None and not isinstance(datamodule, DataModule):
            raise ConfigurationError(
                f"datamodule={datamodule!r}: expected a stratagem.DataModule, received a "
                f"{type(datamodule).__name__}: pass loaders as the argument after the model"
            )
        if loaders is not None and datamodule is not None:
            raise ConfigurationError(
                "both data loaders and a datamodule were passed; pass one of them"
            )
        return cls(stage, own_module(model), datamodule, loaders, val_loaders, ckpt_path)

    def attach(self, trainer: Trainer) -> None:
        """Set the Trainer of the model and the DataModule."""
        self.model.trainer = trainer
        if self.datamodule is not None:
            self.datamodule.trainer = trainer

    def unused_validation(self) -> str:
        """Return which of validation code and loader a fit lacks, if it has the other; else ""."""
        name, has_step = type(self.model).__name__, self.model.defines("validation_step")
        has_loader = self.val_loaders is not None or self.model.defines("val_dataloader")
        if has_loader and not has_step:
            return (
                f"there is a loader for validation, but {name} has no validation_step, so there "
                "is no validation"
            )
        if has_step and not has_loader and self.datamodule is None:
            return (
                f"{name} has validation_step, but there is no loader for validation: pass "
                "val_dataloaders to fit()"
            )
        return ""

    def prepare_data(self, ranks: Ranks) -> None:
        """Call `prepare_data` on rank 0 of each node, or on global rank 0; other ranks wait."""
        own = [self.model] if self.model.defines("prepare_data") else []
        sources = [source for source in (self.datamodule, *own) if source is not None]
        if not sources:
            return
        for source in sources:
            if (ranks.local_rank if source.prepare_data_per_node else ranks.global_rank) == 0:
                source.prepare_data()
        ranks.barrier("prepare_data")


def collect_result(
    trainer: Trainer, prepared: PreparedModel, state: FitState, result: Any
) -> dict[str, Any]:
    """Return the state of a run for the launching process; called on every rank.

    Args:
        trainer: its run is finished.
        prepared: the prepared model of the run.
        state: the state of the training loop.
        result: the result of the run.
    """
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    return {
        "result": result,
        "weights": _whole_weights(trainer.strategy, prepared),
        "callback_metrics": trainer.callback_metrics,
        "logged_metrics": trainer.logged_metrics,
        "callbacks": {key: state for key, state in states.items() if state},
        "progress": state.state_dict(),
    }


def _whole_weights(strategy: Strategy, prepared: PreparedModel) -> dict[str, Any]:
    """Return the weights, whole on rank 0, even if checkpoints are saved in shards."""
    without_shards = SimpleNamespace(supports_shards=False)
    own, strategy.checkpoint_io = strategy.checkpoint_io, cast("CheckpointIO", without_shards)
    try:
        return strategy.model_state(prepared)
    finally:
        strategy.checkpoint_io = own


def load_result(
    outcome: dict[str, Any],
    model: Module,
    trainer: Trainer,
    *,
    latest: LatestMetrics,
    state: FitState,
) -> Any:
    """Load the state from `collect_result` in the launching process; return the run's result."""
    adopt_compiled(model)  # as on each rank, so that the keys match
    if not set(model.state_dict()) >= set(outcome["weights"]):
        model.configure_model()
    if not set(model.state_dict()) >= set(outcome["weights"]):
        # The converted model may have more entries, such as scales.
        trainer.strategy.precision.convert_module(model)
    model.load_state_dict(outcome["weights"])
    if trainer.options.weights is not None:
        trainer.options.weights.mark(model)
    latest.values = dict(outcome["callback_metrics"])
    logged = outcome["logged_metrics"]
    latest.for_loggers = dict.fromkeys(logged)
    latest.evaluation_steps = {k: v for k, v in logged.items() if k not in latest.values}
    states = outcome["callbacks"]
    for callback in trainer.callbacks:
        if callback.state_key in states:
            callback.load_remote_state(states[callback.state_key])
    state.load_state_dict(outcome["progress"])
    return outcome["result"]
