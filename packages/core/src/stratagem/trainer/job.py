"""Job: the request of a run, and its result where it ran in other processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stratagem.compile import adopt_compiled, own_module
from stratagem.errors import ConfigurationError
from stratagem.module.datamodule import DataModule
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.interfaces.ranks import Ranks
    from stratagem.module.module import Module
    from stratagem.trainer.metrics.metrics import LatestMetrics
    from stratagem.trainer.progress import Progress
    from stratagem.trainer.run import Run
    from stratagem.trainer.trainer import Trainer


Stage = Literal["fit", "validate", "test", "predict"]


@dataclass(frozen=True)
class Job:
    """One request to fit, validate, test or predict.

    The launcher passes it to the run on each rank as one parameter.

    Attributes:
        stage: which of the four.
        model: the Module.
        datamodule: its data; None: `loaders`, or the Module's own.
        loaders: for training, or for the stage's evaluation; as the user passed them.
        val_loaders: for validation in a fit.
        keeps_predictions: whether what `predict_step` returns is kept until the end.
        ckpt_path: checkpoint to resume from, or whose weights to evaluate: a path, "last" or
            "best".
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
        """Return a Job; each argument goes where its type belongs.

        A DataModule may have been passed as loaders, and a checkpoint as the datamodule: in
        Lightning it is the third argument of `validate`.

        Raises:
            ConfigurationError: there are loaders and a datamodule, or something else in its place.
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
        """Let the model and the DataModule know their Trainer."""
        self.model.trainer = trainer
        if self.datamodule is not None:
            self.datamodule.trainer = trainer

    def prepare_data(self, ranks: Ranks) -> None:
        """Let rank 0 of each node, or of all, download, while the others wait."""
        own = [self.model] if self.model.defines("prepare_data") else []
        sources = [source for source in (self.datamodule, *own) if source is not None]
        if not sources:
            return
        for source in sources:
            if (ranks.local_rank if source.prepare_data_per_node else ranks.global_rank) == 0:
                source.prepare_data()
        ranks.barrier("prepare_data")


def collect_result(run: Run, result: Any) -> dict[str, Any]:
    """Return the state that the launching process loads; called on every rank.

    Args:
        run: the finished run.
        result: what it has returned.
    """
    states = {callback.state_key: callback.state_dict() for callback in run.trainer.callbacks}
    return {
        "result": result,
        "weights": run.strategy.model_state(run.require_prepared()),
        "callback_metrics": run.trainer.callback_metrics,
        "logged_metrics": run.trainer.logged_metrics,
        "callbacks": {key: state for key, state in states.items() if state},
        "progress": run.progress.state_dict(),
    }


def load_result(
    outcome: dict[str, Any],
    model: Module,
    trainer: Trainer,
    *,
    latest: LatestMetrics,
    progress: Progress,
) -> Any:
    """Load what `collect_result` returned in the launching process; return the run's result."""
    adopt_compiled(model)  # as on each rank, so that names agree
    if not set(model.state_dict()) >= set(outcome["weights"]):
        model.configure_model()
    if not set(model.state_dict()) >= set(outcome["weights"]):
        # To a model that has entries of its own, such as scales.
        trainer.strategy.precision.convert_module(model)
    model.load_state_dict(outcome["weights"])
    latest.values = dict(outcome["callback_metrics"])
    logged = outcome["logged_metrics"]
    latest.for_loggers = dict.fromkeys(logged)
    latest.evaluation_steps = {k: v for k, v in logged.items() if k not in latest.values}
    states = outcome["callbacks"]
    for callback in trainer.callbacks:
        if callback.state_key in states:
            callback.load_remote_state(states[callback.state_key])
    progress.load_state_dict(outcome["progress"])
    return outcome["result"]
