"""ModelParallelStrategy: tensor parallelism in groups of ranks, FSDP over the groups."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Sequence
from ctypes import string_at
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stratagem.data import map_tensors
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.strategies import Axis, user_module
from stratagem_torch.distributed.activation_checkpointing import (
    ActivationCheckpointing,
    apply_activation_checkpointing,
    check_activation_checkpointing,
)
from stratagem_torch.plugin import MODEL_PARALLEL
from stratagem_torch.sharding.deferred import DeferredBuild
from stratagem_torch.sharding.reductions import Reductions
from stratagem_torch.sharding.shard_model import give_values
from stratagem_torch.sharding.wrap_policy import WrapPolicy, check_policy, find_groups
from stratagem_torch.strategies.sharded import ShardedStrategy, check_reshard_after_forward

_SEED = "STRATAGEM_SEED"
"""The environment variable that `seed_everything` sets."""

Size = int | Literal["auto"]
Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module | None]


class ModelParallelStrategy(ShardedStrategy):
    """Arranges the ranks in a mesh of data times tensor parallelism.

    The model divides its layers between the ranks of a tensor-parallel group with torch's
    `parallelize_module`: either in `parallelize_fn`, or in `configure_model` of a Module, where the
    mesh is `self.trainer.strategy.device_mesh`. Afterwards, modules that are not sharded with
    `fully_shard` are sharded over the data-parallel dimension, so that parameters, gradients and
    optimizer state are spread over all ranks.

    The ranks of a tensor-parallel group read the same batches. Samplers are divided accordingly; an
    IterableDataset must divide itself by `trainer.ranks.data_split`, not by rank.

    Args:
        data_parallel_size: the number of tensor-parallel groups; "auto": the number of nodes, or
            the world size divided by `tensor_parallel_size`.
        tensor_parallel_size: the number of ranks in a group; "auto": the ranks of a node, or the
            world size divided by `data_parallel_size`.
        parallelize_fn: called as `parallelize_fn(model, device_mesh)` with unsharded parameters
            that are equal on all ranks; changes the model in place.
            `device_mesh["tensor_parallel"]`
            and `device_mesh["data_parallel"]` are the mesh's dimensions.
        auto_wrap_policy: selects the modules to shard as groups; see `FSDPStrategy`.
        activation_checkpointing, reshard_after_forward: see `FSDPStrategy`.
        **components: see `ShardedStrategy` and `ParallelStrategy`.

    Raises:
        ConfigurationError: a size is not a number of ranks, or their product not the world size.

    Example:
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> from stratagem.strategies import ModelParallelStrategy
        >>> def parallelize(model, device_mesh):
        ...     plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        ...     return parallelize_module(model, device_mesh["tensor_parallel"], plan)
        >>> strategy = ModelParallelStrategy(parallelize_fn=parallelize, tensor_parallel_size=2)
        >>> strategy.tensor_parallel_size
        2
    """

    capabilities = MODEL_PARALLEL

    def __init__(
        self,
        *,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        parallelize_fn: Parallelize | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        activation_checkpointing: ActivationCheckpointing = None,
        reshard_after_forward: bool | int | None = None,
        **components: Any,
    ) -> None:
        super().__init__(**components)
        self.activation_checkpointing = check_activation_checkpointing(activation_checkpointing)
        self.data_parallel_size = _checked("data_parallel_size", data_parallel_size)
        self.tensor_parallel_size = _checked("tensor_parallel_size", tensor_parallel_size)
        if parallelize_fn is not None and not callable(parallelize_fn):
            raise ConfigurationError(
                f"parallelize_fn={parallelize_fn!r}: expected a function (model, device_mesh)"
            )
        self.parallelize_fn = parallelize_fn
        check_policy(auto_wrap_policy)
        self.auto_wrap_policy = auto_wrap_policy
        self.reshard_after_forward = check_reshard_after_forward(reshard_after_forward)

    def mesh_shape(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return (data_parallel_size, tensor_parallel_size)."""
        data, tensor, world_size = (
            self.data_parallel_size,
            self.tensor_parallel_size,
            self.components.device_count,
        )
        if data == "auto" and tensor == "auto":
            sizes = self.components.num_nodes, len(self.components.devices)
        elif data == "auto":
            assert tensor != "auto"
            sizes = max(1, world_size // tensor), tensor
        else:
            sizes = data, max(1, world_size // data) if tensor == "auto" else tensor
        if sizes[0] * sizes[1] != world_size:
            raise ConfigurationError(
                f"data_parallel_size={data!r} and tensor_parallel_size={tensor!r} are for "
                f"{sizes[0]} x {sizes[1]} = {sizes[0] * sizes[1]} ranks, received {world_size} "
                f"({len(self.components.devices)} device(s), {self.components.num_nodes} node(s)): "
                "expected sizes whose product is the number of ranks"
            )
        return sizes, ("data_parallel", "tensor_parallel")

    def setup_environment(self) -> None:
        """Join the process group, and let ranks that share a model draw the same numbers.

        torch seeds its generator alike on each rank. Python and NumPy do not, and batches that are
        mixed or augmented by their numbers would differ.
        """
        super().setup_environment()
        if self.ranks.world_size > 1 and _SEED not in os.environ:
            drawn = self.ranks.gather_objects(random.getrandbits(32))[0]
            seed = self.ranks.seed(drawn)
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)

    def rank_axes(self, world_size: int) -> Sequence[Axis]:
        """Return the data axis and the tensor axis, whose ranks read the same batches."""
        (groups, ranks), _ = self.mesh_shape()
        return Axis("data", groups), Axis("tensor", ranks, batches="same")

    def _compare_inputs(self, module: nn.Module) -> None:
        """Compare the inputs of training calls 1, 2, 4, 8 and so on between ranks."""
        calls = 0

        def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal calls
            if not (module.training and torch.is_grad_enabled()):
                return
            calls += 1
            if calls & (calls - 1) == 0:
                self._compare([args, kwargs])

        module.register_forward_pre_hook(compare, with_kwargs=True)

    def _compare(self, inputs: Any) -> None:
        """Refuse different inputs on ranks that share a model, which would train on nonsense.

        Raises:
            UserCodeError: ranks of one part of the data have read different batches.
        """
        contents: list[str] = []
        map_tensors(lambda tensor: contents.append(_digest(tensor)), inputs)
        of_ranks = self.ranks.gather_objects(contents)
        for group in self.ranks.data_groups:
            if any(of_ranks[rank] != of_ranks[group[0]] for rank in group):
                place = self.ranks.place(group)
                raise UserCodeError(
                    f"ranks {', '.join(map(str, group))}{place and f' ({place})'} read different "
                    "batches; they share a model, so expected the same batch on each. Let a "
                    "sampler divide the data, as in lite.setup_dataloaders(loader), or divide it "
                    "by data_split of trainer.ranks or lite.ranks, not by rank"
                )

    def shard(self, module: nn.Module) -> None:
        """Let the user's function divide the layers, then shard over the data-parallel ranks."""
        if not any(True for _ in module.parameters()):
            return
        for name, part in module.named_modules():
            give_values(part, self.device, name=name.removeprefix("module."))
        # Parameters that were sharded eagerly are gathered when a function reaches them.
        with DeferredBuild(self.accelerator, self.device):
            self.divide(user_module(module))
        self._check_divided(module)
        groups = find_groups(module, self.auto_wrap_policy)
        apply_activation_checkpointing(module, self.recomputed, groups)
        arguments: dict[str, Any] = {
            "mesh": self.data_mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(),
        }
        self.shard_groups(module, groups, partial(fully_shard, **arguments))
        _check_elements(module)
        if self.ranks.world_size > len(self.ranks.data_groups):
            self._compare_inputs(module)
        shards = self.data_mesh.get_group(self.data_mesh.ndim - 1)
        Reductions(self.device, shards).watch(module)

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh over which parameters are sharded; with 2 dimensions: replicas, shards."""
        return self.device_mesh["data_parallel"]

    def divide(self, model: nn.Module) -> None:
        """Divide the layers of the user's model over the mesh, in place, before it is sharded."""
        if self.parallelize_fn is not None:
            self._parallelize(model)

    def _check_divided(self, module: nn.Module) -> None:
        """Refuse tensor parallelism of nothing: its ranks would do the same work twice."""
        size = self.device_mesh["tensor_parallel"].size()
        meshes = (getattr(p, "device_mesh", None) for p in module.parameters())
        dims = {dim for mesh in meshes if mesh is not None for dim in mesh.mesh_dim_names or ()}
        if size > 1 and "tensor_parallel" not in dims:
            raise ConfigurationError(
                f"tensor_parallel_size={size}, but no layer is divided, so that {size} ranks would "
                "each do all the work: pass parallelize_fn, divide layers in configure_model, or "
                "pass tensor_parallel_size=1"
            )

    def _parallelize(self, model: nn.Module) -> None:
        assert self.parallelize_fn is not None
        returned = self.parallelize_fn(model, self.device_mesh)
        if returned is not None and returned is not model:
            raise UserCodeError(
                f"parallelize_fn returned another {type(returned).__name__} than the model that it "
                "was given: expected it to change the model in place, as parallelize_module and "
                "fully_shard do, and to return it"
            )


def _digest(tensor: Tensor) -> str:
    """Return the shape of a tensor and a hash of its bytes."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    values = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(string_at(values.data_ptr(), values.nbytes), digest_size=16)
    return f"{tuple(tensor.shape)} {digest.hexdigest()}"


def _check_elements(module: nn.Module) -> None:
    """Refuse trained parameters without elements that user code has sharded by `fully_shard`."""
    for name, parameter in module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        is_sharded = mesh is not None and "data_parallel" in (mesh.mesh_dim_names or ())
        if is_sharded and parameter.requires_grad and not parameter.numel():
            raise ConfigurationError(
                f"the parameter {name!r} has no elements (shape {tuple(parameter.shape)}), and "
                "fully_shard cannot reduce its gradient: pass it in ignored_params of fully_shard, "
                "or leave fully_shard to the strategy"
            )


def _checked(option: str, size: Any) -> Size:
    if size == "auto":
        return "auto"
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(
            f"{option}={size!r}: expected a number of ranks of at least 1, or 'auto'"
        )
    return size
