"""FSDPStrategy: fully_shard, which gathers parameters group by group when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from stratagem.errors import ConfigurationError
from stratagem.strategies import Axis, Components
from stratagem_torch.distributed.activation_checkpointing import (
    ActivationCheckpointing,
    apply_activation_checkpointing,
    check_activation_checkpointing,
)
from stratagem_torch.plugin import FSDP
from stratagem_torch.sharding.parts import find_roots
from stratagem_torch.sharding.reductions import Reductions
from stratagem_torch.sharding.wrap_policy import WrapPolicy, check_policy, find_groups
from stratagem_torch.strategies.sharded import ShardedStrategy, check_reshard_after_forward

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST")
TAKES_UNUSED_PARAMETERS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether FSDP2 reduces a group of whose parameters a rank left some unused: since torch 2.13."""


class FSDPStrategy(ShardedStrategy):
    """Shards parameters, gradients and optimizer state over ranks (FSDP2, `fully_shard`).

    Runs on CPU over gloo as on GPU over nccl, with the same numbers. The model is divided into
    groups (`auto_wrap_policy`); a group's parameters are gathered before its forward and backward
    and freed after them. Every rank begins with the parameters of rank 0.

    `Lite.init_module()` and `Module.configure_model()` build a model in shards, with the values
    that its constructor would draw in one process: about 64 MiB are unsharded at a time.

    Ranks train on equal numbers of batches: a sampler repeats its first samples to make its shares
    equal, and an IterableDataset must yield equally many batches on each rank. An evaluation reads
    each sample once: a rank without a batch takes part in the all-gathers of the other ranks.
    Outside of the forward and backward pass of a step, the parameters of the module are the shards
    of this rank. A callback may change or freeze them there, or call the model without gradients on
    every rank. A change between the forward and the backward pass would be lost, so this is an
    error. Change parameters as a unit: an index or a slice of the sharded dimension, such as
    `weight[0]`, is a copy, and torch loses writes to this copy, from 2.15 on without an error. To
    read unsharded weights, use `Trainer.save_checkpoint` or `Lite.save`, which gather them.

    On CPU, the C allocator keeps freed memory in the threads of backward and of communication, so
    that a process with sharded parameters would grow as large as a process with all parameters.
    This strategy configures the allocator to return large blocks; see
    `stratagem_torch.distributed.allocator` for savings and costs.

    With manual optimization each child of the Module is sharded separately, so call children as
    modules. Parameters of the Module itself, or of several children, stay unsharded as well.

    Parameters without a dimension or without elements cannot be sharded: every rank holds them, and
    their gradients are averaged. A layer that holds a group must run on every rank, or on no rank:
    ranks gather its parameters together. Where ranks use different parameters within a group, pass
    `find_unused_parameters=True`; otherwise such ranks raise an error that names the parameters.

    Args:
        sharding_strategy: "FULL_SHARD" shards parameters, gradients and optimizer state;
            "SHARD_GRAD_OP" keeps parameters gathered between forward and backward; "NO_SHARD"
            shards no state, as ddp does; "HYBRID_SHARD" shards within a node and replicates over
            nodes, or as `device_mesh` defines.
        device_mesh: for HYBRID_SHARD, (replicas, shards); their product is the number of ranks.
        cpu_offload: keep shards and optimizer state in host memory, or an `OffloadPolicy`.
        mixed_precision: a dtype, for gathered parameters, inputs and activations of every group
            (gradients are reduced in float32), or a `MixedPrecisionPolicy`. The shards and the
            optimizer state stay in the dtype of the model. Losses are not scaled, which float16 may
            need: prefer bfloat16. With None, `precision` of the Trainer or Lite decides:
            "bf16-mixed" is autocast over float32 parameters, as under ddp.
        activation_checkpointing: compute activations of modules again in backward, in place of
            keeping them: True for every group, a class or a set of classes, or a function of a
            module. Batch norm counts each batch once.
        auto_wrap_policy: which modules are groups: a class or a set of classes, a function of a
            module, a smallest number of parameters, or a policy of `torch.distributed.fsdp.wrap`.
            None takes the elements of ModuleLists and Sequentials with a million parameters.
        reshard_after_forward: free the parameters of a group after its forward; None follows
            `sharding_strategy`; an int keeps them sharded over this number of ranks.
        backward_prefetch: "BACKWARD_PRE" gathers the next group's parameters while a group's
            gradients are computed, as FSDP2 does; "BACKWARD_POST" and None gather them afterwards,
            which needs less memory.
        forward_prefetch: gather the next group's parameters while a group runs. FSDP2 overlaps
            the two on GPU anyway, unless the CPU cannot keep up.
        limit_all_gathers: only True is accepted: FSDP2 never gathers further ahead than the next
            group.
        find_unused_parameters: let ranks use different parameters of a group; a parameter that
            is not used gets a gradient of zero.
        **components: see `ShardedStrategy` and `ParallelStrategy`.

    Raises:
        ConfigurationError: an option has an invalid value, or options exclude each other.

    Example:
        >>> from torch import nn
        >>> from stratagem.strategies import FSDPStrategy
        >>> strategy = FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer},
        ...                         activation_checkpointing=True)
        >>> strategy.sharding_strategy
        'FULL_SHARD'
    """

    capabilities = FSDP

    def __init__(
        self,
        *,
        sharding_strategy: str = "FULL_SHARD",
        device_mesh: tuple[int, int] | None = None,
        cpu_offload: bool | OffloadPolicy | None = None,
        mixed_precision: torch.dtype | MixedPrecisionPolicy | None = None,
        activation_checkpointing: ActivationCheckpointing = None,
        auto_wrap_policy: WrapPolicy | None = None,
        reshard_after_forward: bool | int | None = None,
        backward_prefetch: str | None = "BACKWARD_PRE",
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        find_unused_parameters: bool = False,
        **components: Any,
    ) -> None:
        super().__init__(**components)
        self.sharding_strategy = _name("sharding_strategy", sharding_strategy, SHARDING_STRATEGIES)
        self.replicas_and_shards = _checked_mesh(device_mesh, self.sharding_strategy)
        if not isinstance(cpu_offload, (bool, OffloadPolicy, NoneType)):
            raise ConfigurationError(
                f"cpu_offload={cpu_offload!r}: expected True, False, or a "
                "torch.distributed.fsdp.OffloadPolicy"
            )
        self.cpu_offload = cpu_offload
        self.mixed_precision = _policy(mixed_precision)
        self.activation_checkpointing = check_activation_checkpointing(activation_checkpointing)
        check_policy(auto_wrap_policy)
        self.auto_wrap_policy = auto_wrap_policy
        self.reshard_after_forward = _checked_reshard(reshard_after_forward, self.sharding_strategy)
        self.backward_prefetch = (
            None
            if backward_prefetch is None
            else _name("backward_prefetch", backward_prefetch, PREFETCHES)
        )
        self.forward_prefetch = forward_prefetch
        if not limit_all_gathers:
            raise ConfigurationError(
                f"limit_all_gathers={limit_all_gathers!r}: FSDP2 never gathers further ahead than "
                "the next group, so expected True: leave it out"
            )
        if find_unused_parameters and not TAKES_UNUSED_PARAMETERS:
            raise ConfigurationError(
                f"find_unused_parameters={find_unused_parameters!r} needs a newer torch, received "
                f"{torch.__version__}: leave it out and let every rank use all parameters of a "
                "group, or upgrade torch (2.13 has it)"
            )
        self.find_unused_parameters = find_unused_parameters

    # -- the mesh

    def bind(self, components: Components) -> None:
        """Take the components of the plan, and check the mesh and the dtypes against them."""
        super().bind(components)
        precision = components.precision
        if self.mixed_precision is not None and (
            precision.forward_context() is not None or precision.input_converter() is not None
        ):
            raise ConfigurationError(
                f"mixed_precision={self.mixed_precision!r} was passed to the strategy and "
                f"precision={precision.name!r} as well: give one of the two. precision='32-true' "
                "leaves the dtypes to mixed_precision"
            )
        shards = self.mesh_shape()[0][-1]
        reshard = self.reshard_after_forward
        if not isinstance(reshard, bool) and reshard is not None and shards % reshard:
            raise ConfigurationError(
                f"reshard_after_forward={reshard}: expected a number of ranks that divides the "
                f"{shards} shards, or True, False or None"
            )

    @property
    def communication_backend(self) -> str:
        """The requested backend, or the accelerator's; gloo is added for shards in host memory.

        The norm of gradients in host memory is reduced there. A backend such as
        "cpu:gloo,cuda:nccl" has one for it already.
        """
        backend = super().communication_backend
        kind = self.accelerator.device(self.components.devices[0]).type
        offloads = self.cpu_offload and not self.accelerator.is_host
        if offloads and self.process_group_backend is None and ":" not in backend:
            return f"cpu:gloo,{kind}:{backend}"
        return backend

    def mesh_shape(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return (ranks) for sharding alone, else (replicas, shards)."""
        world_size = self.components.device_count
        if self.sharding_strategy == "NO_SHARD":
            return (world_size, 1), ("replicate", "shard")
        if self.sharding_strategy != "HYBRID_SHARD":
            return (world_size,), ("shard",)
        if world_size == 1:
            raise ConfigurationError(
                "sharding_strategy='HYBRID_SHARD' replicates groups of ranks that shard, so it "
                "needs several ranks, received 1: pass devices=2 or more, or another "
                "sharding_strategy"
            )
        nodes, devices = self.components.num_nodes, len(self.components.devices)
        sizes = self.replicas_and_shards or (nodes, devices)
        if sizes[0] * sizes[1] != world_size:
            raise ConfigurationError(
                f"device_mesh={sizes!r} is for {sizes[0]} x {sizes[1]} = {sizes[0] * sizes[1]} "
                f"ranks, received {world_size}: expected (replicas, shards) whose product is the "
                "number of ranks"
            )
        return sizes, ("replicate", "shard")

    def rank_axes(self, world_size: int) -> Sequence[Axis]:
        """Return the mesh's dimensions as axes along which each rank reads batches of its own."""
        return [Axis(name, size) for size, name in zip(*self.mesh_shape(), strict=True)]

    # -- sharding

    def shard(self, module: nn.Module) -> None:
        """Shard the groups and then the rest, under `module`."""
        if not any(True for _ in module.parameters()):
            return  # nothing to shard, and nothing that needs communication
        groups = find_groups(module, self.auto_wrap_policy)
        apply_activation_checkpointing(module, self.recomputed, groups)
        arguments: dict[str, Any] = {
            "mesh": self.device_mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": self.mixed_precision or MixedPrecisionPolicy(),
            "offload_policy": self._offload_policy(),
        }
        self.shard_groups(module, groups, partial(fully_shard, **arguments))
        for root in find_roots(module):
            self._set_prefetch(root)
            if self.find_unused_parameters:
                root.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        if not self.find_unused_parameters:
            Reductions(self.device).watch(module)

    def _offload_policy(self) -> OffloadPolicy:
        if isinstance(self.cpu_offload, OffloadPolicy):
            return self.cpu_offload
        if self.cpu_offload:
            return CPUOffloadPolicy(pin_memory=self.accelerator.pins_memory)
        return OffloadPolicy()

    def _set_prefetch(self, root: nn.Module) -> None:
        order = [part for part in root.modules() if isinstance(part, FSDPModule)]
        if self.forward_prefetch:
            for group, following in pairwise(order):
                group.set_modules_to_forward_prefetch([following])
        if self.backward_prefetch != "BACKWARD_PRE":
            # FSDP2 has no switch. With a list of the group that is there already, it does not
            # look for another one.
            for group in order:
                group.set_modules_to_backward_prefetch([group])


def _policy(given: torch.dtype | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy | None:
    if given is None or isinstance(given, MixedPrecisionPolicy):
        return given
    if isinstance(given, torch.dtype) and given.is_floating_point:
        return MixedPrecisionPolicy(param_dtype=given, reduce_dtype=torch.float32)
    raise ConfigurationError(
        f"mixed_precision={given!r}: expected a floating-point dtype such as torch.bfloat16, or a "
        "torch.distributed.fsdp.MixedPrecisionPolicy"
    )


def _name(option: str, given: Any, expected: tuple[str, ...]) -> str:
    """Return the name of a choice, also of one given as FSDP1's enumeration."""
    name = str(getattr(given, "name", given)).upper()
    if name not in expected:
        raise ConfigurationError(
            f"{option}={given!r}: expected one of {', '.join(map(repr, expected))}"
        )
    return name


def _checked_mesh(given: Any, sharding_strategy: str) -> tuple[int, int] | None:
    if given is None:
        return None
    if isinstance(given, DeviceMesh):
        given = given.shape
    sizes = tuple(given) if isinstance(given, (list, tuple)) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigurationError(
            f"device_mesh={given!r}: expected (replicas, shards), two numbers of ranks"
        )
    if sharding_strategy != "HYBRID_SHARD":
        raise ConfigurationError(
            f"device_mesh={given!r} is for sharding_strategy='HYBRID_SHARD', received "
            f"sharding_strategy={sharding_strategy!r}: change one of the two"
        )
    return sizes


def _checked_reshard(given: bool | int | None, sharding_strategy: str) -> bool | int | None:
    if sharding_strategy == "SHARD_GRAD_OP":
        if given is not None and given is not False:
            raise ConfigurationError(
                "sharding_strategy='SHARD_GRAD_OP' keeps parameters whole after forward, received "
                f"reshard_after_forward={given!r}: leave it out, or take 'FULL_SHARD'"
            )
        return False
    return check_reshard_after_forward(given)
