"""The values that the stages of a model exchange in a run of user code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

Key = tuple[Literal["output", "argument"], str, int, int]
"""A result or an argument: the name of the unit, the number of its call, and the leaf."""


@dataclass(frozen=True)
class Value:
    """A tensor that crosses stages.

    Attributes:
        key: the output or the argument of a unit's call.
        stage: the stage that computes it.
        readers: the later stages that read it.
        shape, dtype: those of the tensor.
        differentiable: whether the readers send a gradient back.

    Example:
        >>> Value(("output", "layers.1", 0, 0), 0, (1,), (2, 8), torch.float32, True).readers
        (1,)
    """

    key: Key
    stage: int
    readers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True, eq=False)
class Program:
    """The result of one dry run of user code: what stages exchange for a batch of its shapes.

    Attributes:
        values: the values, in the order in which they are made.

    Example:
        >>> value = Value(("output", "layers.1", 0, 0), 0, (1,), (2, 8), torch.float32, True)
        >>> program = Program((value,))
        >>> program.sends(0) == program.reads(1) == (value,)
        True
    """

    values: tuple[Value, ...]

    def reads(self, stage: int) -> tuple[Value, ...]:
        """Return the values that a stage receives, in the order in which they are made."""
        return self._reads.get(stage, ())

    def sends(self, stage: int) -> tuple[Value, ...]:
        """Return the values that a stage computes for others, in the order of `values`."""
        return self._sends.get(stage, ())

    @cached_property
    def _reads(self) -> dict[int, tuple[Value, ...]]:
        readers = {reader for value in self.values for reader in value.readers}
        return {r: tuple(value for value in self.values if r in value.readers) for r in readers}

    @cached_property
    def _sends(self) -> dict[int, tuple[Value, ...]]:
        stages = {value.stage for value in self.values}
        return {s: tuple(value for value in self.values if value.stage == s) for s in stages}
