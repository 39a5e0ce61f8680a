"""Loggers: where logged values go."""

from stratagem.loggers.csv_logger import CSVLogger
from stratagem.loggers.logger import Logger

__all__ = ["CSVLogger", "Logger"]
