"""Loggers: where logged values go. Each is imported when it is used, and with it its library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stratagem.loggers.logger import Logger

if TYPE_CHECKING:
    from stratagem.loggers.comet_logger import CometLogger
    from stratagem.loggers.csv_logger import CSVLogger
    from stratagem.loggers.mlflow_logger import MLFlowLogger
    from stratagem.loggers.neptune_logger import NeptuneLogger
    from stratagem.loggers.tensorboard_logger import TensorBoardLogger
    from stratagem.loggers.wandb_logger import WandbLogger
else:
    _HOMES = {
        "CSVLogger": "csv_logger",
        "CometLogger": "comet_logger",
        "MLFlowLogger": "mlflow_logger",
        "NeptuneLogger": "neptune_logger",
        "TensorBoardLogger": "tensorboard_logger",
        "WandbLogger": "wandb_logger",
    }

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


__all__ = [
    "CSVLogger",
    "CometLogger",
    "Logger",
    "MLFlowLogger",
    "NeptuneLogger",
    "TensorBoardLogger",
    "WandbLogger",
]


def __dir__() -> list[str]:
    return sorted(__all__)
