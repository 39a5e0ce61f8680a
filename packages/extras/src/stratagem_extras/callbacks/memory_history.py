"""MemoryHistory: the allocations of a full GPU, as a file for torch's viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stratagem.strategies import Strategy

_ENTRIES = 100_000
"""The latest allocations that are kept."""


class MemoryHistory:
    """Records the allocations of a CUDA device, and writes them after an out-of-memory error.

    Args:
        strategy: the strategy of the run.
        memory: `torch.cuda.memory`, or an object with its functions.

    Attributes:
        is_recording: whether allocations are recorded.
    """

    def __init__(self, strategy: Strategy, memory: Any = torch.cuda.memory) -> None:
        self._strategy = strategy
        self._memory = memory
        self.is_recording = strategy.device.type == "cuda"
        if self.is_recording:
            # torch documents both functions, though their names begin with an underscore.
            memory._record_memory_history(max_entries=_ENTRIES, stacks="python")

    def write_after(self, error: BaseException, folder: Path | None) -> Path | None:
        """Write the allocations if memory was full; return the path of the file, or None."""
        if not self.is_recording or not self._strategy.accelerator.is_out_of_memory(error):
            return None
        rank = self._strategy.ranks.global_rank
        path = (folder or Path.cwd()) / f"memory-of-rank-{rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._memory._dump_snapshot(str(path))
        return path

    def stop(self) -> None:
        """End the recording."""
        if self.is_recording:
            self.is_recording = False
            self._memory._record_memory_history(enabled=None)
