"""The result of a run in other processes: weights, logged values, callbacks' states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.compile import adopt_compiled

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer.metrics.metrics import LatestMetrics
    from stratagem.trainer.progress import Progress
    from stratagem.trainer.run import Run
    from stratagem.trainer.trainer import Trainer


def collect(run: Run, result: Any) -> dict[str, Any]:
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


def load(
    outcome: dict[str, Any],
    model: Module,
    trainer: Trainer,
    *,
    latest: LatestMetrics,
    progress: Progress,
) -> Any:
    """Load what `collect` returned in the launching process; return the run's result."""
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
