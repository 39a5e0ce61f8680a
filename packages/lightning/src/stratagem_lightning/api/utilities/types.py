"""What Lightning's annotations name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stratagem.trainer import SchedulerConfig as LRSchedulerConfig

__all__ = ["LRSchedulerConfig"]

STEP_OUTPUT = Tensor | Mapping[str, Any] | None
PATH = str | Path
DEVICE = torch.device | str | int
MAP_LOCATION = DEVICE | Callable[[Any, str], Any] | dict[DEVICE, DEVICE] | None
PRECISION = str | int
PLUGIN = Any
LITERAL_WARN = Literal["warn"]
OUT_DICT = dict[str, torch.Tensor]
EVALUATE_OUTPUT = list[Mapping[str, float]]
PREDICT_OUTPUT = list[Any] | list[list[Any]]
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerPLType = LRSchedulerTypeUnion


class LRSchedulerConfigType(TypedDict, total=False):
    """A scheduler with its options, as `configure_optimizers` may return it."""

    scheduler: LRSchedulerTypeUnion
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """An optimizer in a dict."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """An optimizer with its scheduler in a dict."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType


OptimizerLRScheduler = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[LRSchedulerTypeUnion | LRSchedulerConfigType]]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerConfig | OptimizerLRSchedulerConfig]
    | None
)
