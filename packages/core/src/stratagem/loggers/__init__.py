"""Loggers: where logged values go. Each is imported when it is used, and with it its library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names
from stratagem.loggers.logger import Logger

if TYPE_CHECKING:
    from stratagem.loggers.comet_logger import CometLogger
    from stratagem.loggers.csv_logger import CSVLogger
    from stratagem.loggers.mlflow_logger import MLFlowLogger
    from stratagem.loggers.neptune_logger import NeptuneLogger
    from stratagem.loggers.tensorboard_logger import TensorBoardLogger
    from stratagem.loggers.wandb_logger import WandbLogger
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "CSVLogger": ".csv_logger",
            "CometLogger": ".comet_logger",
            "MLFlowLogger": ".mlflow_logger",
            "NeptuneLogger": ".neptune_logger",
            "TensorBoardLogger": ".tensorboard_logger",
            "WandbLogger": ".wandb_logger",
        },
    )


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
