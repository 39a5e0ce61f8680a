"""The sizes of a mesh that suit a number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import gcd, prod
from typing import Any

AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
"""The sizes, the outermost first; `expert` divides ranks of shard times context."""

_ARGUMENTS = ("tensor", "context", "expert", "replicate", "pipeline")
"""The arguments in the order in which they are shown."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a mesh.

    Example:
        >>> sizes = Sizes(shard=8, tensor=8)
        >>> sizes.world, sizes.arguments, str(sizes)
        (64, {'tensor': 8}, 'shard 8 x tensor 8')
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def ranks_of_batch(self) -> int:
        """The number of ranks that read the same batches."""
        return self.pipeline * self.context * self.tensor

    @property
    def shards(self) -> int:
        """The number of ranks over which a parameter is sharded; not for experts."""
        return self.shard * self.context

    @property
    def arguments(self) -> dict[str, int]:
        """The arguments of the strategy, without defaults; `shard` is the rest."""
        return {axis: self[axis] for axis in _ARGUMENTS if self[axis] > 1}

    @property
    def complexity(self) -> tuple[int, int]:
        """The number of axes besides `shard`, and the product of their sizes."""
        return len(self.arguments), prod(self.arguments.values())

    def __getitem__(self, axis: str) -> int:
        size: int = getattr(self, axis)
        return size

    def __str__(self) -> str:
        given = [f"{axis} {self[axis]}" for axis in AXES if self[axis] > 1]
        return " x ".join(given) or "one rank"

    def place(self, axis: str, devices: int) -> tuple[int, int, int]:
        """Return a group's number of ranks, its ranks on a node, and the number of nodes.

        Args:
            axis: an axis, or "shards": the ranks that share parameters.
            devices: the number of devices on each node.

        Example:
            >>> Sizes(replicate=2, shard=4, tensor=8).place("shards", 8)
            (4, 1, 4)
        """
        inner = {
            "tensor": 1,
            "context": self.tensor,
            "expert": self.tensor,
            "shards": self.tensor,
            "shard": self.tensor * self.context,
            "replicate": self.tensor * self.shards,
            "pipeline": self.tensor * self.shards * self.replicate,
        }[axis]
        size = self.shards if axis == "shards" else self[axis]
        on_node = min(size, max(1, devices // inner))
        return size, on_node, -(-size // on_node)


@dataclass(frozen=True)
class Limits:
    """The limits of a model.

    Attributes:
        refused: why an axis has the size 1, by axis.
        heads: the number of heads of a layer; 0: unknown.
        experts: the number of experts of a layer; 0: no experts.
        stages: the most stages of a pipeline; 0: no pipeline.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    heads: int = 0
    experts: int = 0
    stages: int = 0


def all_sizes(devices: int, num_nodes: int, limits: Limits) -> Iterator[Sizes]:
    """Yield the sizes that suit the machines and the model.

    Ranks of `tensor` and `context` lie on one node, since they exchange activations in each layer.
    `replicate` is at most the number of nodes: within a node shards cost no time.

    Args:
        devices: the number of devices on each node.
        num_nodes: the number of nodes.
        limits: of the model.

    Example:
        >>> [str(sizes) for sizes in all_sizes(2, 1, Limits())]
        ['shard 2', 'context 2', 'tensor 2']
    """
    world = devices * num_nodes

    def allowed(axis: str, of: int) -> list[int]:
        return [1] if axis in limits.refused else divisors(of)

    tensors = [size for size in allowed("tensor", devices) if not limits.heads % size]
    contexts = allowed("context", devices)
    stages = [size for size in allowed("pipeline", world) if size <= max(1, limits.stages)]
    for tensor, context, pipeline in product(tensors, contexts, stages):
        rest, left = divmod(world, tensor * context * pipeline)
        if devices % (tensor * context) or left:
            continue
        for replicate in allowed("replicate", gcd(rest, num_nodes)):
            shard = rest // replicate
            experts = allowed("expert", gcd(limits.experts, shard * context))
            for expert in experts if limits.experts else [1]:
                yield Sizes(pipeline, replicate, shard, context, tensor, expert)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def limits_of(model: Any) -> tuple[int, int]:
    """Return the number of heads of a layer and of experts of a layer; 0: unknown.

    Args:
        model: a model; its `config` (of transformers) or its modules know them.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    heads = _number(config, "num_attention_heads", "n_head", "num_heads")
    if not heads:
        found = (
            _number(part, "num_heads", "n_heads", "n_head", "heads") for part in model.modules()
        )
        heads = next(filter(None, found), 0)
    return heads, _number(config, "num_local_experts", "num_experts", "n_routed_experts")


def _number(of: Any, *names: str) -> int:
    values = (getattr(of, name, None) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)
