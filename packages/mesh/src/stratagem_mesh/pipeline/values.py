"""Stages of a model, and the values that they exchange in a run of user code."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

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
        shape, dtype: the shape and the dtype of the tensor.
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
    """The result of a dry run of user code: the values that stages exchange for its shapes.

    Attributes:
        values: the values, in the order of their computation.
        state: the attributes that user code sets from values of stages; see `State`.
        draws_before_cut: whether user code draws random numbers before the first call of a unit
            that is not in stage 0.
        draws_after_cut: whether it draws numbers later. Stages that end before do not draw them.
        run: notes of StagedModel for its runs.

    Example:
        >>> value = Value(("output", "layers.1", 0, 0), 0, (1,), (2, 8), torch.float32, True)
        >>> program = Program((value,))
        >>> program.sends(0) == program.reads(1) == (value,)
        True
    """

    values: tuple[Value, ...]
    draws_before_cut: bool = False
    draws_after_cut: bool = False
    state: tuple[Any, ...] = ()
    run: Any = field(default=None, repr=False)

    def reads(self, stage: int) -> tuple[Value, ...]:
        """Return the values that a stage receives, in the order of their computation."""
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


@dataclass(frozen=True)
class Stages:
    """The division of a model into stages.

    A unit is a largest module that belongs to one stage, such as a block, an embedding or a head.

    Attributes:
        count: the number of stages.
        cuts: the names of the first units of all stages but the first.
        units: the stage of each unit, by its name.
        parameters: the stages that hold a parameter, by its name. Further names of a tied weight
            are in it, too.
        tied: the names of each parameter that several stages hold, and these stages.
        costs: the cost of each stage, as a share of 1.

    Example:
        >>> from stratagem_mesh.pipeline.cuts import find_stages
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
        >>> stages = find_stages(model, 2)
        >>> stages.cuts, stages.units, stages.costs
        (('2',), {'0': 0, '1': 0, '2': 1, '3': 1}, (0.5, 0.5))
    """

    count: int
    cuts: tuple[str, ...]
    units: dict[str, int]
    parameters: dict[str, tuple[int, ...]]
    tied: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
    costs: tuple[float, ...]
