"""IPUAccelerator: Graphcore IPUs, which poptorch alone addresses."""

from __future__ import annotations

import torch

from stratagem.accelerators import Accelerator
from stratagem.discovery import Availability
from stratagem_hpu_ipu.ipu_probe import ipu_availability


class IPUAccelerator(Accelerator):
    """IPUs. No tensor of torch's lies on one: programs take batches from host memory.

    So there is no RNG state of theirs to save, and no stream to copy on.

    Example:
        >>> from stratagem_hpu_ipu.ipu_accelerator import IPUAccelerator
        >>> IPUAccelerator().device(3), IPUAccelerator().is_host
        (device(type='cpu'), True)
    """

    name = "ipu"
    process_group_backend = "gloo"
    requires_dedicated_strategies = True

    def availability(self) -> Availability:
        return ipu_availability()

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")
