"""Random numbers of a region: a stream for each rank inside, the same one for all outside."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor


class OwnStream:
    """Gives each part random numbers of its own, so that dropout masks do not repeat.

    Outside of regions the ranks of a sequence draw the same numbers. A region draws from a stream
    that follows from theirs and from the rank. Where it has drawn, theirs moves on by one number.

    Args:
        rank: of the part.
        device: the device that computes.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._outside = [generator.get_state() for generator in self._generators]
        self._begun: list[Tensor] = []
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.manual_seed(crc32(state.numpy().tobytes()) * 4096 + rank)
            self._begun.append(generator.get_state())

    def end(self) -> None:
        """Return to the numbers that all ranks draw."""
        states = zip(self._generators, self._outside, self._begun, strict=True)
        for generator, outside, begun in states:
            has_drawn = not torch.equal(generator.get_state(), begun)
            generator.set_state(outside)
            if has_drawn:
                torch.rand(1, generator=generator, device=generator.device)
