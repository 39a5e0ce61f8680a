"""Random numbers of a part of a model: a stream for each rank inside, the same one outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import torch
from torch import Tensor


class OwnStream:
    """Gives each rank random numbers of its own, so that dropout masks do not repeat.

    Outside, the ranks draw the same numbers. Inside, a rank draws from a stream that follows from
    theirs and from the rank. Where it has drawn, theirs moves on by one number.

    Args:
        rank: the index among the ranks.
        generators: the generators that draw; see `generators_of`.
        seed: returns the seed of the stream, from a number of the common one and the rank.
    """

    def __init__(
        self,
        rank: int,
        generators: Sequence[torch.Generator],
        seed: Callable[[int, int], int] = lambda common, rank: common * 4096 + rank,
    ) -> None:
        self._generators = generators
        self._outside = [generator.get_state() for generator in self._generators]
        self._begun: list[Tensor] = []
        self._within: list[Tensor] = []
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.manual_seed(seed(crc32(state.numpy().tobytes()), rank))
            self._begun.append(generator.get_state())

    def pause(self) -> None:
        """Draw as all ranks do, until `resume`."""
        self._within = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)

    def resume(self) -> None:
        """Draw from the own stream again."""
        self._outside = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._within, strict=True):
            generator.set_state(state)

    def end(self) -> None:
        """Return to the numbers that all ranks draw."""
        states = zip(self._generators, self._outside, self._begun, strict=True)
        for generator, outside, begun in states:
            has_drawn = not torch.equal(generator.get_state(), begun)
            generator.set_state(outside)
            if has_drawn:
                torch.rand(1, generator=generator, device=generator.device)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generator of the CPU, and the one of a device."""
    if device.type == "cpu":
        return [torch.default_generator]
    generators = torch.get_device_module(device).default_generators
    return [torch.default_generator, generators[device.index or 0]]
