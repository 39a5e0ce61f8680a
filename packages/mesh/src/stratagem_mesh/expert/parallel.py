"""The experts of a model, divided between ranks of the data axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stratagem.errors import ConfigurationError
from stratagem_mesh.expert.collectives import ExpertGroup
from stratagem_mesh.expert.dispatch import Dispatch
from stratagem_mesh.expert.following import announcing, take_part
from stratagem_mesh.expert.modules import find_experts, number_of_experts
from stratagem_torch.sharding import keep_whole

AXES = ("expert_replicate", "expert_shard", "expert", "expert_tensor")
"""The axes of the mesh of experts, over the same ranks as the mesh of the model."""


class ExpertParallel:
    """Divides experts over a mesh of their own.

    Args:
        mesh: the ranks, by `AXES`.
        has_values: whether ranks exchange values; ranks of a plan do not.
    """

    def __init__(self, mesh: DeviceMesh, *, has_values: bool = True) -> None:
        self._mesh = mesh
        self._has_values = has_values
        group = mesh.get_group("expert")
        self._group = ExpertGroup(group, dist.get_world_size(group), has_values)
        self._divided: dict[nn.Module, Dispatch] = {}
        self._last: dict[str, Tensor] = {}

    def like(self) -> ExpertParallel:
        """Return one for another model, of the same ranks."""
        return ExpertParallel(self._mesh, has_values=self._has_values)

    @property
    def load(self) -> dict[str, Tensor]:
        """The rows of this rank's tokens for each expert in the last step, by module."""
        return dict(self._last)

    def divide(self, model: nn.Module, names: Sequence[str] | None) -> None:
        """Leave each rank its experts of a model, in place.

        Raises:
            ConfigurationError: a module of experts is not there, or cannot be divided.
        """
        for name, module in find_experts(model, names, self._group.size).items():
            if module in self._divided:
                continue
            dispatch = Dispatch(name, module, number_of_experts(module), self._group)
            for key, whole in module._parameters.items():
                if whole is not None and whole.ndim:
                    module._parameters[key] = self._part(name, key, whole)
            for part in module.children():
                for parameter in part.parameters():
                    # Called for the tokens that a rank has received, with which no gather agrees.
                    keep_whole(parameter)
            vars(module)["forward"] = dispatch
            self._divided[module] = dispatch

    def _part(self, name: str, key: str, whole: nn.Parameter) -> nn.Parameter:
        if isinstance(whole, DTensor):
            raise ConfigurationError(
                f"{name}.{key} is divided by the tensor axis, and expert={self._group.size} "
                "divides it by expert: expected a tensor_plan without experts, or expert=1"
            )
        # Over all ranks, since a mesh that leaves some out has no coordinates in a plan.
        is_copied = self._mesh.size(3) > 1
        mesh = self._mesh[AXES[2:] if is_copied else AXES[2]]
        placements = [Shard(0), Replicate()] if is_copied else [Shard(0)]
        # With None nothing is sent, since the values are equal on all ranks.
        part = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
        return nn.Parameter(part, requires_grad=whole.requires_grad)

    def groups(self) -> list[nn.Module]:
        """Return the modules of experts, each of which is sharded by itself."""
        return list(self._divided)

    def sharding(
        self, shard: Callable[..., object], reshard: bool | int | None
    ) -> Callable[..., object]:
        """Return `fully_shard`, which shards experts over the ranks with the same ones.

        Args:
            shard: `fully_shard` with its options for other modules.
            reshard: its `reshard_after_forward`; a number of ranks need not divide these.
        """
        replicate = self._mesh.size(0)
        rest = self._mesh[AXES[:2] if replicate > 1 else AXES[1]]
        count = self._mesh.size(1)

        def placement(parameter: nn.Parameter) -> Shard:
            shape = parameter._local_tensor.shape if isinstance(parameter, DTensor) else ()
            return Shard(next((dim for dim, n in enumerate(shape) if n % count == 0), 0))

        def shard_part(part: nn.Module, **options: Any) -> object:
            if part in self._divided:
                options |= {"mesh": rest, "shard_placement_fn": placement}
                if type(reshard) is int and count % reshard:
                    options["reshard_after_forward"] = True
            return shard(part, **options)

        return shard_part

    def announcing(
        self, parts: Sequence[FSDPModule], announce: Callable[[int], None]
    ) -> AbstractContextManager[None]:
        """Return a context that announces calls of experts to ranks without a batch."""
        return announcing(self._divided, parts, announce)

    def take_part(self, parts: Sequence[FSDPModule], announced: Iterator[int]) -> Iterator[int]:
        """Take part in announced calls of experts; yield the other numbers."""
        return take_part(self._divided, parts, announced)

    def end_step(self) -> None:
        """Keep the load of the step that ends, and count anew."""
        taken = {one.name: one.take_load() for one in self._divided.values()}
        found = {name: load for name, load in taken.items() if load is not None}
        self._last = found or self._last
