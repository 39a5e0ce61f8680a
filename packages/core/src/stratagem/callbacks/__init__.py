"""Callbacks: what happens at the events of a run, beside the training itself.

Each is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names
from stratagem.callbacks.callback import Callback

if TYPE_CHECKING:
    from stratagem.callbacks.device_stats import DeviceStatsMonitor
    from stratagem.callbacks.early_stopping import EarlyStopping
    from stratagem.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from stratagem.callbacks.gradient_accumulation import GradientAccumulationScheduler
    from stratagem.callbacks.lambda_callback import LambdaCallback
    from stratagem.callbacks.lr_monitor import LearningRateMonitor
    from stratagem.callbacks.model_checkpoint import ModelCheckpoint
    from stratagem.callbacks.model_summary import ModelSummary
    from stratagem.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from stratagem.callbacks.prediction_writer import BasePredictionWriter
    from stratagem.callbacks.progress_bar import ProgressBar
    from stratagem.callbacks.progress_bar_names import RichProgressBar, TQDMProgressBar
    from stratagem.callbacks.pruning import ModelPruning
    from stratagem.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from stratagem.callbacks.throughput import ThroughputMonitor
    from stratagem.callbacks.timer import Timer
    from stratagem.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "BackboneFinetuning": ".finetuning",
            "BaseFinetuning": ".finetuning",
            "BasePredictionWriter": ".prediction_writer",
            "DeviceStatsMonitor": ".device_stats",
            "EMAWeightAveraging": ".weight_averaging",
            "EarlyStopping": ".early_stopping",
            "GradientAccumulationScheduler": ".gradient_accumulation",
            "LambdaCallback": ".lambda_callback",
            "LearningRateMonitor": ".lr_monitor",
            "ModelCheckpoint": ".model_checkpoint",
            "ModelPruning": ".pruning",
            "ModelSummary": ".model_summary",
            "OnExceptionCheckpoint": ".on_exception_checkpoint",
            "ProgressBar": ".progress_bar",
            "RichProgressBar": ".progress_bar_names",
            "StochasticWeightAveraging": ".stochastic_weight_averaging",
            "TQDMProgressBar": ".progress_bar_names",
            "ThroughputMonitor": ".throughput",
            "Timer": ".timer",
            "WeightAveraging": ".weight_averaging",
        },
    )


__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "RichProgressBar",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]


def __dir__() -> list[str]:
    return sorted(__all__)
