"""What both front ends stand on: a resolved plan, its strategy, and a model prepared for it."""

from __future__ import annotations

from stratagem.runtime.checkpoint_writer import CheckpointWriter
from stratagem.runtime.empty_init import SkippedInit
from stratagem.runtime.optimizer import LiteOptimizer
from stratagem.runtime.runtime import as_list

__all__ = ["CheckpointWriter", "LiteOptimizer", "SkippedInit", "as_list"]
