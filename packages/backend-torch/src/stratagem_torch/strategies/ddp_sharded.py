"""DDPShardedStrategy: DDP with the optimizer state of each parameter on one of the ranks."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from stratagem.errors import ConfigurationError
from stratagem.state import (
    load_named_state,
    named_state,
    per_parameter_state,
)
from stratagem.strategies import Optimizers, PreparedModel, make_optimizers
from stratagem_torch.sharding.layout import packed_state_of
from stratagem_torch.strategies.ddp import DDPStrategy

with warnings.catch_warnings():
    # The package compiles its functional optimizers, which torch itself calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class DDPShardedStrategy(DDPStrategy):
    """DDP that keeps the optimizer state of each parameter on a single rank (ZeRO, stage 1).

    Each optimizer becomes a `ShardedOptimizer`, and keeps its class, options and parameter groups.
    Learning rate schedulers work, whether they were created before or after. A checkpoint contains
    the complete optimizer state, as under any other strategy.

    Args:
        parameters_as_bucket_view: let parameters share memory with the buckets that send them after
            a step, for fewer and larger messages.
        **options: the options of `DDPStrategy` except `model_averaging_period`.

    Raises:
        ConfigurationError: if `model_averaging_period` is given.

    Example:
        >>> from stratagem.strategies import DDPShardedStrategy
        >>> DDPShardedStrategy(parameters_as_bucket_view=True).parameters_as_bucket_view
        True
    """

    def __init__(self, *, parameters_as_bucket_view: bool = False, **options: Any) -> None:
        super().__init__(**options)
        if self.communication_hook.averaging_period is not None:
            raise ConfigurationError(
                "model_averaging_period (post-local SGD) lets ranks step on gradients of their "
                "own, and strategy='ddp_sharded' steps each parameter on one rank: use "
                "strategy='ddp'"
            )
        self.parameters_as_bucket_view = parameters_as_bucket_view

    def prepare(
        self, module: nn.Module, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        """Return the model in DDP, with sharded optimizers; see `Strategy.prepare`."""

        def sharded() -> list[Optimizer]:
            return [self.shard(optimizer) for optimizer in make_optimizers(optimizers)]

        return super().prepare(module, sharded, move_to_device=move_to_device)

    def setup_optimizer(self, prepared: PreparedModel, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer sharded; see `Strategy.setup_optimizer`."""
        return self.shard(optimizer)

    def shard(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Return an optimizer that keeps this rank's shard of the state of `optimizer`."""
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer
        return ShardedOptimizer(optimizer, parameters_as_bucket_view=self.parameters_as_bucket_view)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by names: whole on rank 0, this rank's shard elsewhere."""
        if not isinstance(optimizer, ShardedOptimizer):
            return super().optimizer_state(prepared, optimizer)
        source = optimizer.source
        groups = per_parameter_state(source, super().optimizer_state(prepared, source))
        own = per_parameter_state(source, named_state(optimizer.optim, prepared.original))
        return {**groups, "state": self._gather_on_rank_0(own["state"])}

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load a whole optimizer state; this rank keeps its shard."""
        if not isinstance(optimizer, ShardedOptimizer):
            super().load_optimizer_state(prepared, optimizer, state)
            return
        state = per_parameter_state(optimizer.source, state)
        # Checks the groups and takes their options, which schedulers and users see.
        super().load_optimizer_state(prepared, optimizer.source, {**state, "state": {}})
        optimizer.param_groups = optimizer.source.param_groups
        own_ids = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
        own = {name for name, p in prepared.original.named_parameters() if id(p) in own_ids}
        load_named_state(
            optimizer.optim,
            prepared.original,
            {
                "state": {name: entry for name, entry in state["state"].items() if name in own},
                # Groups without a parameter of this rank are alike, but for the lists of names.
                "param_groups": [
                    {
                        **{option: value for option, value in group.items() if option != "names"},
                        "params": [name for name in group["params"] if name in own],
                    }
                    for group in state["param_groups"]
                ],
            },
        )

    def largest_share(self, sizes: Iterable[int]) -> float:
        """Return the part of the optimizer's state on the fullest rank, for `stratagem plan`.

        torch's `ZeroRedundancyOptimizer` gives the largest parameter that is left to the rank that
        has least.

        Args:
            sizes: of the trained parameters.
        """
        held = [0] * self.components.device_count
        for size in sorted(sizes, reverse=True):
            held[held.index(min(held))] += size
        return max(held) / max(1, sum(held))

    def _gather_on_rank_0(self, own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return every rank's entries on rank 0, and `own` elsewhere.

        What is no tensor goes to all ranks at once; tensors go to rank 0 one by one, so that only
        rank 0 ever holds more than its shard.
        """
        described = self.ranks.gather_objects(
            {
                name: {
                    key: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else [value]
                    for key, value in entry.items()
                }
                for name, entry in own.items()
            }
        )
        if self.ranks.global_rank != 0:
            for entry in own.values():
                for value in entry.values():
                    if isinstance(value, Tensor):
                        dist.send(value.detach().to(self.device).contiguous(), 0)
            return own
        gathered = dict(own)
        for rank, entries in enumerate(described[1:], 1):
            for name, entry in entries.items():
                received: dict[str, Any] = {}
                for key, value in entry.items():
                    if isinstance(value, list):
                        received[key] = value[0]
                        continue
                    shape, dtype = value
                    tensor = torch.empty(shape, dtype=dtype, device=self.device)
                    dist.recv(tensor, rank)
                    # Gathered state waits for the disk, where it does not take up the device.
                    received[key] = tensor.cpu()
                gathered[name] = received
        return gathered


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """A user's optimizer, stepped on this rank's shard of its parameters.

    The parameters are assigned to ranks once; after a step every rank sends its shard to the
    others. The user's optimizer and this optimizer share their parameter groups, so that a
    scheduler of either optimizer controls both. A third optimizer, `optim`, holds the state: a copy
    of the user's optimizer with the parameters of this rank.

    Args:
        source: the user's optimizer; its existing state is taken over.
        parameters_as_bucket_view: see torch's `ZeroRedundancyOptimizer`.

    Raises:
        ConfigurationError: the optimizer is LBFGS, which needs all parameters together, packs its
            state in tensors of torchao, or has parameters of several dtypes.
    """

    def __init__(self, source: Optimizer, *, parameters_as_bucket_view: bool = False) -> None:
        if isinstance(source, LBFGS):
            raise ConfigurationError(
                "strategy='ddp_sharded' steps each parameter on one rank, and LBFGS needs all of "
                "them together: use strategy='ddp'"
            )
        if (packed := packed_state_of(source)).startswith("torchao."):
            raise ConfigurationError(
                f"{packed} packs its state in a form that ranks cannot send, and "
                "strategy='ddp_sharded' gathers states for a checkpoint: use "
                "stratagem_extras.optimizers.AdamW8bit, or strategy='ddp'"
            )
        kinds = {p.dtype for group in source.param_groups for p in group["params"]}
        if len(kinds) > 1:
            raise ConfigurationError(
                "strategy='ddp_sharded' expected the parameters of an optimizer in one dtype, "
                f"received {', '.join(sorted(map(str, kinds)))}: make an optimizer for "
                "each, or use strategy='ddp'"
            )
        self.source = source

        def part_of_source(groups: list[dict[str, Any]], **_: Any) -> Optimizer:
            return _with_groups(source, groups)

        super().__init__(
            source.param_groups,
            part_of_source,  # type: ignore[arg-type]
            parameters_as_bucket_view=parameters_as_bucket_view,
            **source.defaults,
        )
        self.param_groups = source.param_groups
        source.state = defaultdict(dict)

    @property
    def _opt_called(self) -> bool:
        """Whether there was a step; a scheduler asks the optimizer that it was made for."""
        return getattr(self.source, "_opt_called", False)

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        self.source._opt_called = value  # type: ignore[attr-defined]

    def step(self, closure: Any = None, **arguments: Any) -> Any:
        """Step this rank's shard, then bring every rank's shard to all."""
        result = super().step(closure, **arguments)
        self._opt_called = True
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, on every rank alike."""
        super().add_param_group(param_group)


def _with_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer like the given one with other groups and the state of their parameters.

    A copy, and not a call of the class: its constructor may take other arguments than those that
    `defaults` lists (AdamW's does).
    """
    copied: Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    # A scheduler has put a counting `step` on the instance, which would step the original.
    copied.__dict__.pop("step", None)
    copied.param_groups = groups
    own = [p for group in groups for p in group["params"]]
    copied.state = defaultdict(dict, {p: optimizer.state[p] for p in own if p in optimizer.state})
    return copied
