"""UnitStreams: random numbers of the units of a pipeline, which differ between units and stages."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from stratagem_mesh.pipeline.ranks import PipelineRanks
from stratagem_mesh.randomness import generators_of


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module has an option of dropout that is not 0."""
    for part in model.modules():
        config = getattr(part, "config", None)
        settings = {**vars(config), **vars(part)} if config is not None else vars(part)
        for name, value in settings.items():
            is_named = "drop" in name or (name == "p" and "Drop" in type(part).__name__)
            if is_named and isinstance(value, float) and value > 0:
                return True
    return False


class UnitStreams:
    """Lets each unit draw numbers of its own, while user code around units draws as in one process.

    All stages run user code, and have to draw the same numbers in it: the noise of a diffusion
    model. A unit, which runs on one stage, draws from a stream that follows from the common one,
    the name of the unit and the micro-batch.

    Where stages run other parts of user code that draws, each micro-batch has a seed of its own, so
    that all stages draw the same numbers for it.

    Args:
        draws: whether units may draw; False: streams are not kept apart.
    """

    def __init__(self, draws: bool) -> None:
        self._draws = draws
        self._generators: list[torch.Generator] = []
        self._outside: list[torch.Tensor] = []
        self._base = self._micro_batch = 0
        self._common: list[torch.Tensor] = []

    def watch(self, name: str, unit: nn.Module) -> None:
        """Let a unit draw from its own stream in a training step."""
        if not self._draws:
            return
        device = next((p.device for p in unit.parameters()), torch.device("cpu"))
        self._generators = generators_of(device)
        number = crc32(name.encode())

        def enter(module: nn.Module, inputs: Any) -> None:
            if self._base and module.training:
                self._outside = [generator.get_state() for generator in self._generators]
                # Ranks that divide a sequence are at other places of the common stream.
                place = crc32(self._outside[-1].numpy().tobytes())
                seed = (self._base * 1_000_003 + self._micro_batch) ^ number ^ place
                for generator in self._generators:
                    generator.manual_seed(seed)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._outside:
                for generator, state in zip(self._generators, self._outside, strict=True):
                    generator.set_state(state)
                self._outside = []

        unit.register_forward_pre_hook(enter)
        unit.register_forward_hook(leave, always_call=True)

    def begin_step(self, device: torch.device, *, seeds: bool) -> None:
        """Take the seed of the step from the common stream, which moves on by a number.

        Args:
            device: the device of the model.
            seeds: let user code draw from a seed for each micro-batch.
        """
        if self._draws or seeds:
            self._base = 1 + int(torch.randint(2**31, ()))
        if seeds:
            self._generators = generators_of(device)
            self._common = [generator.get_state() for generator in self._generators]

    def begin(self, micro_batch: int) -> None:
        """Begin the forward pass of a stage."""
        self._micro_batch = micro_batch
        if self._common:
            for generator in self._generators:
                generator.manual_seed(self._base * 1_000_003 + micro_batch)

    def end_step(self, ranks: PipelineRanks | None) -> None:
        """Leave the step; with `ranks`, all stages continue from the numbers of the last stage."""
        self._base = 0
        if self._common:
            for generator, state in zip(self._generators, self._common, strict=True):
                generator.set_state(state)
            self._common = []
            return
        if ranks is None:
            return
        for generator in generators_of(ranks.device):
            state = generator.get_state().to(ranks.device)
            dist.broadcast(state, ranks.column[-1], group=ranks.groups[0])
            generator.set_state(state.cpu())
