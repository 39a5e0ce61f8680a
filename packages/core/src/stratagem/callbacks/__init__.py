"""Callbacks: what happens at the events of a run, beside the training itself."""

from stratagem.callbacks.callback import Callback
from stratagem.callbacks.device_stats import DeviceStatsMonitor
from stratagem.callbacks.early_stopping import EarlyStopping
from stratagem.callbacks.model_checkpoint import ModelCheckpoint
from stratagem.callbacks.progress_bar import ProgressBar

__all__ = ["Callback", "DeviceStatsMonitor", "EarlyStopping", "ModelCheckpoint", "ProgressBar"]
